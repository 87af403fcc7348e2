"""A few steps as they were computed: every action on every rank, who waited for whom, and what to change."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from support.cells import cells
from support.models import tiny
from support.slow_stages import train_with_a_slow_stage
from support.world import RankError, run_world
from titanlike.command.timeline import main
from titanlike.config.groups import LoopedSchedule
from titanlike.config.parse import to_plain
from titanlike.config.schema import Checkpoint, Config, Fsdp, Model, Schedule, Validation
from titanlike.config.timeline import Timeline, timeline_problems
from titanlike.data.loader import batches, open_data
from titanlike.launch.worker import Worker
from titanlike.metrics.chart import Box
from titanlike.metrics.timeline_file import Place, RankStep, read_timeline
from titanlike.metrics.timeline_file import Timeline as Recorded
from titanlike.parallel import clock
from titanlike.parallel.mesh import close_mesh, open_mesh
from titanlike.planning.simulate import equal_stages, simulate
from titanlike.planning.timeline_report import TimelineReport, report_of
from titanlike.training import loop
from titanlike.training import timeline as timeline_module
from titanlike.training.build import build
from titanlike.training.step import drop_gradients, forward_backward
from titanlike.training.timeline import events_of
from titanlike.training.train import train


def short(pp: int = 1, dp: int = 1, schedule: Any = "1f1b", **changes: Any) -> Config:
    every = {
        "steps": 4,
        "layers": 2 * pp,
        "timeline": Timeline(True, [3, 4]),
        "validation": Validation(every=0),
        "checkpoint": Checkpoint(every=0, last=False),
    }
    chosen = Schedule(schedule, 4) if isinstance(schedule, str) else schedule
    return tiny(pp, dp, chosen, **every | changes)


def told(run_dir: Path) -> list[str]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [e["text"] for e in map(json.loads, lines) if e["event"] == "timeline"]


@pytest.mark.parametrize(
    "config",
    cells(
        {"1f1b": short(2)},
        {
            "one process": short(),
            "dp": short(2, 2),
            "zero bubble": short(2, 1, "zbvzerobubble", layers=4),
            "interleaved": short(2, layers=4, schedule=LoopedSchedule("interleaved1f1b", 4)),
            "pp=4": short(4),
        },
    ),
)
def test_every_action_of_the_order_is_there_and_a_rank_is_busy_or_idle(
    config: Config, tmp_path: Path
) -> None:
    run_world(train, config, tmp_path)
    timeline = read_timeline(tmp_path / "timeline.json")
    assert [[rank.step for rank in step] for step in timeline.steps] == [
        [step] * config.world_size for step in (3, 4)
    ]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    seconds = {record["step"]: record["step_seconds"] for record in records}
    for rank in (rank for step in timeline.steps for rank in step):
        begun: list[str] = []
        for event in rank.events:
            action = f"{event.stage}{event.kind}{event.mb}"
            if event.kind in ("F", "B", "I", "W") and action not in begun:
                begun.append(action)
        order = timeline.order[rank.pp_rank]
        done = [action for action in order if action in begun]
        assert begun == done and len(done) > 0.7 * len(order)  # an empty W may take no time
        total = rank.end - rank.begin
        assert sum(event.end - event.start for event in rank.events) == pytest.approx(total)
        assert all(a.end == b.start for a, b in zip(rank.events, rank.events[1:], strict=False))
        assert rank.idle < total and total > 0.5 * seconds[rank.step]
    for file in ("timeline.svg", "timeline.png", "timeline_trace.json"):
        assert (tmp_path / file).stat().st_size > 1000
    (text,) = told(tmp_path)
    assert text.startswith("timeline: ") and text.endswith(f"{tmp_path} shows steps 3 to 4")


def test_a_stage_that_takes_longer_is_named_with_a_better_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_world(train_with_a_slow_stage, short(2, layers=8), tmp_path, (1,))
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "- stage 1 is " in text and "heavier than the mean: split=balance" in text
    report = report_of(tmp_path)
    assert report.heaviest()[0] == 1 and report.better_split is not None
    balance, gain = report.better_split
    assert sum(balance) == 8 and balance[0] > balance[1] and gain > 0.05
    waits = [rank.waits_for for rank in report.ranks]
    assert waits[0] == 1 and report.ranks[0].waiting > report.ranks[1].waiting
    assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["balance"]["blocks"] == balance


@pytest.mark.slow
def test_a_rank_that_is_slower_than_its_copies_is_named(tmp_path: Path) -> None:
    run_world(train_with_a_slow_stage, short(1, 2), tmp_path, (1,))
    sentences = report_of(tmp_path).sentences()
    assert sentences[0].startswith("rank 1 (") and "longer than the ranks with" in sentences[0]


def test_gathers_and_reductions_are_told_from_computing(tmp_path: Path) -> None:
    """FSDP does both inside of forwards and backwards where it shards parameters."""
    run_world(train, short(1, 2, fsdp=Fsdp(zero=3)), tmp_path)
    (rank, _), _ = read_timeline(tmp_path / "timeline.json").steps
    inside = {(event.kind, event.stage) for event in rank.events if event.mb >= 0}
    assert inside == {("F", 0), ("B", 0), ("gather", 0), ("reduce", 0)}


def test_who_was_waited_for_is_told_where_a_gather_comes_first() -> None:
    """FSDP may gather between the arrival of a message and the forward that needs it."""
    first = [Box("F", 0, 0, 0.0, 2.0), Box("wait", 0, 0, 2.0, 8.0), Box("B", 0, 0, 8.0, 9.0)]
    last = [Box("wait", 1, 0, 0.0, 2.0), Box("gather", 1, 0, 2.0, 3.0)]
    last += [Box("F", 1, 0, 3.0, 4.0), Box("B", 1, 0, 4.0, 9.0)]
    steps = [
        [RankStep(rank, rank, 3, 0.0, 9.0, events) for rank, events in enumerate((first, last))]
    ]
    order, places = [["0F0", "0B0"], ["1F0", "1B0"]], [Place(0, "a", "cpu"), Place(1, "b", "cpu")]
    timeline = Recorded(to_plain(short(2)), order, [0, 1], [["a"], ["b"]], 1, 0.0, steps, places)
    assert [rank.waits_for for rank in TimelineReport(timeline, None).ranks] == [1, 0]


def test_what_interrupts_an_action_is_cut_out_of_it() -> None:
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
        Box("data", -1, -1, 0.0, 1.0),
        Box("wait", 1, 2, 1.0, 2.0),
        Box("F", 1, 2, 2.0, 3.0),
        Box("gather", 1, 2, 3.0, 5.0),
        Box("F", 1, 2, 5.0, 7.0),
        Box("host", -1, -1, 7.0, 8.0),
    ]


def offset_of_a_wrong_clock(config: Config, worker: Worker) -> tuple[float, float]:
    open_mesh(config, worker)
    real = time.perf_counter
    with mock.patch.object(clock.time, "perf_counter", lambda: real() + 5 * worker.rank):
        found = clock.clock_offset(worker.rank, worker.world_size)
    close_mesh()
    return found


def test_clocks_are_aligned_within_what_is_said(tmp_path: Path) -> None:
    (zero, _), (offset, error) = run_world(offset_of_a_wrong_clock, short(2), tmp_path)
    assert zero == 0 and abs(offset - 5) <= error < 0.5


@pytest.mark.slow
def test_a_timeline_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("a file in its place")
    run_world(train, short(2), tmp_path)
    assert told(tmp_path) == ["timeline: 2 ranks could not write theirs, see their logs"]
    assert "could not be written\nTraceback" in (tmp_path / "rank1.out").read_text()
    with pytest.raises(SystemExit):
        main([])


def test_a_run_without_a_timeline_is_an_error_with_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    text = capsys.readouterr()
    assert "train with timeline=true" in text.out + text.err
    (tmp_path / "timeline.json").write_text("[1]")
    assert main([str(tmp_path)]) == 2


def failing(config: Config, worker: Worker) -> None:
    raise_in = loop.settle

    def settle(*args: Any) -> Any:
        if args[2].step == 3:
            raise OSError("gone")
        return raise_in(*args)

    with mock.patch.object(loop, "settle", settle):
        train(config, worker)


@pytest.mark.slow
def test_a_run_that_fails_meanwhile_ends_as_without_it(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="gone"):
        run_world(failing, short(), tmp_path)


@pytest.mark.parametrize(
    "steps, reason",
    [
        ([3], "two numbers"),
        ([0, 2], "the first step of a run is 1"),
        ([5, 4], "the last step is before the first"),
        ([3, 9], "the run ends with step 8"),
    ],
)
def test_steps_that_a_run_does_not_have_are_refused_with_some_that_it_has(
    steps: list[int], reason: str
) -> None:
    (problem,) = timeline_problems(Timeline(True, steps), 8)
    assert reason in str(problem) and "timeline.steps=[7,8]" in str(problem)
    assert not [*timeline_problems(replace(Timeline(), steps=[7, 8]), 8)]


def cost_of_watching(config: Config, worker: Worker) -> float:
    """CPU time of steps with a timeline / of steps without, in turns."""
    torch.set_num_threads(1)
    run = build(config, open_mesh(config, worker))
    timeline = timeline_module.Timeline(config, worker, run, mock.Mock(), [], mock.Mock())
    run.ranges.connect(run.pipeline, lambda _: None, None)
    stream = batches(open_data(config).train, config, dp_rank=0)
    spent: dict[bool, list[float]] = {True: [], False: []}
    for step in range(4 + 2 * (96 // config.schedule.microbatches + 2)):
        on = bool(step % 2)
        if on:
            timeline._start()
        begin = time.process_time()
        forward_backward(run, config, step, stream)
        if step >= 4:
            spent[on].append(time.process_time() - begin)
        drop_gradients(run)
        timeline._undo()
        run.ranges.remove(timeline)
    close_mesh()
    return statistics.median(a / b for a, b in zip(spent[True], spent[False], strict=True))


@pytest.mark.slow
@pytest.mark.grid
def test_the_bubble_of_equal_stages_is_that_of_the_simulation(tmp_path: Path) -> None:
    """Of stages that are heavy enough for the host not to matter; needs two idle cores."""
    model = Model("llama", tiny(layers=8).model.args | {"dim": 128, "ffn_dim": 512})
    config = short(2, batch_size=8, seq_len=256, model=model, steps=12)
    config = replace(config, timeline=Timeline(True, [5, 12]), schedule=Schedule("1f1b", 8))
    run_world(train, config, tmp_path, timeout=300)
    report = report_of(tmp_path)
    simulated = simulate(report.order, equal_stages(report.order)).bubble
    print(f"bubble {report.bubble:.3f}, of the measured times {report.simulation.bubble:.3f}")
    assert report.bubble == pytest.approx(simulated, abs=0.03)


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("microbatches", [8, 64])
def test_watching_costs_less_than_2_percent_of_a_step(microbatches: int, tmp_path: Path) -> None:
    """Of a model whose microbatches take a few milliseconds."""
    config = tiny(2, 1, Schedule("1f1b", microbatches), batch_size=microbatches, seq_len=128)
    model = Model("llama", config.model.args | {"dim": 128, "ffn_dim": 512})
    found = run_world(cost_of_watching, replace(config, model=model), tmp_path, timeout=300)
    print(f"{microbatches} microbatches: {', '.join(f'{ratio:.4f}' for ratio in found)}")
    assert max(found) < 1.02
