"""Draw a chart with one row per pipeline rank, above a memory curve per rank. A long chart is split
into several lines.

Imports matplotlib but not pyplot, so that a program's own figures are not affected.
"""

from __future__ import annotations

import io
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import FuncFormatter

from titanlike.core.config import files
from titanlike.core.metrics import units
from titanlike.watch.chart import KINDS, Chart

_IDLE = "#f1f1f1"
_INK = "#333333"
_DPI = 110
_WIDTH, _TALLEST = 14.0, 20.0  # inches: a picture's width, and the most height of its lines
_LINES = 8  # limit for one rank, whose actions all-gathers split into many short ones
_ACTION = 15.0  # pixels; desired width of a short action
_ROW, _MEMORY_ROW = 0.34, 0.22  # inches


class _Shape(NamedTuple):
    kind: str
    rank: int
    first: bool  # whether it belongs to the rank's first stage
    start: float
    end: float
    label: str


def draw(chart: Chart, path: Path) -> None:
    """Write the chart to an .svg or .png file."""
    files.atomic_write_bytes(path, picture(chart, path.suffix.lstrip(".")))


def inline_svg(chart: Chart) -> str:
    """Render the chart as an <svg> element for an HTML page or a notebook."""
    text = picture(chart, "svg").decode()
    return text[text.index("<svg") :]


def picture(chart: Chart, kind: str) -> bytes:
    """Render the chart as the content of a file; kind: svg or png."""
    shapes, ranks = [*_shapes(chart)], len(chart.rows)
    lengths = sorted(shape.end - shape.start for shape in shapes if shape.kind in "FBIW")
    heights = [ranks * _ROW + 0.2, *([ranks * _MEMORY_ROW + 0.2] if chart.memory else [])]
    lines = 1
    if lengths:
        usual = lengths[len(lengths) // 3] or chart.seconds  # some stages may be empty
        needed = math.ceil(_ACTION * chart.seconds / usual / (_WIDTH * _DPI))
        needed = min(needed, _LINES) if ranks == 1 else needed
        lines = max(1, min(needed, int(_TALLEST / sum(heights))))
    figure = Figure(
        figsize=(_WIDTH, 1.3 + lines * sum(heights)),
        dpi=_DPI,
        layout="constrained",
        facecolor="white",
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines * len(heights), 1, squeeze=False, height_ratios=heights * lines)
    for line in range(lines):
        rows, *memory = grid[line * len(heights) : (line + 1) * len(heights), 0]
        begin, end = (index * chart.seconds / lines for index in (line, line + 1))
        within = [shape for shape in shapes if shape.start < end and shape.end > begin]
        _draw_rows(rows, within, ranks, begin, end)
        for axes in memory:
            rows.tick_params(axis="x", labelbottom=False)
            _draw_memory(axes, chart, begin, end)
        for axes in (rows, *memory):
            axes.set_xlim(begin, end)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.short_time(value)))
            axes.tick_params(axis="x", labelsize=8)
    kinds = {shape.kind for shape in shapes}
    patches = [Patch(color=KINDS[k][1], label=KINDS[k][0]) for k in KINDS if k in kinds]
    patches.append(Patch(facecolor=_IDLE, edgecolor="#cccccc", label="idle"))
    figure.legend(handles=patches, loc="outside lower left", ncols=6, fontsize=8, frameon=False)
    figure.suptitle(chart.title, fontsize=10, x=0.01, ha="left", color=_INK)
    settings: dict[Any, Any] = {  # makes the file reproducible
        "svg.fonttype": "none",
        "svg.hashsalt": "plan",
        "font.sans-serif": ["DejaVu Sans"],
    }
    drawn = io.BytesIO()
    with matplotlib.rc_context(settings):
        figure.savefig(drawn, format=kind, metadata={"Date": None} if kind == "svg" else None)
    data = drawn.getvalue()
    if kind == "svg":  # put each outline and each text on one line
        data = re.sub(rb"<!--.*?-->", b"", data, flags=re.DOTALL)
        data = re.sub(rb"\s*\n\s*(?=[MLQCz\"])", b" ", data)
        data = re.sub(rb">\s+(?=<text|<path|<use|</g>)", b">", data)
    return data


