"""A rank that is slow for many steps is named, with its machine, while the run goes on."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from support.models import tiny
from support.saved_runs import events
from support.world import run_world
from titanlike.core.config.groups.jobs import Checkpoint, Launch, Validation
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.schema import Config
from titanlike.core.distributed import async_reads
from titanlike.core.launch.worker import Worker
from titanlike.core.training import step
from titanlike.core.training.loop import train
from titanlike.watch import stragglers
from titanlike.watch.stragglers import BusyTime, Stragglers, slow_ranks


def short(pp: int, dp: int, share: float = 0.3) -> Config:
    more = {"validation": Validation(every=0), "checkpoint": Checkpoint(every=0, last=False)}
    more["launch"] = Launch(straggler=share)
    return tiny(pp=pp, dp=dp, schedule=Schedule("1f1b", 4), steps=5, layers=2, **more)


def train_in_steps_of_a_second(config: Config, worker: Worker, waited: list[float]) -> None:
    """Each rank waits so many seconds of each; three steps in a row are many."""
    with (
        mock.patch.object(stragglers, "_STEPS", 3),
        mock.patch.object(step, "seconds_between", lambda begin, end: 1.0),
        mock.patch.object(BusyTime, "waited", lambda self: waited[worker.rank]),
    ):
        train(config, worker)


def test_a_slow_rank_is_named_once_with_its_machine(tmp_path: Path) -> None:
    run_world(train_in_steps_of_a_second, short(1, 2), tmp_path, [0.5, 0.25])
    (event,) = events(tmp_path, "straggler")
    assert (event["rank"], event["host"]) == (1, socket.gethostname())
    assert event["share"] == pytest.approx(0.5) and event["step"] == 3
    assert "longer than the ranks with the same stages, for 3 steps" in event["text"]
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["busiest_rank"] == 1
    assert (last["busy_seconds"], last["busiest_seconds"]) == (0.625, 0.75)


def test_every_rank_reports_its_mean_wait_periodically(tmp_path: Path) -> None:
    run_world(train_many, short(1, 2), tmp_path)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "busiest_rank" in record] == [3]
    assert (records[2]["busy_seconds"], records[2]["busiest_seconds"]) == (0.625, 0.75)
    (event,) = events(tmp_path, "straggler")
    assert (event["rank"], event["step"]) == (1, 3)


def train_many(config: Config, worker: Worker) -> None:
    with mock.patch.object(stragglers, "_MANY", 1):
        train_in_steps_of_a_second(config, worker, [0.5, 0.25])


def watched(share: float, steps: list[list[float]]) -> list[int]:
    """The steps in which a rank of dp=2 is named; steps: seconds that each rank waits of one."""
    mesh = SimpleNamespace(
        world_size=2, device=torch.device("cpu"), pp=1, stage_ranks=lambda pp: [0, 1]
    )
    worker = SimpleNamespace(rank=0, local_world_size=2, run_dir=Path("none"), world_size=2)
    events = mock.Mock()
    config = Config(launch=Launch(straggler=share))
    found = Stragglers(config, mesh, worker, events)
    with mock.patch.object(stragglers, "_STEPS", 3):
        for step, waited in enumerate(steps, start=1):
            found.step(step, 1.0, waited)
    return [call.args[1] for call in events.log.call_args_list]


def test_only_a_consistently_slow_rank_is_named() -> None:
    slow, equal = [0.5, 0.25], [0.25, 0.25]
    assert watched(0.3, [slow] * 8) == [3], "once"
    assert watched(0.3, [slow, slow, equal] * 3) == []
    assert watched(0.3, [slow] * 4 + [equal] + [slow] * 4) == [3, 8], "again, where it was not"
    assert watched(0.6, [slow] * 8) == watched(0.0, [slow] * 8) == [], "0: not at all"


def test_ranks_are_compared_with_those_that_have_the_same_work() -> None:
    found = {0: 1.0, 1: 1.1, 2: 2.0, 3: 2.6}
    assert slow_ranks(found, [[0, 1], [2, 3]], 0.25) == {3: pytest.approx(0.3)}
    assert slow_ranks(found, [[0, 1], [2, 3]], 0.5) == {}
    many = {rank: 1.0 + rank % 3 / 100 for rank in range(64)} | {7: 1.5}
    assert [*slow_ranks(many, [[*range(64)]], 0.25)] == [7]


def test_waits_between_steps_are_not_attributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a validation ranks wait for each other, too."""
    seconds = iter(range(100))
    monkeypatch.setattr(async_reads.time, "perf_counter", lambda: float(next(seconds)))
    found = BusyTime(torch.device("cpu"), [])
    for phase in ("validation", "agree", "metrics", "forward and backward", "gradient norm"):
        found.begin(phase)
    assert found.waited() == 1, "of the step alone: from its begin to the norm"


def test_all_gather_waits_are_sampled_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two events for each of many blocks would cost each step something."""
    group = SimpleNamespace(
        **dict.fromkeys(("unshard", "post_backward", "finalize_backward"), lambda: None),
        wait_for_unshard=lambda: None,
    )
    marks: list[float] = []
    monkeypatch.setattr(stragglers, "mark", lambda _: marks.append(float(len(marks))) or marks[-1])
    found, waited, asked = BusyTime(torch.device("cuda"), [group]), [], []
    for _ in range(45):
        found.begin("forward and backward")
        found.start_action(None)
        before = len(marks)
        group.unshard()
        group.wait_for_unshard()
        group.wait_for_unshard()
        asked.append(len(marks) - before)
        found.begin("gradient norm")
        waited.append(found.waited())
    assert [step for step, count in enumerate(asked, 1) if count] == [20, 40]
    assert {*asked} == {0, 4}, "not of a gather that is launched"
    # numbers are those of the step before: a wait at a step's begin, from step 20 on two more
    assert waited == [0.0, *[1.0] * 19, *[3.0] * 25]
