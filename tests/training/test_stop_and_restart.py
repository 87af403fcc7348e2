"""Runs that are asked to end, and runs whose processes are killed: whole commands, real signals.

However a run was cut, the same command goes on with it, and its numbers are those of a run that was
left alone, to the last bit.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from support.launched import Launched
from support.paths import ROOT
from support.records import numbers
from support.waiting import until
from support.world import run_world
from titanlike.config.parse import parse
from titanlike.config.schema import Config
from titanlike.training.train import train

TRAIN = ROOT / "train.py"
STEPS, EVERY = 60, 10
TINY = [
    "model.dim=32",
    "model.ffn_dim=64",
    "model.layers=4",
    "seq_len=16",
    "batch_size=8",
    f"steps={STEPS}",
    "data=synthetic",
    "data.vocab_size=64",
    "validation.every=0",
    "logger=none",
    f"checkpoint.every={EVERY}",
    "checkpoint.keep=2",
    "device=cpu",
]


def started(*words: str, **how) -> Launched:
    return Launched(*TINY, *words, program=TRAIN, real=True, **how)


def config_of(run_dir: Path) -> Config:
    """What a run has left to be launched again from."""
    plain = yaml.safe_load((run_dir / "config.yaml").read_text())
    config, problems = parse({key: plain[key] for key in plain if key not in ("defaults", "hydra")})
    assert problems == []
    return config


def step(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return numbers(run_dir)[-1][0] if path.exists() and numbers(run_dir) else 0


def result(run_dir: Path) -> dict:
    return json.loads((run_dir / "result.json").read_text())


def newest(run_dir: Path) -> int:
    steps = (run_dir / "checkpoints").glob("step-*/COMMITTED")
    return max((int(path.parent.name.removeprefix("step-")) for path in steps), default=0)


def rank(launched: Launched, number: int) -> psutil.Process:
    """The process of a rank, driver and torchrun aside."""
    (process,) = (p for p in launched.alive() if p.environ().get("RANK") == str(number))
    return process


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list]:
    """The numbers of a run with a run directory's config that nobody has touched."""
    known = {}

    def numbers_of(run_dir: Path) -> list:
        config = config_of(run_dir)
        if config.world_size not in known:
            folder = tmp_path_factory.mktemp("left-alone")
            run_world(train, config, folder)
            known[config.world_size] = numbers(folder)
        return known[config.world_size]

    return numbers_of


@pytest.mark.parametrize(
    "mesh, signum",
    [
        pytest.param("pp=1", signal.SIGTERM, marks=pytest.mark.slow),
        ("pp=2", signal.SIGINT),
    ],
)
def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint_to_go_on_from(
    mesh: str, signum: signal.Signals, tmp_path: Path, left_alone
) -> None:
    """A signal to the one process, or to the driver of two workers."""
    launched = started(mesh, f"run_dir={tmp_path}")
    until(lambda: step(tmp_path) > 2)
    launched.process.send_signal(signum)
    code, out, err = launched.wait(60)
    assert launched.leaves_nobody()
    told = f"{signum.name}: stopping after this step with a checkpoint; a second signal stops immediately"
    assert code == 75 and err.splitlines() == ["", told], "that, and no traceback"
    last = step(tmp_path)
    assert 2 < last < STEPS and newest(tmp_path) == last
    assert f"stopped at step {last} ({signum.name})" in out
    assert result(tmp_path)["status"] == "stopped" and signum.name in result(tmp_path)["error"]
    assert result(tmp_path)["value"] == numbers(tmp_path)[-1][1]
    run_world(train, config_of(tmp_path), tmp_path)
    assert numbers(tmp_path) == left_alone(tmp_path)


def test_a_killed_rank_comes_back_and_the_run_goes_on(tmp_path: Path, left_alone) -> None:
    """With checkpoint.resume=never, too, a restart goes on with what the run has saved."""
    launched = started(
        "pp=2", f"run_dir={tmp_path}", "launch.max_restarts=3", "checkpoint.resume=never"
    )
    until(lambda: newest(tmp_path))
    rank(launched, 1).kill()
    code, _, err = launched.wait()
    assert code == 0, err
    assert launched.leaves_nobody()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").open()]
    (restart,) = (event for event in events if event["event"] == "restart")
    assert restart["step"] >= EVERY and restart["text"] in err
    assert restart["text"].startswith("rank 1 failed: killed by SIGKILL")
    assert restart["text"].endswith(f"; restart 1 of 3 from step {restart['step']}")
    assert result(tmp_path)["status"] == "completed"
    assert numbers(tmp_path) == left_alone(tmp_path)


@pytest.mark.slow
def test_under_torchrun_a_killed_rank_comes_back_in_the_same_folder_and_a_signal_stops_all(
    tmp_path: Path, left_alone
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
    assert launched.leaves_nobody()
    assert [path.parent for path in tmp_path.rglob("config.yaml")] == [run_dir]
    last = step(run_dir)
    assert "resuming from step" in out and f"stopped at step {last} (SIGUSR1)" in out
    assert EVERY < last < STEPS and newest(run_dir) == last
    assert result(run_dir)["status"] == "stopped"
    run_world(train, config_of(run_dir), run_dir)
    assert numbers(run_dir) == left_alone(run_dir)