def _shapes(chart: Chart) -> Iterator[_Shape]:
    for rank, row in enumerate(chart.rows):
        for span in row:
            if span.end > span.start:
                first = span.stage in (chart.first[rank], -1)
                label = str(span.mb) if span.mb >= 0 and span.kind != "again" else ""
                yield _Shape(span.kind, rank, first, span.start, span.end, label)
    for message in chart.messages:
        if message.end > message.start:
            yield _Shape("message", message.sender, True, message.start, message.end, "")


def _draw_rows(axes: Axes, shapes: list[_Shape], ranks: int, begin: float, end: float) -> None:
    by_colour: dict[str, list[_Shape]] = defaultdict(list)
    for shape in shapes:
        by_colour[KINDS[shape.kind][1 if shape.first else 2]].append(shape)
    _add(axes, [(begin, end, rank - 0.42, rank + 0.42) for rank in range(ranks)], _IDLE, 0)
    for colour, same in by_colour.items():
        boxes = []
        for shape in same:
            low, high = (0.30, 0.42) if shape.kind == "message" else (-0.42, 0.42)
            boxes.append((shape.start, shape.end, shape.rank + low, shape.rank + high))
        _add(axes, boxes, colour, 0.4)
    pixels = (_WIDTH - 1.0) * _DPI / (end - begin)
    for shape in shapes:
        size = min(8.0, (shape.end - shape.start) * pixels / (1.25 * max(1, len(shape.label))))
        if shape.label and size >= 3.5:
            middle = (shape.start + shape.end) / 2
            color = "white" if shape.first else _INK
            style: dict[str, Any] = {"ha": "center", "va": "center", "color": color}
            axes.text(middle, shape.rank, shape.label, fontsize=size, clip_on=True, **style)
    axes.set_ylim(ranks - 0.5, -0.5)
    _label_ranks(axes, ranks)


def _add(axes: Axes, boxes: Sequence[tuple[float, ...]], colour: str, line: float) -> None:
    """Draw all (left, right, low, high) boxes of a colour as one path, which keeps the file small."""
    corners = [[(left, y), (right, y), (right, z), (left, z)] for left, right, y, z in boxes]
    outline = Outline.make_compound_path_from_polys(np.array(corners))
    axes.add_patch(PathPatch(outline, facecolor=colour, edgecolor="white", linewidth=line))


def _draw_memory(axes: Axes, chart: Chart, begin: float, end: float) -> None:
    """Draw each rank's memory curve in its own row. The height of a row is the device's memory, or
    the peak of the fullest rank if that is below 30% of it."""
    fullest = max(max(curve.nbytes) for curve in chart.memory)
    small = fullest < 0.3 * chart.device_memory
    row_bytes = fullest if small else max(chart.device_memory, fullest)
    for rank, (times, sizes) in enumerate(chart.memory):
        base = rank + 0.5
        heights = [base - 0.92 * size / row_bytes for size in sizes]
        axes.fill_between(times, base, heights, color="#94a4a2", linewidth=0)
        peak = units.size(max(sizes))
        if end == chart.seconds:
            axes.text(end, base - 0.08, f" {peak}", fontsize=7, color=_INK, va="bottom")
    axes.set_ylim(len(chart.memory) - 0.45, -0.55)
    _label_ranks(axes, len(chart.memory))
    reference = "the fullest rank takes" if small else "a device has"
    if not begin:
        title = f"memory; a row's height is what {reference}, {units.size(row_bytes)}"
        axes.set_title(title, fontsize=8, loc="left", color=_INK)


def _label_ranks(axes: Axes, ranks: int) -> None:
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
