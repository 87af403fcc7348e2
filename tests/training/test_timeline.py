"""A few steps as they were computed: every action on every rank, and who waited for whom."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from support.cells import cells
from support.live_memory import LiveStorages
from support.models import tiny
from support.opened import opened
from support.saved_runs import events
from support.world import RankError, run_world
from titanlike.core.config import validate
from titanlike.core.config.groups.computation import Fsdp
from titanlike.core.config.groups.jobs import Checkpoint, Sample, Validation
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.watching import Timeline
from titanlike.core.config.parse import to_plain
from titanlike.core.config.schema import Config
from titanlike.core.distributed import async_reads as clock
from titanlike.core.launch.worker import Worker
from titanlike.core.training import loop
from titanlike.core.training.loop import train
from titanlike.core.training.step import drop_gradients, forward_backward
from titanlike.core.training.train_plan import make_plan
from titanlike.planning.costs.simulate import Simulation, StageTimes, equal_stages, simulate
from titanlike.planning.timeline_report import TimelineReport, report_of
from titanlike.run.tools import timeline as main
from titanlike.watch import timeline as timeline_module
from titanlike.watch.chart import Span
from titanlike.watch.timeline import events_of
from titanlike.watch.timeline_file import Place, RankStep, read_timeline, write
from titanlike.watch.timeline_file import Timeline as Recorded


def short(pp: int = 1, dp: int = 1, schedule: Any = "1f1b", **changes: Any) -> Config:
    every = {
        "steps": 4,
        "layers": 2 * pp,
        "timeline": Timeline(True, [3, 4]),
        "validation": Validation(every=0),
        "checkpoint": Checkpoint(every=0, last=False),
    }
    return tiny(pp=pp, dp=dp, schedule=Schedule(schedule, 4), **every | changes)


def told(run_dir: Path) -> list[str]:
    return [event["text"] for event in events(run_dir, "timeline")]


# --- what is recorded
# ------------------------------------------------------------------------------


def train_with_wrong_clocks(config: Config, worker: Worker) -> None:
    """Each rank's clock is 1000 s ahead of the one before."""
    real = time.perf_counter
    with mock.patch.object(clock.time, "perf_counter", lambda: real() + 1000 * worker.rank):
        train(config, worker)


@pytest.mark.parametrize(
    "config",
    cells({"1f1b": short(2)}, {"zero bubble": short(2, 2, "zbvzerobubble", layers=4)}),
)
def test_every_action_is_on_one_clock_and_busy_plus_idle_is_the_step(
    config: Config, tmp_path: Path
) -> None:
    run_world(train_with_wrong_clocks, config, tmp_path)
    timeline = read_timeline(tmp_path / "timeline.json")
    assert [[rank.step for rank in step] for step in timeline.steps] == [
        [step] * config.world_size for step in (3, 4)
    ]
    for rank in (rank for step in timeline.steps for rank in step):
        begun: list[str] = []
        for event in rank.events:
            action = f"{event.stage}{event.kind}{event.mb}"
            if event.kind in ("F", "B", "I") and action not in begun:
                begun.append(action)
        assert begun == [act for act in timeline.order[rank.pp_rank] if "W" not in act]
        total = rank.end - rank.begin
        assert sum(event.end - event.start for event in rank.events) == pytest.approx(total)
        assert all(a.end == b.start for a, b in zip(rank.events, rank.events[1:], strict=False))
        assert sum(rank.spent().get(kind, 0.0) for kind in ("wait", "agree")) < total
        assert 0 <= rank.begin < 500, "since the step began, on rank 0's clock"
    for file in ("timeline.svg", "timeline_trace.json"):
        assert (tmp_path / file).stat().st_size > 1000
    (text,) = told(tmp_path)
    assert text.startswith("timeline: ") and text.endswith(f"{tmp_path} shows steps 3 to 4")


@pytest.mark.slow
def test_gathers_and_reductions_are_told_from_computing(tmp_path: Path) -> None:
    """FSDP does both inside of forwards and backwards where it shards parameters."""
    run_world(train, short(1, 2, fsdp=Fsdp(zero=3)), tmp_path)
    (rank, _), _ = read_timeline(tmp_path / "timeline.json").steps
    inside = {(event.kind, event.stage) for event in rank.events if event.mb >= 0}
    assert inside == {("F", 0), ("B", 0), ("gather", 0), ("reduce", 0)}


