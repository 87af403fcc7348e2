"""Whole commands, as a user types them: the main job, verify, continuing, stopping and being
killed."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.commands import TINY, command
from support.launched import Launched
from support.paths import ROOT
from support.records import losses, numbers
from support.run_files import config_of, last_step, result
from support.waiting import until
from support.world import run_world
from titanlike.core.checkpoint.discovery import select_resume
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.config.schema import Config
from titanlike.core.training.loop import train

TRAIN = ROOT / "train.py"


@pytest.mark.slow
def test_the_main_job_learns_and_prints_how_to_continue(tmp_path: Path) -> None:
    words = [sys.executable, str(TRAIN), "run_dir=run"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert records[0]["loss"] == pytest.approx(5.6, abs=0.2)  # nats a byte, knowing nothing
    assert records[-1]["val_loss"] < 2.0
    assert [*records[0]][:5] == ["step", "loss", "grad_norm", "lr", "tokens"]
    found = result(tmp_path / "run")
    assert (found["status"], found["value"]) == ("completed", records[-1]["val_loss"])
    assert (tmp_path / "run" / "checkpoints" / "step-00000300" / "COMMITTED").exists()
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    last = done.stdout.strip().splitlines()[-1]
    assert last == f"continue with: python {TRAIN} --config-path {tmp_path / 'run'} steps=600"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of 5 steps, in a folder whose name has a space, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    words = [
        "model.num_hidden_layers=2",
        "checkpoint.every=2",
        "checkpoint.last=true",
        "run_dir=a run",
    ]
    done = command(*TINY, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "a run", done.stdout


def test_the_last_line_of_a_run_is_a_command_that_continues_it(finished: tuple[Path, str]) -> None:
    """Here in another folder, from a named checkpoint."""
    run, printed = finished
    line = printed.strip().splitlines()[-1].removeprefix(f"continue with: python {TRAIN} ")
    before, named = losses(run), run / "checkpoints" / "step-00000002"
    words = [*shlex.split(line), "run_dir=../on", f"checkpoint.resume='{named}'"]
    on = command(*words, cwd=run)
    assert on.returncode == 0, on.stderr
    assert "resuming from step 2" in on.stdout
    assert losses(run.parent / "on")[:3] == before[2:] and len(losses(run.parent / "on")) == 8
    assert losses(run) == before


@pytest.mark.parametrize("resume", ["never", "checkpoints/step-00000002"])
def test_a_run_does_not_start_before_existing_checkpoints(
    resume: str, finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished[0])
    with pytest.raises(ValueError, match="write another run_dir"):
        select_resume(Config(run_dir=".", checkpoint=Checkpoint(resume=resume)))


def test_a_folder_that_cannot_be_written_is_a_mistake_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = command(*TINY, "run_dir=file", cwd=tmp_path)
    assert done.returncode == 2
    assert "run_dir=" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_verify_leaves_a_runs_files_alone_and_ends_with_a_verdict(
    finished: tuple[Path, str],
) -> None:
    run, _ = finished
    before = {path.name: path.read_bytes() for path in run.glob("*.*")}
    words = [*TINY, "model.num_hidden_layers=2", "pp=2", f"run_dir='{run}'"]
    done = command(*words, tool="tools/verify.py", cwd=run.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith("PASS")
    assert {path.name: path.read_bytes() for path in run.glob("*.*")} == before


# --- real signals and kills: the same command resumes, with the metrics of an uninterrupted run
# --------

STEPS, EVERY = 60, 10
SHORT = [*TINY, "model.num_hidden_layers=4", "batch_size=8", "device=cpu", "data=synthetic"]
SHORT += ["data.vocab_size=64", "checkpoint.last=true", "checkpoint.keep=2", "pp=2"]
SHORT += [f"steps={STEPS}", f"checkpoint.every={EVERY}"]


def newest(run_dir: Path) -> int:
    steps = (run_dir / "checkpoints").glob("step-*/COMMITTED")
    return max((int(path.parent.name.removeprefix("step-")) for path in steps), default=0)


def rank(launched: Launched, number: int) -> psutil.Process:
    """The process of a rank, not the driver or torchrun."""
    (process,) = (p for p in launched.alive() if p.environ().get("RANK") == str(number))
    return process


def assert_goes_on_as_if_uninterrupted(run_dir: Path, whole: Path) -> None:
    config = config_of(run_dir)
    for folder in (run_dir, whole):
        run_world(train, config, folder)
    assert numbers(run_dir) == numbers(whole)


@pytest.mark.grid
def test_a_signal_stops_a_run_after_its_step_with_a_checkpoint(tmp_path: Path) -> None:
    """A signal to the driver of two workers."""
    run_dir = tmp_path / "run"
    launched = Launched(*SHORT, f"run_dir={run_dir}", program=TRAIN, real=True)
    until(lambda: last_step(run_dir) > 2)
    launched.process.send_signal(signal.SIGINT)
    code, out, err = launched.wait(60)
    assert launched.all_exit()
    text = "stopping after the next step with a checkpoint; a second signal stops immediately"
    assert code == 75 and err.splitlines() == ["", f"SIGINT: {text}"], "that, and no traceback"
    last = last_step(run_dir)
    assert 2 < last < STEPS and newest(run_dir) == last
    assert f"stopped at step {last} (SIGINT)" in out
    assert result(run_dir)["status"] == "stopped" and "SIGINT" in result(run_dir)["error"]
    assert result(run_dir)["value"] == numbers(run_dir)[-1][1]
    assert_goes_on_as_if_uninterrupted(run_dir, tmp_path / "whole")


@pytest.mark.slow
def test_under_torchrun_a_killed_rank_resumes_in_the_same_folder_and_a_signal_stops_all(
    tmp_path: Path,
) -> None:
    """The folder has the time of the first start in its name."""
    options = ("--max-restarts", "1", "--signals-to-handle", "SIGTERM,SIGUSR1")
    how = {"torchrun": 2, "options": options, "cwd": tmp_path}
    launched = Launched(*SHORT, program=TRAIN, real=True, **how)
    until(lambda: list(tmp_path.rglob("COMMITTED")))
    (run_dir,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    rank(launched, 1).kill()
    until(lambda: newest(run_dir) > EVERY)
    launched.process.send_signal(signal.SIGUSR1)
    _, out, _ = launched.wait()
    assert launched.all_exit()
    assert [path.parent for path in tmp_path.rglob("config.yaml")] == [run_dir]
    last = last_step(run_dir)
    assert "resuming from step" in out and f"stopped at step {last} (SIGUSR1)" in out
    assert EVERY < last < STEPS and newest(run_dir) == last
    assert result(run_dir)["status"] == "stopped"
    assert_goes_on_as_if_uninterrupted(run_dir, tmp_path / "whole")
