"""The pipeline of a plan as a Gantt chart, a row a rank, and the memory of each rank beneath.

Imports matplotlib, not pyplot, so that a program's own figures are not affected.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from titanlike.config import files
from titanlike.metrics import units
from titanlike.planning.plan import Plan
from titanlike.planning.plan_text import mesh_text
from titanlike.planning.simulate import Event

# of kinds of events: (colour of a rank's first stage, of its others, name)
_KINDS = {
    "F": ("#3f90da", "#8fc0ee", "forward"),
    "again": ("#ffa90e", "#ffd080", "recomputation"),
    "B": ("#2a9d5c", "#7fcea0", "backward"),
    "I": ("#1b8a8f", "#74c4c8", "input gradient"),
    "W": ("#832db6", "#c190de", "weight gradient"),
    "gather": ("#a96b59", "#a96b59", "gather"),
    "reduce": ("#bd1f01", "#bd1f01", "reduce"),
    "update": ("#333333", "#333333", "update"),
    "agree": ("#94a4a2", "#94a4a2", "agree on the norm"),
    "message": ("#e76300", "#e76300", "message"),
}
_IDLE = "#f1f1f1"
_INK = "#333333"
_DPI = 110
_INCHES = 14.0, 60.0  # width: of a usual picture, and at the most
_ACTION = 15.0  # pixels that the shortest action should have
_ROW, _MEMORY_ROW = 0.34, 0.22  # inches


class _Box(NamedTuple):
    kind: str
    rank: int
    first: bool  # of the rank's first stage
    start: float
    end: float
    label: str


def draw(plan: Plan, path: Path, title: str = "") -> None:
    """Write an .svg or .png file."""
    boxes = [*_boxes(plan)]
    ranks, step = plan.config.pp, plan.step_seconds
    width = _width(boxes, step)
    height = 1.7 + ranks * (_ROW + _MEMORY_ROW)
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    ratios = [ranks * _ROW + 0.2, ranks * _MEMORY_ROW + 0.2]
    rows, memory = figure.subplots(2, 1, sharex=True, height_ratios=ratios)
    _draw_rows(rows, plan, boxes, width)
    _draw_memory(memory, plan)
    kinds = dict.fromkeys(box.kind for box in boxes)
    patches = [
        Patch(color=_KINDS[kind][0], label=_KINDS[kind][2]) for kind in _KINDS if kind in kinds
    ]
    patches.append(Patch(facecolor=_IDLE, edgecolor="#cccccc", label="idle"))
    figure.legend(handles=patches, loc="outside lower left", ncols=6, fontsize=8, frameon=False)
    figure.suptitle(title or _title(plan), fontsize=10, x=0.01, ha="left", color=_INK)
    salt = {"svg.fonttype": "none", "svg.hashsalt": "plan"}  # the same file each time
    drawn, kind = io.BytesIO(), path.suffix.lstrip(".")
    with matplotlib.rc_context(salt):
        figure.savefig(drawn, format=kind, metadata={"Date": None} if kind == "svg" else None)
    files.atomic_write_bytes(path, drawn.getvalue())


def _title(plan: Plan) -> str:
    schedule = f"{plan.config.schedule.name}, {plan.draft.microbatches} microbatches"
    device = plan.hardware.title
    step = f"step {units.short_time(plan.step_seconds)}, bubble {plan.simulation.bubble:.1%}"
    return f"{schedule}, {mesh_text(plan)} on {device}: {step}"


def _width(boxes: Iterable[_Box], step: float) -> float:
    lengths = sorted(box.end - box.start for box in boxes if box.kind in "FBIW")
    if not lengths:
        return _INCHES[0]
    usual = lengths[len(lengths) // 3] or step  # some stages may be empty
    return min(_INCHES[1], max(_INCHES[0], _ACTION * step / usual / _DPI))


def _boxes(plan: Plan) -> Iterator[_Box]:
    for rank, events in enumerate(plan.simulation.events):
        local = plan.order.local(rank)
        for event in events:
            if event.end <= event.start:
                continue
            first = not local or event.stage in (local[0], -1)
            middle = event.start + _again(plan, event)
            if middle > event.start:
                yield _Box("again", rank, first, event.start, middle, "")
            label = str(event.mb) if event.mb >= 0 else ""
            yield _Box(event.kind, rank, first, middle, event.end, label)
    for message in plan.simulation.messages:
        if message.end > message.start:
            yield _Box("message", message.sender, True, message.start, message.end, "")


def _again(plan: Plan, event: Event) -> float:
    """Seconds of an event, at its beginning, in which a forward runs again."""
    if event.kind not in ("B", "I"):
        return 0.0
    return plan.times.stages[event.stage].of(event.kind).again


def _draw_rows(axes: Axes, plan: Plan, boxes: list[_Box], width: float) -> None:
    by_colour: dict[str, list[_Box]] = defaultdict(list)
    for box in boxes:
        by_colour[_KINDS[box.kind][0 if box.first else 1]].append(box)
    ranks, step = plan.config.pp, plan.step_seconds
    idle = [_corners(0, step, rank - 0.42, rank + 0.42) for rank in range(ranks)]
    axes.add_collection(PolyCollection(idle, facecolors=_IDLE, linewidths=0))
    for colour, same in by_colour.items():
        shapes = []
        for box in same:
            low, high = (0.30, 0.42) if box.kind == "message" else (-0.42, 0.42)
            shapes.append(_corners(box.start, box.end, box.rank + low, box.rank + high))
        line = {"edgecolors": "white", "linewidths": 0.4}
        axes.add_collection(PolyCollection(shapes, facecolors=colour, **line))
    pixels = (width - 1.0) * _DPI / step
    for box in boxes:
        room = (box.end - box.start) * pixels
        size = min(8.0, room / (1.25 * max(1, len(box.label))))
        if box.label and size >= 3.5:
            middle = (box.start + box.end) / 2
            style = {"ha": "center", "va": "center", "color": "white" if box.first else _INK}
            axes.text(middle, box.rank, box.label, fontsize=size, clip_on=True, **style)
    axes.set_xlim(0, step)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    axes.tick_params(axis="x", labelbottom=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _corners(left: float, right: float, low: float, high: float) -> list[tuple[float, float]]:
    return [(left, low), (right, low), (right, high), (left, high)]


def _draw_memory(axes: Axes, plan: Plan) -> None:
    """Of each rank a curve in a row of its own; a row is what a device has."""
    ranks, step = plan.config.pp, plan.step_seconds
    most = (
        max(plan.hardware.usable, *plan.memory_bytes)
        if not _small(plan)
        else max(plan.memory_bytes)
    )
    for rank, (times, sizes) in enumerate(memory_curves(plan)):
        base = rank + 0.5
        heights = [base - 0.92 * size / most for size in sizes]
        axes.fill_between(times, base, heights, color="#94a4a2", linewidth=0)
        peak = max(sizes)
        axes.text(step, base - 0.08, f" {units.size(peak)}", fontsize=7, color=_INK, va="bottom")
    axes.set_ylim(ranks - 0.45, -0.55)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.short_time(value)))
    axes.tick_params(axis="x", labelsize=8)
    of = "the fullest rank takes" if _small(plan) else "a device has"
    axes.set_title(
        f"memory; a row's height is what {of}, {units.size(most)}",
        fontsize=8,
        loc="left",
        color=_INK,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)


def _small(plan: Plan) -> bool:
    """Whether what a device has would hide what is taken."""
    return max(plan.memory_bytes) < 0.3 * plan.hardware.usable


def memory_curves(plan: Plan) -> Iterator[tuple[list[float], list[int]]]:
    """(seconds, bytes) of each rank."""
    for rank, moments in enumerate(plan.moments):
        events = {event[:3]: event for event in plan.simulation.events[rank]}
        times, sizes = [0.0], [moments[0].after.total if moments else 0]
        for moment in moments:
            if moment.act is None:
                begin, end = plan.simulation.pipeline, plan.step_seconds
            else:
                event = events[tuple(moment.act)]
                begin, end = event.start, event.end
            times += [begin, begin, end, end]
            most = moment.most.total
            sizes += [sizes[-1], most, most, moment.after.total]
        yield times, sizes