def test_communication_within_an_action_is_subtracted_from_it() -> None:
    class Kind:
        value = name = "F"

    class Action:
        computation_type, stage_index, microbatch_index = Kind, 1, 2

        def __str__(self) -> str:
            return "1F2"

    action = Action()
    marks = [
        (0.0, ("phase", "data")),
        (1.0, ("action", action)),
        (2.0, ("received", action)),
        (3.0, ("exchange", "gather")),
        (5.0, ("exchange", "")),
        (6.0, ("exchange", "gather")),  # for nothing
        (6.00001, ("exchange", "")),
        (7.0, ("done", action)),
        (8.0, ("end", None)),
    ]
    assert events_of(marks) == [
        Span("data", -1, -1, 0.0, 1.0),
        Span("wait", 1, 2, 1.0, 2.0),
        Span("F", 1, 2, 2.0, 3.0),
        Span("gather", 1, 2, 3.0, 5.0),
        Span("F", 1, 2, 5.0, 7.0),
        Span("host", -1, -1, 7.0, 8.0),
    ]


def operations_and_marks(config: Config, worker: Worker) -> list[tuple[Counter[str], int]]:
    """Of two steps without and two with a timeline: torch's operations, and marks of the clock."""
    found = []
    with opened(config, worker) as job:
        timeline = timeline_module.Timeline(config, worker, job.run, mock.Mock(), [], mock.Mock())
        for step in range(1, 5):
            if step == 3:
                timeline._start()
            timeline._now = []
            with LiveStorages() as live:
                forward_backward(job.run, config, step, job.stream)
            drop_gradients(job.run)
            found.append((live.operators, len(timeline._now)))
    return found


def test_recording_adds_timestamps_and_no_operation(tmp_path: Path) -> None:
    for _, (before, none), (first, _), (watched, marks) in run_world(
        operations_and_marks, short(2), tmp_path
    ):
        assert before == first == watched and none == 0
        assert marks <= 4 * 8 + 10  # of each of 8 actions, and of phases


# --- what a report says of it -----------------------------------------------------------------


def recorded(run_dir: Path, config: Config, stages: list[StageTimes]) -> Simulation:
    """Write the timeline of a run whose stages take so long."""
    plan = make_plan(config)
    found = simulate(plan.order, stages)
    steps = []
    for rank in range(config.world_size):
        pp_rank = rank // config.dp
        events: list[Span] = []
        for box in found.events[pp_rank]:
            now = events[-1].end if events else 0.0
            if box.start > now:
                events.append(Span("wait", box.stage, box.mb, now, box.start))
            events.append(box)
        if events[-1].end < found.pipeline:
            events.append(Span("agree", -1, -1, events[-1].end, found.pipeline))
        steps.append(RankStep(rank, pp_rank, 3, 0.0, events[-1].end, events))
    places = [Place(rank, f"machine {rank}", "cpu") for rank in range(config.world_size)]
    order = [[*map(str, acts)] for acts in plan.order.ranks]
    parts = order, [*plan.order.stage_to_rank], plan.stages, 4, 0.0, [steps], places
    write(run_dir / "timeline.json", Recorded(to_plain(config), *parts))
    return found


def test_equal_stages_have_the_bubble_of_the_simulation(tmp_path: Path) -> None:
    config = short(2)
    simulated = recorded(tmp_path, config, equal_stages(make_plan(config).order))
    report = report_of(tmp_path)
    assert report.bubble == pytest.approx(simulated.bubble) == pytest.approx(1 / 5)


