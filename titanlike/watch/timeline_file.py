"""Files of a timeline: one per rank, and timeline.json with all of them.

A rank's events are contiguous: they cover its step from begin to end. Their kinds are those of
charts, where two are idle time:
- wait: for the P2P receive that an action needs,
- agree: in an all-reduce: of the batch's token count, or of loss and gradient norm.
"""

from __future__ import annotations

import json
import math
import operator
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from titanlike.core.config import files
from titanlike.core.metrics import units
from titanlike.watch.chart import Chart, Span

IDLE = ("wait", "agree")
_MOST_EVENTS = 20_000  # of a rank in a step; some comparisons are quadratic in them
COMPUTED = ("F", "B", "I", "W")
_PIPELINE = (*COMPUTED, "gather", "reduce", "wait")


@dataclass
class RankStep:
    """A step of a rank; times in seconds of rank 0's clock, in a `Timeline` since the step began."""

    rank: int
    pp_rank: int
    step: int
    begin: float
    end: float
    events: list[Span]

    def spent(self) -> dict[str, float]:
        """Seconds by kind, in decreasing order."""
        seconds: dict[str, float] = {}
        for event in self.events:
            seconds[event.kind] = seconds.get(event.kind, 0.0) + event.end - event.start
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))


@dataclass
class RankFile:
    """The timeline file of one rank."""

    steps: list[RankStep]
    host: str
    device: str
    clock_error: float  # seconds; bound of this rank's offset to rank 0's clock


class Place(NamedTuple):
    """The host and device of a rank."""

    rank: int
    host: str
    device: str


