"""What a run's page (report.html) shows beside its records: its schedule, its recorded step, and
the plans of both its step and its goodput."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.core.config.errors import ConfigError
from titanlike.core.config.files import as_record
from titanlike.core.config.groups.watching import TIMELINE
from titanlike.core.config.received import Consent
from titanlike.core.metrics import units
from titanlike.core.metrics.goodput import goodput
from titanlike.core.metrics.run_files import STARTS
from titanlike.core.metrics.summary import is_number, jsonl_records
from titanlike.watch import timeline_file
from titanlike.watch.chart import Chart

if TYPE_CHECKING:
    from titanlike.core.pipeline.order import Order


def run_charts(
    run_dir: Path, layout: dict[str, Any], planned: Consent | None = None
) -> Iterator[Chart]:
    """Yield the charts of a run, except those whose files are missing or damaged.

    layout: of its newest launch, from starts.jsonl. planned: consent to also plan a run that has
    recorded a timeline, which takes seconds and imports torch; None = no plan.
    """
    if (run_dir / TIMELINE).is_file():
        try:
            measured = timeline_file.chart_of(timeline_file.read_timeline(run_dir / TIMELINE))
            yield replace(measured, title=f"measured: {measured.title}")
        except (OSError, ValueError, LookupError, TypeError):
            planned = None
        if planned is not None:
            from titanlike.planning.estimate_text import chart_of
            from titanlike.planning.timeline_report import report_of

            try:
                estimate = report_of(run_dir, planned).estimate
            except ConfigError:
                estimate = None
            if estimate is not None:
                yield replace(chart := chart_of(estimate), title=f"planned: {chart.title}")
    try:
        drawn = as_record(layout, _Layout)
        from titanlike.core.pipeline.order import MOST_DRAWN, Order
        from titanlike.core.pipeline.order_check import check_order

        if sum(map(len, drawn.order)) <= MOST_DRAWN:
            order = check_order(Order.from_rows(drawn.order, drawn.place))
            yield order_chart(order, drawn.schedule)
    except ValueError:  # no pipeline, or the order is too long or damaged
        return


def planned_goodput(run_dir: Path) -> str:
    """What goodput a run with as many failures, and with the times of its own steps, saves and
    starts, is expected to have; "" without a failure, or if its files do not say.

    More is lost than planned if failures come where they cost most, or by waits for data.
    """
    from titanlike.planning.whole_run import RunTimes, simulate_runs

    seconds = goodput(run_dir)
    starts = [*jsonl_records(run_dir / STARTS, b'"config"')]
    saves = sum(1 for _ in jsonl_records(run_dir / "events.jsonl", b'"saved"'))
    records = jsonl_records(run_dir / "metrics.jsonl", b'"step"')
    last = max((r["step"] for r in records if is_number(r, "step")), default=0)
    failures = len(starts) - 1
    if seconds is None or failures < 1 or not saves or last < 1:
        return ""
    try:
        interval = min(last, starts[-1]["config"]["checkpoint"]["every"] or last)
        stall = seconds["save"] / saves
        times = RunTimes(
            steps=last,
            step=seconds["steps"] / last,
            stall=stall,
            save=stall,
            start=(seconds["start"] + seconds["first_step"]) / len(starts),
            down=seconds["down"] / failures,
            mtbf=(seconds["total"] - seconds["down"]) / failures,
        )
        runs = simulate_runs(times, interval)
        alike = runs.failures == failures
        share = runs.goodput[alike].mean() if alike.any() else runs.goodput.mean()
    # a damaged file, or failures that end no run
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return ""
    many = f"{failures} failure{'s' * (failures > 1)}"
    return f"planned {share:.1%} with {many}, one in {units.duration(times.mtbf)}"


@dataclass(frozen=True)
class _Layout:
    """What a launch's layout says of its schedule, if pp > 1."""

    order: list[list[str]]
    place: list[int]
    schedule: str


def order_chart(order: Order, name: str) -> Chart:
    """Chart an order with equal stages."""
    from titanlike.planning.costs.simulate import equal_stages, simulate

    simulated, ranks = simulate(order, equal_stages(order)), order.ranks
    title = f"schedule: {name}, {units.microbatches(order.microbatches)}, pp={len(ranks)}; with equal stages "
    title += f"and a backward of two forwards: bubble {simulated.bubble:.1%}"
    first = [next(iter(order.local(rank)), -1) for rank in range(len(ranks))]
    return Chart(title, simulated.events, first, simulated.step, timed=False)
