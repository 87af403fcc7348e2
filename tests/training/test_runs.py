"""Whole commands, as a user types them: the main job, verify, the bench, and resuming."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import TINY, command
from support.paths import ROOT
from support.waiting import until
from titanlike.checkpoint.resume import select_resume
from titanlike.config.schema import Checkpoint, Config


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").open()]


@pytest.mark.slow
def test_the_main_job_learns_in_two_minutes_and_prints_how_to_continue(tmp_path: Path) -> None:
    before = os.times()
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "run_dir=run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user  # of CPU
    seconds -= before.children_system
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert records[0]["loss"] == pytest.approx(5.6, abs=0.2)  # nats a byte, knowing nothing
    assert records[-1]["val_loss"] < 2.0
    assert seconds < 120
    keys = [
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "time",
        "tokens_per_second",
        "step_seconds",
        "memory_bytes",
    ]
    assert list(records[0])[: len(keys)] == keys
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["value"]) == ("completed", records[-1]["val_loss"])
    assert (tmp_path / "run" / "checkpoints" / "step-00000300" / "COMMITTED").exists()
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    last = done.stdout.strip().splitlines()[-1]
    train = f"python {ROOT / 'train.py'}"
    assert last == f"continue with: {train} --config-path {tmp_path / 'run'} steps=600"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of 5 steps, in a folder whose name has a space, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    words = ["checkpoint.every=2", "checkpoint.last=true", "run_dir=a run"]
    done = command(*TINY, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "a run", done.stdout


def test_the_last_line_of_a_run_is_a_command_that_continues_it(finished: tuple[Path, str]) -> None:
    run, printed = finished
    line = (
        printed.strip().splitlines()[-1].removeprefix(f"continue with: python {ROOT / 'train.py'} ")
    )
    before = losses(run)
    words = shlex.split(line)
    on = command(*words, "run_dir=../on", f"checkpoint.resume='{run}'", cwd=run)
    assert on.returncode == 0, on.stderr
    assert "resuming from step 5" in on.stdout
    assert len(losses(run.parent / "on")) == 5
    assert losses(run) == before


@pytest.mark.slow
def test_torchrun_with_its_default_of_one_process_starts_the_others(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    words = [*TINY, "pp=2", "schedule=interleaved1f1b", "run_dir=two"]
    two = command("torchrun", *words, cwd=tmp_path)
    assert two.returncode == 0, two.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(finished[0]), abs=1e-5)


@pytest.mark.slow
def test_verify_leaves_a_runs_files_alone_and_ends_with_a_verdict(
    finished: tuple[Path, str],
) -> None:
    run, _ = finished
    before = {path.name: path.read_bytes() for path in run.glob("*.*")}
    done = command(*TINY, f"run_dir='{run}'", "pp=2", tool="tools/verify.py", cwd=run.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith("PASS")
    assert {path.name: path.read_bytes() for path in run.glob("*.*")} == before


@pytest.mark.slow
def test_bench_measures_a_command_beside_a_plain_loop(tmp_path: Path) -> None:
    done = command("model.layers=2", "steps=10", "logger=none", tool="tools/bench.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for label in ("tokens/s", "step", "first step done", "peak memory a rank", "ours / by hand"):
        assert label in done.stdout


@pytest.mark.slow
def test_the_framework_costs_at_most_3_percent(tmp_path: Path) -> None:
    ratios = []
    while len(ratios) < 6 and not any(ratio < 1.03 for ratio in ratios):  # other load adds to it
        done = command("steps=60", "logger=none", tool="tools/bench.py", cwd=tmp_path, timeout=300)
        ratios.append(float(done.stdout.strip().splitlines()[-1].split()[-1]))
    assert min(ratios) < 1.03, ratios


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_run_resumes_from_the_one_before(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    shutil.copytree(finished[0], tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-00000005"
    next(folder.glob("*.distcp")).write_bytes(b"short")
    done = command(*TINY, "checkpoint.last=true", "run_dir=run", "steps=8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"checkpoint {folder} is damaged: __0_0.distcp has 5 bytes" in done.stdout
    assert "resuming from step 4" in done.stdout


@pytest.mark.parametrize("resume", ["never", "run/checkpoints/step-00000002"])
def test_a_run_does_not_start_before_existing_checkpoints(
    resume: str, finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished[0], tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    config = Config(run_dir="run", checkpoint=Checkpoint(resume=resume))
    with pytest.raises(ValueError, match="write another run_dir"):
        select_resume(config)


def test_a_named_checkpoint_is_resumed_in_another_folder(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    run, _ = finished
    resume = f"checkpoint.resume='{run / 'checkpoints' / 'step-00000002'}'"
    done = command(*TINY, resume, "run_dir=two", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == losses(run)[2:]


def test_a_folder_that_cannot_be_written_is_a_mistake_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = command(*TINY, "run_dir=file", cwd=tmp_path)
    assert done.returncode == 2
    assert "run_dir=" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_that_is_started_twice_continues_in_the_newest_start_alone(tmp_path: Path) -> None:
    """Else both would write to one metrics.jsonl and one folder of checkpoints."""
    words = [sys.executable, str(ROOT / "train.py"), *TINY, "model.layers=2", "run_dir=run"]
    words += ["steps=1000", "checkpoint.every=50"]
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(words, cwd=tmp_path, **settings)
    until(lambda: (tmp_path / "run" / "checkpoints" / "step-00000050" / "COMMITTED").exists())
    second = subprocess.Popen(words, cwd=tmp_path, **settings)
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0 and "resuming from step" in out, err
    _, err = first.communicate(timeout=60)
    assert first.returncode == 1
    assert "another start of this run has taken it over" in err and f"process {second.pid}" in err
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert steps == list(range(1, 1001))
