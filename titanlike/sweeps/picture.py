"""sweep.png: the loss curves of a sweep's jobs, and their throughput. Imports matplotlib, not pyplot,
so that a program's own figures are not affected."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from titanlike.config import files
from titanlike.metrics import units
from titanlike.sweeps.curves import read_curve, smooth
from titanlike.sweeps.job_status import JobRow
from titanlike.sweeps.loss_plot import draw_losses
from titanlike.sweeps.plot_style import DASHED, FEW, INK, job_colours, job_label, style_axes
from titanlike.sweeps.table import PICTURE, Table

BARS = 60  # of more jobs, the fastest and the slowest are shown
_SLOWEST = 15
_POINTS = 100_000  # of all curves together


def draw(table: Table) -> Path | None:
    """Write folder/sweep.png; None where no job has logged a step."""
    rows = [row for row in table.rows if row.summary.steps]
    if not rows:
        return None
    points = min(1000, max(100, _POINTS // len(rows)))
    curves = {row.job.number: read_curve(row.run_dir, points) for row in rows}
    if len(rows) > FEW:
        curves = {number: smooth(curve) for number, curve in curves.items()}
    colours = job_colours(rows, table.value)
    bars = _bars(rows)
    height = min(14.0, max(4.6, 1.3 + 0.19 * len(bars)))
    figure = Figure(figsize=(14, height), dpi=110, layout="constrained", facecolor="white")
    ratio = [1.75, 1] if bars else [1]
    axes = figure.subplots(1, len(ratio), gridspec_kw={"width_ratios": ratio}, squeeze=False)[0]
    draw_losses(axes[0], rows, curves, colours, table)
    if bars:
        _draw_throughput(axes[1], bars, colours, table)
    path = table.folder / PICTURE
    image = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # drawn as a box
        FigureCanvasAgg(figure).print_png(image)
    files.atomic_write_bytes(path, image.getvalue())
    return path


def _bars(rows: list[JobRow]) -> list[JobRow]:
    """The rows that have a bar: few in order of their numbers, many by speed."""
    fast = [row for row in rows if row.summary.tokens_per_second]
    if len(fast) <= FEW:
        return fast
    fast.sort(key=lambda row: -(row.summary.tokens_per_second or 0))
    return fast if len(fast) <= BARS else fast[: BARS - _SLOWEST] + fast[-_SLOWEST:]


def _draw_throughput(axes: Axes, bars: list[JobRow], colours: dict[int, Any], table: Table) -> None:
    places = list(range(len(bars)))
    speeds = [row.summary.tokens_per_second or 0.0 for row in bars]
    drawn = axes.barh(places, speeds, height=0.72, color=[colours[row.job.number] for row in bars])
    small = 8 if len(bars) <= 40 else 6.5
    notes = []
    for row in bars:
        memory = row.summary.memory_bytes
        notes.append(
            units.count(row.summary.tokens_per_second or 0)
            + (f"  {units.size(memory)}" if memory else "")
        )
    axes.bar_label(drawn, notes, padding=3, fontsize=small, color=INK)
    for bar, row in zip(drawn, bars, strict=True):
        if row.status in DASHED:
            colour = colours[row.job.number]
            bar.set(facecolor=to_rgba(colour, 0.2), edgecolor=colour, linestyle="--")
    axes.set_yticks(places, [job_label(table, row, 40) for row in bars])
    axes.set_ylim(max(len(bars), 4) - 0.4, -0.6)  # the first at the top
    axes.set_xlim(0, max(speeds) * 1.32)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.count(value)))
    axes.set_xlabel("tokens/s, and the peak memory of a rank")
    most = sum(row.summary.tokens_per_second is not None for row in table.rows) > len(bars)
    some = f", the {BARS - _SLOWEST} fastest and the {_SLOWEST} slowest" if most else ""
    axes.set_title(f"throughput{some}", loc="left", fontsize=11, fontweight="bold", color=INK)
    style_axes(axes)
    axes.grid(True, axis="x", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0, labelsize=small)
