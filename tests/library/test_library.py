"""A loop of one's own: what `titanlike.build` returns trains as the command does, in any layout."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import titanlike
from support.models import tiny
from support.records import numbers
from support.runs import train_each
from support.world import run_world
from titanlike.config.errors import ConfigError
from titanlike.config.schema import Config, Metrics, Model, Schedule
from titanlike.launch.worker import Worker
from titanlike.metrics.sinks import read_jsonl
from titanlike.training.anomalies import BadNumbers

STEPS = 3
ONE = tiny(layers=4, steps=STEPS, schedule=Schedule("gpipe", 4), batch_size=8)
LAYOUTS = {
    "pp=2 dp=2": replace(ONE, pp=2, dp=2, schedule=Schedule("1f1b", 2)),
    "tp=2": replace(ONE, tp=2),
    "cp=2": replace(ONE, cp=2),
    "pp=2 with chunks and bf16": None,
}


class Told(titanlike.Callback):
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_step(self, record: Mapping[str, Any]) -> None:
        self.events.append(("step", record["step"]))

    def on_validation(self, step: int, val_loss: float) -> None:
        self.events.append(("validation", step, val_loss))

    def on_save(self, step: int, path: str) -> None:
        self.events.append(("save", step, Path(path).name))


def own_loop(config: Config, worker: Worker) -> dict[str, Any]:
    """Steps of a loop over a process group made here, and outputs before and after them."""
    size = {"rank": worker.rank, "world_size": worker.world_size}
    if worker.world_size > 1:
        dist.init_process_group("gloo", store=worker.store, **size)
    told = Told()
    run = titanlike.build(config, callbacks=[told])
    first = next(run.batches())
    outputs = run.forward(first, everywhere=True)
    steps = [run.step(batch) for batch in islice(run.batches(), STEPS)]
    return {
        "dp_rank": run.mesh.dp_rank,
        "steps": [(s.loss, s.losses, s.grad_norm) for s in steps],
        "before": outputs,
        "after": run.forward(first, microbatches=True),
        "validation": run.validate(),
        "saved": Path(run.save()).name,
        "events": told.events,
    }


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(own_loop, ONE, tmp_path_factory.mktemp("one"))[0]


@pytest.mark.parametrize("layout", [*LAYOUTS][:3])
def test_a_loop_of_ones_own_computes_what_the_command_and_one_process_do(
    layout: str, one_process: dict[str, Any], tmp_path: Path
) -> None:
    config = LAYOUTS[layout]
    ranks = run_world(own_loop, config, tmp_path / "own")
    command = replace(config, run_dir=str(tmp_path / "command"), metrics=Metrics(True))
    Path(command.run_dir).mkdir()
    run_world(train_each, command, tmp_path / "world", [command])
    rows = read_jsonl(tmp_path / "command" / "metrics.jsonl")
    of_command = [(row["loss"], row["microbatch_losses"], row["grad_norm"]) for row in rows]
    for rank in ranks:
        # the command's, to the last bit
        assert rank["steps"] == of_command
        assert rank["validation"] == rows[-1]["val_loss"]
        # one process's
        for mine, right in zip(rank["steps"], one_process["steps"], strict=True):
            torch.testing.assert_close(torch.tensor(mine[0]), torch.tensor(right[0]))
            torch.testing.assert_close(torch.tensor(mine[1]), torch.tensor(right[1]))
            torch.testing.assert_close(torch.tensor(mine[2]), torch.tensor(right[2]))
        rows_of = one_process["before"].chunk(config.dp)[rank["dp_rank"]]
        torch.testing.assert_close(rank["before"], rows_of)
        assert rank["events"][:STEPS] == [("step", step) for step in range(1, STEPS + 1)]
        assert rank["events"][-1] == ("save", STEPS, rank["saved"])
    last = [rank for rank in ranks if rank["after"] is not None]
    assert len(last) == len(ranks) // config.pp
    for rank in last:
        assert len(rank["after"]) == len(one_process["after"]) // config.dp
        whole = torch.cat(one_process["after"]).chunk(config.dp)[rank["dp_rank"]]
        torch.testing.assert_close(torch.cat(rank["after"]), whole)
