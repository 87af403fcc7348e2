"""A step waits for none of its numbers; they are recorded a step later, each step's once."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest

from support.blocking import blocking_calls
from support.cells import cells
from support.models import tiny
from support.records import numbers
from support.runs import train_each
from support.world import run_world
from titanlike.core.config.groups.computation import Fsdp, Precision
from titanlike.core.config.groups.data import SyntheticData
from titanlike.core.config.groups.jobs import Checkpoint, Validation
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.optimizers.adamw import AdamW
from titanlike.core.config.optimizers.muon import Muon
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.core.optim.optimizer import learning_rate
from titanlike.core.training import loop
from titanlike.core.training.loop import train

# --- a step does not wait ----------------------------------------------------------------------

SPIKES = {"on_spike": "skip", "spike_window": 2}
UNREACHED = Custom("support.unreached.Net", {"block": "Alternating"})
LAYOUTS = {"a pipeline with tied weights, watching for spikes": tiny(pp=2, tied=True, **SPIKES)}
MORE_LAYOUTS = {
    "a pipeline of shards, zero bubble, SGD": tiny(
        pp=2, dp=2, schedule="zbvzerobubble", optimizer=Sgd(lr=0.1, momentum=0.9)
    ),
    "ZeRO 1, Muon": tiny(dp=2, fsdp=Fsdp(1), optimizer=Muon()),
    "bf16, state in bf16": tiny(pp=2, precision=Precision("bf16"), optimizer=AdamW()),
    "parameters that a step does not reach": tiny(
        dp=2, schedule=Schedule("gpipe", 1), model=UNREACHED, batch_size=8
    ),
}


@pytest.mark.parametrize("config", cells(LAYOUTS, MORE_LAYOUTS))
def test_a_step_makes_no_blocking_device_call(config: Config, tmp_path: Path) -> None:
    for steps, calls in run_world(blocking_calls, replace(config, steps=5), tmp_path):
        assert (steps, calls) == (2, [])


# --- each step is recorded once, with its own numbers ---------------------------------------------


def test_each_step_is_recorded_once_with_its_own_metrics(tmp_path: Path) -> None:
    """Around validations, saves and the end the same numbers as where nothing waits for them: so a
    validation leaves the mode of the model, and the random numbers of its dropout, as they were."""
    model = Custom("support.data.Dropping", {"dim": 32, "layers": 4, "vocab_size": None})
    plain = tiny(pp=2, steps=7, model=model, run_dir=str(tmp_path / "plain"))
    some = replace(
        plain,
        run_dir=str(tmp_path / "some"),
        validation=Validation(every=2, batches=1),
        checkpoint=Checkpoint(every=3, last=True),
    )
    for config in (plain, some):
        Path(config.run_dir).mkdir()
    run_world(train_each, plain, tmp_path / "world", [plain, some])
    assert numbers(tmp_path / "some") == numbers(tmp_path / "plain")
    rows = read_jsonl(tmp_path / "some" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["lr"] for row in rows] == [learning_rate(plain, step) for step in range(1, 8)]
    assert [row["tokens"] for row in rows] == [step * 16 * 16 for step in range(1, 8)]
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 4, 6, 7]
    assert [row["step"] for row in rows if "save_stall_seconds" in row] == [4, 7]
    assert all(row["step_seconds"] > 0 for row in rows)


# --- Python's garbage collection ------------------------------------------------------------------


def collections(config: Config, worker: Worker) -> tuple[list[int], bool]:
    """The steps in which Python collected garbage, and whether it does so by itself afterwards."""
    found, step = [], [0]
    right = loop.forward_backward

    def forward_backward(run, config, at, stream):
        step[0] = at
        cycles = [[] for _ in range(20_000)]  # enough for Python to collect
        for cycle in cycles:
            cycle.append(cycle)
        return right(run, config, at, stream)

    loop.forward_backward = forward_backward
    gc.callbacks.append(lambda phase, info: found.append(step[0] + 1) if phase == "start" else None)
    train(config, worker)
    return sorted(set(found[:-1]) & set(range(2, config.steps + 1))), gc.isenabled()


def test_garbage_is_collected_at_the_same_steps_on_every_rank(tmp_path: Path) -> None:
    config = tiny(steps=6, gc_every=3, layers=2, data=SyntheticData(vocab_size=64))
    assert run_world(collections, config, tmp_path) == [([3, 6], True)]
