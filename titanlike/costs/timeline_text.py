"""Timelines as text for a terminal, and as plain data for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from titanlike.costs.plan_text import table
from titanlike.costs.timeline_report import RankTimes, TimelineReport
from titanlike.metrics import units

_FEW = 32  # ranks that each have a line


def as_data(report: TimelineReport) -> dict[str, Any]:
    """One JSON object. Seconds, shares of 1."""
    plan = report.plan
    better = report.better_split
    return {
        "steps": [step[0].step for step in report.timeline.steps],
        "step_seconds": report.seconds,
        "bubble": report.bubble,
        "bubble_of_measured_times": report.simulation.bubble,
        "clock_error_seconds": report.timeline.clock_error,
        "ranks": [asdict(rank) for rank in report.ranks],
        "stages": [
            {
                "stage": stage,
                "forward_seconds": times.forward.device,
                "backward_seconds": times.backward.device,
                "input_gradient_seconds": times.input_gradient.device,
                "weight_gradient_seconds": times.weight_gradient.device,
            }
            for stage, times in enumerate(report.measured)
        ],
        "planned": None
        if plan is None
        else {
            "hardware": plan.hardware.title,
            "step_seconds": plan.step_seconds,
            "bubble": plan.simulation.bubble,
        },
        "balance": None if better is None else {"blocks": better[0], "gain": better[1]},
        "advice": report.sentences(),
    }


def as_text(reports: Sequence[tuple[str, TimelineReport]], width: int = 80) -> str:
    """reports: (name of the run, its report); several are compared."""
    parts = []
    for name, report in reports:
        parts += [_summary(name, report), _rank_table(report, width), _stage_table(report, width)]
        sentences = [
            textwrap.fill(text, width, initial_indent="- ", subsequent_indent="  ")
            for text in report.sentences()
        ]
        parts.append("\n".join(sentences or ["nothing stands out"]))
    if len(reports) > 1:
        parts.append(_comparison(reports, width))
    return "\n\n".join(parts)


def _summary(name: str, report: TimelineReport) -> str:
    steps = [step[0].step for step in report.timeline.steps]
    measured = f"step {units.short_time(report.seconds)}, bubble {report.bubble:.1%}"
    lines = [
        f"{name}: {report.config.schedule.name}, pp={len(report.order.ranks)}, "
        f"{report.order.microbatches} microbatches, steps {steps[0]} to {steps[-1]}",
        f"  measured                  {measured}",
        f"  order with these times    {_of(report.simulation.step, report.simulation.bubble)}",
    ]
    if report.plan is not None:
        planned = _of(report.plan.step_seconds, report.plan.simulation.bubble)
        lines.append(f"  plan                      {planned} ({report.plan.hardware.title})")
    if report.timeline.clock_error:
        error = units.short_time(report.timeline.clock_error)
        lines.append(f"  clocks of two ranks are at most {error} apart")
    return "\n".join(lines)


def _of(seconds: float, bubble: float) -> str:
    return f"step {units.short_time(seconds)}, bubble {bubble:.1%}"


def _rank_table(report: TimelineReport, width: int) -> str:
    header = [
        "rank",
        "pp",
        "step",
        "computes",
        "planned",
        "exchanges",
        "waits",
        "for",
        "agrees",
        "rest",
    ]
    rows = []
    for rank in report.ranks[:_FEW]:
        rows.append(_rank_row(report, rank))
    text = table(header, rows, width)
    left = len(report.ranks) - _FEW
    return text + (f"\n  and {left} more: --json" if left > 0 else "")


def _rank_row(report: TimelineReport, rank: RankTimes) -> list[str]:
    def share(seconds: float) -> str:
        return f"{seconds / rank.step:.1%}" if rank.step else "-"

    planned = "-"
    if report.plan is not None:
        simulation = report.plan.simulation
        planned = f"{simulation.computes[rank.pp_rank] / simulation.step:.1%}"
    return [
        str(rank.rank),
        str(rank.pp_rank),
        units.short_time(rank.step),
        share(rank.computing),
        planned,
        share(rank.exchanging),
        share(rank.waiting),
        "-" if rank.waits_for is None else f"pp {rank.waits_for}",
        share(rank.agreeing),
        share(rank.host),
    ]


def _stage_table(report: TimelineReport, width: int) -> str:
    if not report.order.splits_backward:
        kinds = {"forward": "forward", "backward": "backward"}
    else:
        kinds = {"forward": "forward", "input gradient": "input_gradient"}
        kinds["weight gradient"] = "weight_gradient"
    header, rows = ["stage", "pp", *kinds, "of the mean", "planned"], []
    seconds = report.stage_seconds
    mean = sum(seconds) / len(seconds) or 1.0
    planned = _planned(report)
    for stage, times in enumerate(report.measured):
        each = [units.short_time(getattr(times, name).device) for name in kinds.values()]
        of_mean = f"{seconds[stage] / mean:.0%}"
        rows.append([str(stage), str(report.order.place[stage]), *each, of_mean, planned[stage]])
    return table(header, rows, width)


def _planned(report: TimelineReport) -> list[str]:
    """Of each stage: what the plan has of the mean."""
    if report.plan is None:
        return ["-"] * report.order.stages
    each = [t.forward.device + t.backward.device for t in report.plan.times.stages]
    mean = sum(each) / len(each) or 1.0
    return [f"{seconds / mean:.0%}" for seconds in each]


def _comparison(reports: Sequence[tuple[str, TimelineReport]], width: int) -> str:
    header = ["run", "schedule", "step", "bubble", "computes", "waits", "tokens/s"]
    rows = []
    for name, report in reports:
        config, ranks = report.config, report.ranks
        share = sum(rank.computing / rank.step for rank in ranks) / len(ranks)
        waits = sum((rank.waiting + rank.agreeing) / rank.step for rank in ranks) / len(ranks)
        speed = config.batch_size * config.seq_len / report.seconds
        times = [units.short_time(report.seconds), f"{report.bubble:.1%}", f"{share:.1%}"]
        rows.append([name, config.schedule.name, *times, f"{waits:.1%}", f"{speed:,.0f}"])
    return table(header, rows, width)
