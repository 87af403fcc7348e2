"""A rank that is slow for many steps is named, with its machine, while the run goes on."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from support.models import tiny
from support.slow_stages import train_with_a_slow_stage
from support.world import run_world
from titanlike.config.schema import Checkpoint, Config, Launch, Schedule, Validation
from titanlike.launch.worker import Worker
from titanlike.parallel.busy import BusyTime
from titanlike.training import stragglers
from titanlike.training.stragglers import slow_ranks


def train_slowly(config: Config, worker: Worker, steps: int) -> None:
    with mock.patch.object(stragglers, "_STEPS", steps):
        train_with_a_slow_stage(config, worker, (1,))


def short(pp: int, dp: int, share: float = 0.3) -> Config:
    more = {"validation": Validation(every=0), "checkpoint": Checkpoint(every=0, last=False)}
    more["launch"] = Launch(straggler=share)
    return tiny(pp, dp, Schedule("1f1b", 4), steps=7, layers=2, **more)


def told(run_dir: Path) -> list[dict]:
    path = run_dir / "events.jsonl"  # of a run without events there is none
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == "straggler"]


@pytest.mark.parametrize(
    "pp, dp", [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)], ids=["dp=2", "pp=2"]
)
def test_a_slow_rank_is_named_once_with_its_machine(pp: int, dp: int, tmp_path: Path) -> None:
    run_world(train_slowly, short(pp, dp), tmp_path, 3)
    (event,) = told(tmp_path)
    assert event["rank"] == 1 and event["host"] == socket.gethostname() and event["share"] > 0.3
    others = "the ranks with the same stages" if dp > 1 else "the other ranks"
    assert f"longer than {others}, for 3 steps" in event["text"]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["busiest_rank"] == 1
    assert last["busy_seconds"] < last["busiest_seconds"] <= last["step_seconds"]


@pytest.mark.slow
def test_it_can_be_turned_off(tmp_path: Path) -> None:
    run_world(train_slowly, short(1, 2, share=0.0), tmp_path, 3)
    assert told(tmp_path) == []


def test_ranks_are_compared_with_those_that_have_the_same_work() -> None:
    busy = {0: 1.0, 1: 1.1, 2: 2.0, 3: 2.6}
    assert slow_ranks(busy, [[0, 1], [2, 3]], 0.25) == {3: pytest.approx(0.3)}
    assert slow_ranks(busy, [[0, 1], [2, 3]], 0.5) == {}
    many = {rank: 1.0 + rank % 3 / 100 for rank in range(64)} | {7: 1.5}
    assert [*slow_ranks(many, [[*range(64)]], 0.25)] == [7]


def test_what_is_waited_for_between_steps_belongs_to_none() -> None:
    """In a validation ranks wait for each other, too."""
    busy = BusyTime(torch.device("cpu"), [])
    busy.begin("validation")
    busy.begin("agree")
    time.sleep(0.05)
    busy.begin("forward and backward")
    busy.begin("gradient norm")
    assert 0 < busy.waited() < 0.04