@dataclass
class Timeline:
    """The recorded steps of all ranks."""

    config: dict[str, Any]  # the run's, plain
    order: list[list[str]]  # the actions of each pipeline rank, e.g. 0F3
    place: list[int]  # the pipeline rank of each stage
    stages: list[list[str]]  # the modules of each stage
    microbatch: int  # samples
    clock_error: float  # seconds; bound of the offset between two ranks' clocks
    steps: list[list[RankStep]]  # [step][rank]
    ranks: list[Place]

    def first_pipeline(self, step: list[RankStep]) -> list[RankStep]:
        """The lowest rank of each pipeline rank, in pipeline order."""
        first = {rank.pp_rank: rank for rank in reversed(step)}
        return [first[pp_rank] for pp_rank in sorted(first)]

    @property
    def typical(self) -> list[RankStep]:
        """The step of median length, among those without validation or save if there are any."""
        plain = [s for s in self.steps if not any(e.kind == "other" for r in s for e in r.events)]
        by_length = sorted(plain or self.steps, key=lambda step: max(rank.end for rank in step))
        return by_length[(len(by_length) - 1) // 2]

    def local(self, pp_rank: int) -> list[int]:
        """The stages of a pipeline rank."""
        return [stage for stage, rank in enumerate(self.place) if rank == pp_rank]


def window(ranks: Sequence[RankStep]) -> tuple[float, float]:
    """(begin, end) of work on microbatches: from the first rank's first action to the last rank's
    last."""
    events = [e for rank in ranks for e in rank.events if e.kind in _PIPELINE]
    busy = [event for event in events if event.kind != "wait"] or events
    if not busy:
        return 0.0, 0.0
    return min(event.start for event in busy), max(event.end for event in busy)


def bubble(ranks: Sequence[RankStep]) -> float:
    """The mean share of the pipeline's time (`window`) in which a rank is idle."""
    begin, end = window(ranks)
    if end <= begin:
        return 0.0
    waits = [event for rank in ranks for event in rank.events if event.kind in IDLE]
    idle = sum(max(0.0, min(event.end, end) - max(event.start, begin)) for event in waits)
    return idle / (len(ranks) * (end - begin))


def write(path: Path, record: RankFile | Timeline) -> None:
    """Write a timeline file. Raises OSError."""
    files.atomic_write_text(path, json.dumps(asdict(record)))


def read_rank(path: Path) -> RankFile:
    """Read a rank's file. Raises OSError, ValueError, KeyError or TypeError if it is missing or
    invalid."""
    data = files.read_object(path)
    return RankFile(**{**data, "steps": [*map(_rank_step, data["steps"])]})


def read_timeline(path: Path) -> Timeline:
    """Read a timeline.json. Raises OSError, and ValueError for what no run has written."""
    timeline: Timeline = files.read_object(path, Timeline)
    try:
        steps = [[_rank_step(rank) for rank in step] for step in timeline.steps]  # type: ignore
        places = [Place(operator.index(n), str(h), str(d)) for n, h, d in timeline.ranks]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: is damaged ({error})") from None
    pipelines = {tuple(rank.rank for rank in step) for step in steps}
    per_rank = {rank.pp_rank for step in steps for rank in step}
    stages = {*range(len(timeline.place))}
    spans = [event for step in steps for rank in step for event in rank.events]
    if (
        len(pipelines) != 1
        or per_rank != {*range(len(timeline.order))}
        or not {*timeline.place} <= per_rank
        or not {event.stage for event in spans} <= stages | {-1}
        or len(timeline.stages) != len(stages)
        or max(len(rank.events) for rank in steps[0]) > _MOST_EVENTS
        or not all(math.isfinite(event.start + event.end) for event in spans)
    ):
        raise ValueError(f"{path}: its parts do not belong together")
    return replace(timeline, steps=steps, ranks=places)


def _rank_step(data: dict[str, Any]) -> RankStep:
    events = [
        Span(str(kind), operator.index(stage), operator.index(mb), float(start), float(end))
        for kind, stage, mb, start, end in data["events"]
    ]
    return files.as_record({**data, "events": events}, RankStep)


def merge(
    rank_files: Sequence[RankFile],
    config: dict[str, Any],
    order: Sequence[Sequence[str]],
    place: Sequence[int],
    stages: Sequence[Sequence[str]],
    microbatch: int,
) -> Timeline:
    """Merge the files of ranks, in rising order and with times of rank 0's clock, to a timeline."""
    steps: list[list[RankStep]] = []
    for number in [step.step for step in rank_files[0].steps]:
        ranks = [step for file in rank_files for step in file.steps if step.step == number]
        zero = min(rank.begin for rank in ranks)
        steps.append([])
        for rank in ranks:
            events = [e._replace(start=e.start - zero, end=e.end - zero) for e in rank.events]
            begin, end = rank.begin - zero, rank.end - zero
            steps[-1].append(replace(rank, begin=begin, end=end, events=events))
        _wait_for_the_last(steps[-1])
    recorded = [file for file in rank_files if file.steps]
    places = [Place(file.steps[0].rank, file.host, file.device) for file in recorded]
    error = 2 * max(file.clock_error for file in rank_files)
    units = [*map(list, stages)]
    return Timeline(config, [*map(list, order)], [*place], units, microbatch, error, steps, places)


def _wait_for_the_last(ranks: list[RankStep]) -> None:
    """Split each all-reduce into waiting for the last rank that joins it, and the all-reduce
    itself."""
    agreeing = [[event for event in rank.events if event.kind == "agree"] for rank in ranks]
    if len({len(events) for events in agreeing}) != 1:
        return
    for met in zip(*agreeing, strict=True):
        last = max(event.start for event in met)
        for rank, event in zip(ranks, met, strict=True):
            if event.start < last < event.end:
                index = rank.events.index(event)
                waited = Span("wait", -1, -1, event.start, last)
                rank.events[index : index + 1] = [waited, event._replace(start=last)]


def chart_of(timeline: Timeline) -> Chart:
    """The chart of the typical step, with one rank per pipeline rank."""
    ranks = timeline.first_pipeline(timeline.typical)
    end = max(rank.end for rank in ranks)
    microbatches = len({act for acts in timeline.order for act in acts if act.startswith("0F")})
    title = (
        f"{timeline.config['schedule']['name']}, {units.microbatches(microbatches)}, pp={len(ranks)}: step "
        f"{ranks[0].step} of a run took {units.short_time(end)}, bubble {bubble(ranks):.1%}"
    )
    rows = [[e for e in rank.events if e.kind != "wait"] for rank in ranks]
    first = [next(iter(timeline.local(rank.pp_rank)), -1) for rank in ranks]
    return Chart(title, rows, first, end)


def stage_seconds(timeline: Timeline, stage: int) -> dict[str, float]:
    """Median seconds of a stage on one rank: F, B, I and W per microbatch, including collectives
    inside them; gather and reduce once per step. 0 for kinds that do not occur."""
    samples: dict[str, list[float]] = {kind: [] for kind in (*COMPUTED, "gather", "reduce")}
    for step in timeline.steps:
        pipeline = timeline.first_pipeline(step)
        (rank,) = [rank for rank in pipeline if rank.pp_rank == timeline.place[stage]]
        for kind, seconds in _actions(rank, stage):
            samples[kind].append(seconds)
        for kind in ("gather", "reduce"):
            exchanges = [e for e in rank.events if e.kind == kind and e.stage == stage and e.mb < 0]
            samples[kind].append(sum(event.end - event.start for event in exchanges))
    return {kind: statistics.median(seconds or [0.0]) for kind, seconds in samples.items()}


def _actions(rank: RankStep, stage: int) -> Iterator[tuple[str, float]]:
    """Yield (kind, seconds) of a stage's actions, including collectives inside them."""
    for (event_stage, mb), events in groupby(rank.events, key=lambda event: event[1:3]):
        if event_stage != stage or mb < 0:
            continue
        kind, seconds = "", 0.0
        for event in events:
            if event.kind in COMPUTED and kind not in ("", event.kind):
                yield kind, seconds
                seconds = 0.0
            kind = event.kind if event.kind in COMPUTED else kind
            seconds += 0.0 if event.kind in IDLE else event.end - event.start
        if kind:
            yield kind, seconds
