"""Runs that go on, in real ranks."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from support.records import numbers
from support.world import run_world
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.core.training.loop import train


def train_one(config: Config, worker: Worker, number: int = 0) -> None:
    """Train as a process of its own would; number: of the run in these processes."""
    store = worker.store and dist.PrefixStore(f"{number}", worker.store)
    with ExitStack() as resources:
        run_dir = Path(config.run_dir)
        train(config, replace(worker, run_dir=run_dir, store=store, resources=resources))


def train_each(_: Config, worker: Worker, configs: list[Config]) -> None:
    """Train each, one after the other, in the same processes."""
    for number, config in enumerate(configs):
        train_one(config, worker, number)


def trained(config: Config) -> list[dict[str, Any]]:
    """The records of a run in its own processes."""
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    run_world(train_each, config, run_dir.parent / "world", [config])
    return read_jsonl(run_dir / "metrics.jsonl")


def assert_goes_on(config: Config, folder: Path) -> None:
    """A run from the checkpoint of its second step is to the last bit the run that went on."""
    saved = Checkpoint(every=2, last=False, keep=0)
    whole = replace(config, checkpoint=saved, run_dir=str(folder / "whole"))
    resume = str(folder / "whole" / "checkpoints" / "step-00000002")
    again = replace(whole, checkpoint=replace(saved, resume=resume), run_dir=str(folder / "again"))
    for each in (whole, again):
        Path(each.run_dir).mkdir()
    run_world(train_each, config, folder / "world", [whole, again])
    first, then = numbers(folder / "whole"), numbers(folder / "again")
    assert len(then) == config.steps - 2 and then == first[2:]
