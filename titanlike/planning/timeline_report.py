"""Compare a timeline with the plan: where each rank's time went.

The same order is simulated twice: with the plan's stage times, and with the measured ones. The
bubble of the second is due to the schedule; the rest of the measured bubble is machine noise, P2P
transfers and the host.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.groups.watching import TIMELINE
from titanlike.core.config.parse import parse
from titanlike.core.config.received import Consent, named_outside
from titanlike.core.config.schema import OPEN_GROUPS, Config
from titanlike.core.metrics import units
from titanlike.core.pipeline.order import Order
from titanlike.planning.costs.auto_split import run_timeline
from titanlike.planning.costs.simulate import Duration, Simulation, StageTimes, simulate
from titanlike.planning.costs.unit_costs import CostError
from titanlike.planning.estimate import Estimate, make_estimate
from titanlike.planning.estimate_text import table
from titanlike.watch import timeline_file
from titanlike.watch.timeline_file import COMPUTED, RankStep, Timeline

_NONE = Consent()


@dataclass(frozen=True)
class RankTimes:
    """Seconds of a rank's step: medians over the recorded steps."""

    rank: int
    pp_rank: int
    step: float
    computing: float
    communication: float  # exposed all-gathers and gradient reductions of FSDP
    waiting: float  # for P2P receives, or for the last rank to reach an all-reduce
    all_reduce: float  # over all ranks: tokens, loss, norm
    other: float  # between actions, update, data
    waits_for: int | None  # the pipeline rank whose sends it waited for longest


class TimelineReport:
    """A timeline, and a plan of the same run."""

    def __init__(self, timeline: Timeline, estimate: Estimate | None) -> None:
        """estimate: None if no plan can be made."""
        self.timeline, self.estimate = timeline, estimate
        self.config: Config = parse(timeline.config)[0]

    @cached_property
    def order(self) -> Order:
        return Order.from_rows(self.timeline.order, self.timeline.place)

    @cached_property
    def ranks(self) -> list[RankTimes]:
        return [self._rank_times(steps) for steps in zip(*self.timeline.steps, strict=True)]

    def _rank_times(self, steps: Sequence[RankStep]) -> RankTimes:
        """Medians over the recorded steps of one rank; the wait for each sender is summed."""
        by_kind = [step.spent() for step in steps]

        def median(*kinds: str) -> float:
            return statistics.median(sum(s.get(kind, 0.0) for kind in kinds) for s in by_kind)

        waits: dict[int, float] = defaultdict(float)
        for sender, seconds in chain.from_iterable(map(self._senders, steps)):
            waits[sender] += seconds
        total = statistics.median(step.end - step.begin for step in steps)
        parts = {
            "computing": median(*COMPUTED),
            "communication": median("gather", "reduce"),
            "waiting": median("wait"),
            "all_reduce": median("agree"),
        }
        return RankTimes(
            steps[0].rank,
            steps[0].pp_rank,
            step=total,
            **parts,
            other=max(0.0, total - sum(parts.values())),
            waits_for=max(waits, key=waits.__getitem__, default=None),
        )

    def _senders(self, step: RankStep) -> Iterator[tuple[int, float]]:
        """Yield (sending pipeline rank, seconds) of each wait for a P2P receive."""
        for index, wait in enumerate(step.events):
            if wait.kind == "wait" and wait.stage >= 0:
                kinds = (e.kind for e in step.events[index:] if e[1:3] == wait[1:3])
                kind = next((kind for kind in kinds if kind in COMPUTED), "")
                if kind:  # else the recording ended before the action
                    sender = wait.stage + (-1 if kind == "F" else 1)
                    yield self.timeline.place[sender], wait.end - wait.start

    @cached_property
    def seconds(self) -> float:
        """Median seconds of a step."""
        return statistics.median(max(r.end for r in step) for step in self.timeline.steps)

    @cached_property
    def bubble(self) -> float:
        pipelines = [self.timeline.first_pipeline(step) for step in self.timeline.steps]
        return statistics.median(map(timeline_file.bubble, pipelines))

    @cached_property
    def measured(self) -> list[StageTimes]:
        """Measured times of each stage on its first rank, including collectives inside actions."""
        stages = []
        for stage in range(self.order.stages):
            seconds = timeline_file.stage_seconds(self.timeline, stage)
            forward, backward, inputs, weights = (Duration(seconds[kind]) for kind in "FBIW")
            times = StageTimes(forward, backward, inputs, weights)
            stages.append(replace(times, gather=seconds["gather"], reduce=seconds["reduce"]))
        return stages

    @cached_property
    def simulation(self) -> Simulation:
        """Simulation of the order with measured times."""
        return simulate(self.order, self.measured)

    @cached_property
    def stage_seconds(self) -> list[float]:
        """Seconds of forward and backward of a microbatch per stage."""
        return [*map(_whole, self.measured)]


def report_of(run: Path, consent: Consent = _NONE) -> TimelineReport:
    """Make the report of a run's directory, with a plan if the consent covers what its config
    names. Raises ConfigError if it has no readable timeline."""
    try:
        report = TimelineReport(run_timeline(str(run)), None)
    except CostError as error:
        fix = "train with timeline=true, and write the directory of that run"
        raise ConfigError([Problem("timeline", str(run), str(error), fix)]) from None
    # no plan if the model or the data are no longer here
    with contextlib.suppress(ConfigError, ValueError, TypeError, LookupError):
        config = replace(report.config, run_dir=str(run))
        groups = (*OPEN_GROUPS, "split", "hardware", "tokenizer")
        try:
            consent.check(run / TIMELINE, named_outside(config, run, groups))
        except ValueError as error:
            print(f"no plan: {error}", file=sys.stderr)
            return report
        if config.pp == len(report.timeline.order):  # else it is no config of this timeline
            report.estimate = make_estimate(config)
    return report


