"""Runs that get a signal, or whose processes are killed: whole commands, real signals.

The same command resumes the run, and its metrics equal those of an uninterrupted run, to the last
bit.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from support.commands import TINY
from support.launched import Launched
from support.paths import ROOT
from support.records import numbers
from support.run_files import config_of, last_step, result
from support.waiting import until
from support.world import run_world
from titanlike.training.train import train

TRAIN = ROOT / "train.py"
STEPS, EVERY = 60, 10
SHORT = [
    *TINY,
    "model.layers=4",
    "batch_size=8",
    f"steps={STEPS}",
    "data=synthetic",
    "data.vocab_size=64",
    "checkpoint.last=true",
    f"checkpoint.every={EVERY}",
    "checkpoint.keep=2",
    "device=cpu",
]


def started(*words: str, **how) -> Launched:
    return Launched(*SHORT, *words, program=TRAIN, real=True, **how)


def newest(run_dir: Path) -> int:
    steps = (run_dir / "checkpoints").glob("step-*/COMMITTED")
    return max((int(path.parent.name.removeprefix("step-")) for path in steps), default=0)


def rank(launched: Launched, number: int) -> psutil.Process:
    """The process of a rank, not the driver or torchrun."""
    (process,) = (p for p in launched.alive() if p.environ().get("RANK") == str(number))
    return process


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list]:
    """The metrics of an uninterrupted run with the config of a run directory."""
    known = {}

    def numbers_of(run_dir: Path) -> list:
        config = config_of(run_dir)
        key = config.world_size, config.steps
        if key not in known:
            folder = tmp_path_factory.mktemp("uninterrupted")
            run_world(train, config, folder)
            known[key] = numbers(folder)
        return known[key]

    return numbers_of


@pytest.mark.slow
@pytest.mark.parametrize("mesh, signum", [("pp=1", signal.SIGTERM), ("pp=2", signal.SIGINT)])
def test_a_signal_stops_a_run_after_its_step_with_a_checkpoint(
    mesh: str, signum: signal.Signals, tmp_path: Path, uninterrupted
) -> None:
    """A signal to the one process, or to the driver of two workers."""
    launched = started(mesh, f"run_dir={tmp_path}")
    until(lambda: last_step(tmp_path) > 2)
    launched.process.send_signal(signum)
    code, out, err = launched.wait(60)
    assert launched.all_exit()
    text = "stopping after the next step with a checkpoint; a second signal stops immediately"
    assert code == 75 and err.splitlines() == ["", f"{signum.name}: {text}"], (
        "that, and no traceback"
    )
    last = last_step(tmp_path)
    assert 2 < last < STEPS and newest(tmp_path) == last
    assert f"stopped at step {last} ({signum.name})" in out
    assert result(tmp_path)["status"] == "stopped" and signum.name in result(tmp_path)["error"]
    assert result(tmp_path)["value"] == numbers(tmp_path)[-1][1]
    run_world(train, config_of(tmp_path), tmp_path)
    assert numbers(tmp_path) == uninterrupted(tmp_path)


@pytest.mark.slow
def test_a_killed_rank_is_restarted_and_the_run_resumes(tmp_path: Path, uninterrupted) -> None:
    """Also with checkpoint.resume=never, a restart resumes from the run's own checkpoint."""
    words = ["launch.max_restarts=3", "checkpoint.resume=never", "steps=20", "checkpoint.every=5"]
    launched = started("pp=2", f"run_dir={tmp_path}", *words)
    until(lambda: newest(tmp_path))
    rank(launched, 1).kill()
    code, _, err = launched.wait()
    assert code == 0, err
    assert launched.all_exit()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").open()]
    (restart,) = (event for event in events if event["event"] == "restart")
    assert restart["step"] >= 5 and restart["text"] in err
    assert restart["text"].startswith("rank 1 failed: killed by SIGKILL")
    assert restart["text"].endswith(f"; restart 1 of 3 from step {restart['step']}")
    assert result(tmp_path)["status"] == "completed"
    assert numbers(tmp_path) == uninterrupted(tmp_path)


@pytest.mark.slow
def test_under_torchrun_a_killed_rank_resumes_in_the_same_folder_and_a_signal_stops_all(
    tmp_path: Path, uninterrupted
) -> None:
    """The folder has the time of the first start in its name."""
    options = ("--max-restarts", "1", "--signals-to-handle", "SIGTERM,SIGUSR1")
    launched = started("pp=2", torchrun=2, options=options, cwd=tmp_path)
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
    run_world(train, config_of(run_dir), run_dir)
    assert numbers(run_dir) == uninterrupted(run_dir)
