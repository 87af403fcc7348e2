"""The step of a plan as a chart, with the memory of each rank."""

from __future__ import annotations

from collections.abc import Iterator

from titanlike.costs.plan import Plan
from titanlike.costs.plan_text import mesh_text
from titanlike.metrics import units
from titanlike.metrics.chart import Box, Chart, MemoryCurve


def chart_of(plan: Plan) -> Chart:
    ranks = range(plan.config.pp)
    return Chart(
        title=_title(plan),
        rows=[[*_boxes(plan, rank)] for rank in ranks],
        first=[next(iter(plan.order.local(rank)), -1) for rank in ranks],
        seconds=plan.step_seconds,
        messages=plan.simulation.messages,
        memory=[*_memory_curves(plan)],
        device_memory=plan.hardware.usable,
    )


def _title(plan: Plan) -> str:
    schedule = f"{plan.config.schedule.name}, {plan.draft.microbatches} microbatches"
    device = plan.hardware.title
    step = f"step {units.short_time(plan.step_seconds)}, bubble {plan.simulation.bubble:.1%}"
    return f"{schedule}, {mesh_text(plan)} on {device}: {step}"


def _boxes(plan: Plan, rank: int) -> Iterator[Box]:
    for event in plan.simulation.events[rank]:
        again = 0.0  # seconds, at its beginning, in which a forward runs again
        if event.kind in ("B", "I"):
            again = plan.times.stages[event.stage].of(event.kind).again
        if again > 0:
            yield event._replace(kind="again", end=event.start + again)
        yield event._replace(start=event.start + again)


def _memory_curves(plan: Plan) -> Iterator[MemoryCurve]:
    for rank, moments in enumerate(plan.moments):
        events = {event[:3]: event for event in plan.simulation.events[rank]}
        times, sizes = [0.0], [moments[0].after.total if moments else 0]
        for moment in moments:
            if moment.act is None:
                begin, end = plan.simulation.pipeline, plan.step_seconds
            else:
                event = events[moment.act[:3]]
                begin, end = event.start, event.end
            times += [begin, begin, end, end]
            most = moment.most.total
            sizes += [sizes[-1], most, most, moment.after.total]
        yield MemoryCurve(times, sizes)