def _whole(times: StageTimes) -> float:
    split = times.input_gradient.device + times.weight_gradient.device
    return times.forward.device + max(times.backward.device, split)


# --- output as text for a terminal, and as plain data for programs --------------------------------


_FEW = 32  # limit of ranks in a table


def as_data(report: TimelineReport) -> dict[str, Any]:
    """The report as a JSON object. Seconds, fractions of 1."""
    estimate = report.estimate
    planned = estimate and {
        "hardware": estimate.hardware.title,
        "step_seconds": estimate.step_seconds,
        "bubble": estimate.simulation.bubble,
    }
    return {
        "steps": [step[0].step for step in report.timeline.steps],
        "step_seconds": report.seconds,
        "bubble": report.bubble,
        "bubble_of_measured_times": report.simulation.bubble,
        "clock_error_seconds": report.timeline.clock_error,
        "ranks": [asdict(rank) for rank in report.ranks],
        "stages": [
            {"stage": stage, **times.as_data()} for stage, times in enumerate(report.measured)
        ],
        "planned": planned,
    }


def as_text(reports: Sequence[tuple[str, TimelineReport]], width: int = 80) -> str:
    """Format reports, given as (name of the run, report); several are compared."""
    parts = []
    for name, report in reports:
        parts += [_summary(name, report), _rank_table(report, width), _stage_table(report, width)]
    if len(reports) > 1:
        parts.append(_comparison(reports, width))
    return "\n\n".join(parts)


def _summary(name: str, report: TimelineReport) -> str:
    def step(seconds: float, bubble: float) -> str:
        return f"step {units.short_time(seconds)}, bubble {bubble:.1%}"

    steps, simulated = [step[0].step for step in report.timeline.steps], report.simulation
    lines = [
        f"{name}: {report.config.schedule.name}, pp={len(report.order.ranks)}, "
        f"{units.microbatches(report.order.microbatches)}, steps {steps[0]} to {steps[-1]}",
        f"  measured                  {step(report.seconds, report.bubble)}",
        f"  order with these times    {step(simulated.step, simulated.bubble)}",
    ]
    if (estimate := report.estimate) is not None:
        planned = step(estimate.step_seconds, estimate.simulation.bubble)
        lines.append(f"  plan                      {planned} ({estimate.hardware.title})")
    on_cpu = all(place.device == "cpu" for place in report.timeline.ranks)
    if report.config.launch.ranks_per_device > 1 and not on_cpu:
        lines.append("  ranks that share a GPU take turns: what one waits is no layout's wait")
    if report.timeline.clock_error:
        error = units.short_time(report.timeline.clock_error)
        lines.append(f"  clocks of two ranks are at most {error} apart")
    return "\n".join(lines)


def _rank_table(report: TimelineReport, width: int) -> str:
    header = ["rank", "pp", "step", "computes", "planned"]
    header += ["comm", "waits", "for", "all-reduce", "other"]
    rows = []
    for rank in report.ranks[:_FEW]:
        times = rank.computing, rank.communication, rank.waiting, rank.all_reduce, rank.other
        shares = [f"{seconds / rank.step:.1%}" if rank.step else "-" for seconds in times]
        computes, communication, waits, *others = shares
        planned = "-"
        if report.estimate is not None:
            simulated = report.estimate.simulation
            planned = f"{simulated.computes[rank.pp_rank] / simulated.step:.1%}"
        sender = "-" if rank.waits_for is None else f"pp {rank.waits_for}"
        row = [str(rank.rank), str(rank.pp_rank), units.short_time(rank.step), computes, planned]
        rows.append([*row, communication, waits, sender, *others])
    omitted = len(report.ranks) - _FEW
    return table(header, rows, width) + (f"\n  and {omitted} more: --json" if omitted > 0 else "")


def _stage_table(report: TimelineReport, width: int) -> str:
    kinds = {"forward": "forward", "backward": "backward"}
    if report.order.splits_backward:
        kinds = {"forward": "forward", "input gradient": "input_gradient"}
        kinds["weight gradient"] = "weight_gradient"
    relative, planned = _of_mean(report.stage_seconds), ["-"] * report.order.stages
    if report.estimate is not None:
        stages = report.estimate.times.stages
        planned = _of_mean([times.forward.device + times.backward.device for times in stages])
    rows = []
    for stage, times in enumerate(report.measured):
        seconds = [units.short_time(getattr(times, name).device) for name in kinds.values()]
        place = str(report.order.stage_to_rank[stage])
        rows.append([str(stage), place, *seconds, relative[stage], planned[stage]])
    return table(["stage", "pp", *kinds, "of the mean", "planned"], rows, width)


def _of_mean(values: Sequence[float]) -> list[str]:
    mean = sum(values) / len(values) or 1.0
    return [f"{value / mean:.0%}" for value in values]


def _comparison(reports: Sequence[tuple[str, TimelineReport]], width: int) -> str:
    header = ["run", "schedule", "step", "bubble", "computes", "waits", "tokens/s"]
    rows = []
    for name, report in reports:
        config, ranks = report.config, report.ranks
        computes = sum(rank.computing / rank.step for rank in ranks) / len(ranks)
        waits = sum((rank.waiting + rank.all_reduce) / rank.step for rank in ranks) / len(ranks)
        speed = config.batch_size * config.seq_len / report.seconds
        shares = [f"{share:.1%}" for share in (report.bubble, computes, waits)]
        step = units.short_time(report.seconds)
        rows.append([name, config.schedule.name, step, *shares, f"{speed:,.0f}"])
    return table(header, rows, width)
