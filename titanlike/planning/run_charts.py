"""The pictures on a run's page (report.html): its schedule, its recorded step, and its plan."""

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