def test_a_stage_that_takes_longer_and_who_waits_for_it_are_in_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = short(2, layers=8)
    order = make_plan(config).order
    light, heavy = equal_stages(order, 1.0, 2.0)[0], equal_stages(order, 2.0, 4.0)[1]
    recorded(tmp_path, config, [light, heavy])
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^ +1 +1 .* 133% ", text, re.MULTILINE), text
    report = report_of(tmp_path)
    waits = [rank.waits_for for rank in report.ranks]
    assert waits[0] == 1 and report.ranks[0].waiting > report.ranks[1].waiting
    assert main([str(tmp_path), "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["waits_for"] for rank in ranks] == waits


def test_the_awaited_rank_is_named_when_an_all_gather_comes_first() -> None:
    """FSDP may gather between the arrival of a message and the forward that needs it."""
    first = [Span("F", 0, 0, 0.0, 2.0), Span("wait", 0, 0, 2.0, 8.0), Span("B", 0, 0, 8.0, 9.0)]
    last = [Span("wait", 1, 0, 0.0, 2.0), Span("gather", 1, 0, 2.0, 3.0)]
    last += [Span("F", 1, 0, 3.0, 4.0), Span("B", 1, 0, 4.0, 9.0)]
    steps = [
        [RankStep(rank, rank, 3, 0.0, 9.0, events) for rank, events in enumerate((first, last))]
    ]
    order, places = [["0F0", "0B0"], ["1F0", "1B0"]], [Place(0, "a", "cpu"), Place(1, "b", "cpu")]
    timeline = Recorded(to_plain(short(2)), order, [0, 1], [["a"], ["b"]], 1, 0.0, steps, places)
    assert [rank.waits_for for rank in TimelineReport(timeline, None).ranks] == [1, 0]


# --- what goes wrong ---------------------------------------------------------------------------


def of_rank(rank: int, stage: int | None = None, end: float = 1.0, count: int = 1) -> RankStep:
    events = [Span("F", rank if stage is None else stage, 0, 0.0, end)] * count
    return RankStep(rank, rank, 3, 0.0, 1.0, events)


FORGED: dict[str, dict[str, Any]] = {
    "no step": {"steps": []},
    "steps of other ranks": {"steps": [[of_rank(0), of_rank(1)], [of_rank(0)]]},
    "a pipeline rank without events": {"order": [["0F0"], ["1F0"], ["2F0"]]},
    "a stage elsewhere": {"place": [0, 7]},
    "no such stage": {"steps": [[of_rank(0), of_rank(1, stage=9)]]},
    "a stage too few": {"stages": [["a"]]},
    "an event without an end": {"steps": [[of_rank(0), of_rank(1, end=float("inf"))]]},
    "many events": {"steps": [[of_rank(0), of_rank(1, count=20_001)]]},
}


def test_a_timeline_whose_parts_do_not_belong_together_is_refused(tmp_path: Path) -> None:
    path, order = tmp_path / "timeline.json", [["0F0"], ["1F0"]]
    steps, places = [[of_rank(0), of_rank(1)]], [Place(0, "a", "cpu"), Place(1, "b", "cpu")]
    whole = Recorded(to_plain(short(2)), order, [0, 1], [["a"], ["b"]], 1, 0.0, steps, places)
    write(path, whole)
    assert read_timeline(path) == whole
    for name, parts in FORGED.items():
        write(path, replace(whole, **parts))
        with pytest.raises(ValueError, match="do not belong together"):
            assert not read_timeline(path), name


def failing(config: Config, worker: Worker) -> None:
    raise_in = loop.finish_step

    def finish_step(*args: Any) -> Any:
        if args[2].step == 3:
            raise OSError("gone")
        return raise_in(*args)

    with mock.patch.object(loop, "finish_step", finish_step):
        train(config, worker)


@pytest.mark.slow
def test_a_timeline_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("a file in its place")
    run_world(train, short(), tmp_path)
    assert told(tmp_path) == ["timeline: 1 ranks could not write theirs, see their logs"]
    assert "could not be written\nTraceback" in (tmp_path / "rank0.out").read_text()
    with pytest.raises(RankError, match="gone"):  # a run that fails meanwhile, as without one
        run_world(failing, short(), tmp_path / "fails")


def test_a_run_without_a_timeline_is_an_error_with_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    text = capsys.readouterr()
    assert "train with timeline=true" in text.out + text.err
    (tmp_path / "timeline.json").write_text("[1]")
    assert main([str(tmp_path)]) == 2


@pytest.mark.parametrize(
    "steps, reason, fix",
    [
        ([3], "two numbers", [6, 7]),
        ([0, 2], "the first step of a run is 1", [6, 7]),
        ([5, 4], "the last step is before the first", [4, 5]),
        ([3, 9], "the run ends with step 8", [6, 7]),
    ],
)
def test_steps_that_a_run_does_not_have_are_refused_with_some_that_it_has(
    steps: list[int], reason: str, fix: list[int]
) -> None:
    config = Config(steps=8, timeline=Timeline(True, steps))
    (problem,) = validate.problems(config)
    assert reason in str(problem) and f"timeline.steps=[{fix[0]},{fix[1]}]" in str(problem)
    assert not validate.problems(replace(config, timeline=Timeline(True, fix)))


@pytest.mark.parametrize(
    "changes, steps",
    [
        ({"steps": 100}, (11, 12)),
        ({"steps": 12}, (10, 11)),
        ({"steps": 100, "validation": Validation(every=6)}, (13, 14)),
        ({"steps": 100, "checkpoint": Checkpoint(every=4)}, (13, 14)),
        ({"steps": 100, "sample": Sample(every=2)}, (11, 12)),  # there are no two others
        ({"steps": 3}, (2, 3)),
    ],
)
def test_steps_are_recorded_that_no_validation_save_or_sample_follows(
    changes: dict[str, Any], steps: tuple[int, int]
) -> None:
    assert Config(**changes).timeline_steps == steps


def test_the_picture_shows_a_step_without_validation(tmp_path: Path) -> None:
    def step(number: int, end: float, *kinds: str) -> list[RankStep]:
        events = [Span(kind, 0, -1, 0.0, end) for kind in kinds]
        return [RankStep(0, 0, number, 0.0, end, events)]

    steps = [step(1, 1.0, "F", "other"), step(2, 9.0, "F"), step(3, 3.0, "F"), step(4, 2.0, "F")]
    plain = to_plain(short(1))
    recorded = Recorded(plain, [["0F0"]], [0], [["a"]], 1, 0.0, steps, [Place(0, "here", "cpu")])
    assert recorded.typical is steps[2]
