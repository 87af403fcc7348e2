"""sweep.png: the loss curves of a sweep's jobs, and their throughput. Imports matplotlib, not
pyplot, so that a program's own figures are not affected."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from titanlike.config import files
from titanlike.driver.sweep_status import JobRow
from titanlike.driver.sweep_table import PICTURE, Table
from titanlike.metrics import units
from titanlike.metrics.console import shorten
from titanlike.metrics.summary import OBJECTIVES, parse_records

FEW = 10  # jobs that have a colour each; of more, the best and the worst are named
_FASTEST, _SLOWEST = 45, 15  # bars, of more jobs
_POINTS = 100_000  # of all curves together
_SMOOTHED = 60  # points of each of many curves
_STEEP = 4.0  # a loss that falls by this factor is drawn on a log scale
# Petroff's ten colours (arXiv 2107.02270), distinguishable with any colour vision
COLOURS = [
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
]
GREY, INK = "#b8b8b8", "#333333"
_DASHED = ("failed", "killed", "interrupted")


def draw(table: Table) -> Path | None:
    """Write folder/sweep.png; None where no job has logged a step."""
    rows = [row for row in table.rows if row.summary.steps]
    if not rows:
        return None
    bars = [row for row in rows if row.summary.tokens_per_second]
    if len(bars) > FEW:  # few in order of their numbers, many by speed
        bars.sort(key=lambda row: -(row.summary.tokens_per_second or 0))
        if len(bars) > _FASTEST + _SLOWEST:
            bars = bars[:_FASTEST] + bars[-_SLOWEST:]
    ranked, colours = (
        _ranked(rows, table.spec.value),
        dict.fromkeys((r.job.number for r in rows), GREY),
    )
    if len(rows) <= FEW:
        colours = dict(zip(colours, COLOURS, strict=False))
    else:  # viridis' brightest end is hard to see on white
        shades = colormaps["viridis"](np.linspace(0, 0.93, len(ranked)))
        colours |= {row.job.number: shade for row, shade in zip(ranked, shades, strict=True)}
    height = min(14.0, max(4.6, 1.3 + 0.19 * len(bars)))
    figure = Figure(figsize=(14, height), dpi=110, layout="constrained", facecolor="white")
    ratio = [1.75, 1] if bars else [1]
    axes = figure.subplots(1, len(ratio), gridspec_kw={"width_ratios": ratio}, squeeze=False)[0]
    _draw_losses(axes[0], table, rows, ranked, colours)
    if bars:
        _draw_throughput(axes[1], table, bars, colours)
    image = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # drawn as a box
        FigureCanvasAgg(figure).print_png(image)
    files.atomic_write_bytes(table.folder / PICTURE, image.getvalue())
    return table.folder / PICTURE


def _ranked(rows: list[JobRow], value: str) -> list[JobRow]:
    """The rows with a finite objective, the best first: completed ones, if there are any."""
    sign = -1 if OBJECTIVES.get(value) else 1
    comparable = [row for row in rows if row.value is not None and math.isfinite(row.value)]
    finished = [row for row in comparable if row.status == "completed"] or comparable
    return sorted(finished, key=lambda row: sign * (row.value or 0.0))


def _draw_losses(
    axes: Axes, table: Table, rows: list[JobRow], ranked: list[JobRow], colours: dict[int, Any]
) -> None:
    """Draw few jobs with a legend of all; of many, the best and the worst are named, above the
    others."""
    few = len(rows) <= FEW
    curves = [_read_curve(row.run_dir, max(100, _POINTS // len(rows)), few) for row in rows]
    # layouts of one model have the same losses: those below are drawn wider, so that all are seen
    hidden = [sum(map(curve.coincides, curves[i + 1 :])) for i, curve in enumerate(curves)]
    named = rows if few else [*ranked[:3], *ranked[3:][-2:]]
    handles: dict[int, Any] = {}
    for row, curve, below in zip(rows, curves, hidden, strict=True):
        number, dashed, strong = row.job.number, row.status in _DASHED, row in named
        width = 1.6 + min(2.0, 8 / max(1, *hidden)) * below if few else 1.6 if strong else 0.9
        style: dict[str, Any] = {"color": colours[number], "zorder": 3 if strong else 2}
        dots: dict[str, Any] = {"markersize": 5, "markeredgecolor": "white"}
        (handles[number],) = axes.plot(
            *(curve.steps, curve.losses, "--" if dashed else "-"),
            **(style | {"linewidth": width, "alpha": 0.9 if strong else 0.6}),
        )
        if strong:
            axes.plot(curve.val_steps, curve.val_losses, "o", **style, **dots)
        if (curve.diverged or dashed) and len(curve.steps):
            axes.plot(curve.steps[-1], curve.losses[-1], "x", markersize=6, **style)
    labels = []
    for row in named:
        note = "best" if row is table.best else row.status
        label = _label(table, row, 60)
        labels.append(label if note == "completed" else f"{label} ({note})")
    title = "" if few else f"best and worst {_plain(table.spec.value)}"
    lines = [handles[row.job.number] for row in named]
    legend = axes.legend(lines, labels, title=title, title_fontsize=8, fontsize=8)
    for line in legend.get_lines():
        line.set_linewidth(2)
    validated = " (dots: validation)" if any(len(curve.val_steps) for curve in curves) else ""
    _scale(axes, [curve for curve in curves if len(curve.losses)])
    _style(axes, "loss", "both", "step", f"loss{'' if few else ', smoothed'}{validated}")


def _scale(axes: Axes, curves: list[_Curve]) -> None:
    """Limits by first and lowest losses: a run that diverges leaves the plot at its top."""
    low = min((min(*curve.losses, *curve.val_losses, math.inf) for curve in curves), default=0.0)
    high = max((max(curve.losses) for curve in curves), default=1.0)
    begin = max((curve.losses[0] for curve in curves), default=1.0)
    high = min(high, 1.5 * begin) if begin > 0 else high
    if low > 0 and high / low > _STEEP:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.08, high * 1.08)
        axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    elif high > low:
        axes.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.count(value)))


def _draw_throughput(axes: Axes, table: Table, bars: list[JobRow], colours: dict[int, Any]) -> None:
    speeds = [row.summary.tokens_per_second or 0.0 for row in bars]
    drawn = axes.barh(range(len(bars)), speeds, 0.72, color=[colours[r.job.number] for r in bars])
    memories = [row.summary.memory_bytes for row in bars]
    sizes = [f"  {units.size(memory)}" if memory else "" for memory in memories]
    notes = [units.count(speed) + size for speed, size in zip(speeds, sizes, strict=True)]
    small = 8 if len(bars) <= 40 else 6.5
    axes.bar_label(drawn, notes, padding=3, fontsize=small, color=INK)
    for bar, row in zip(drawn, bars, strict=True):
        if row.status in _DASHED:
            colour = colours[row.job.number]
            bar.set(facecolor=to_rgba(colour, 0.2), edgecolor=colour, linestyle="--")
    axes.set_yticks(range(len(bars)), [_label(table, row, 40) for row in bars])
    axes.set_ylim(max(len(bars), 4) - 0.4, -0.6)  # the first at the top
    axes.set_xlim(0, max(speeds) * 1.32)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.count(value)))
    left_out = sum(row.summary.tokens_per_second is not None for row in table.rows) > len(bars)
    some = f", the {_FASTEST} fastest and the {_SLOWEST} slowest" if left_out else ""
    _style(axes, f"throughput{some}", "x", "tokens/s, and the peak memory of a rank", "")
    axes.tick_params(axis="y", length=0, labelsize=small)


@dataclass(frozen=True)
class _Curve:
    """The points of a job that are drawn; all losses are finite."""

    steps: Sequence[float] = ()
    losses: Sequence[float] = ()
    val_steps: Sequence[float] = ()
    val_losses: Sequence[float] = ()
    diverged: bool = False  # a loss was not finite

    def coincides(self, other: _Curve) -> bool:
        equal = len(self.losses) > 0 and [*self.steps] == [*other.steps]
        return equal and np.allclose(self.losses, other.losses, rtol=1e-3, atol=0)


def _read_curve(run_dir: Path, most: int, few: bool) -> _Curve:
    """Read at most about `most` steps of a run, and as many validations; smoothed where there are
    many."""
    try:
        with files.open_regular(run_dir / "metrics.jsonl") as file:
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:  # the run is being restarted
        return _Curve()

    def points(lines: list[bytes], name: str) -> tuple[list[float], list[float], bool]:
        """The steps at which a loss is finite, and its values; whether there are others."""
        stride = -(-len(lines) // most) or 1
        chosen = lines[::-stride][::-1]  # with the last
        if lines[:1] != chosen[:1]:
            chosen = lines[:1] + chosen
        pairs = [(record["step"], record.get(name)) for record in parse_records(chosen)]
        finite = [(s, v) for s, v in pairs if isinstance(v, (int, float)) and math.isfinite(v)]
        return [s for s, _ in finite], [v for _, v in finite], len(finite) < len(pairs)

    steps, losses, diverged = points(lines, "loss")
    val_steps, val_losses, _ = points([line for line in lines if b'"val_loss"' in line], "val_loss")
    if not few and len(steps) > 2 * _SMOOTHED:  # means of neighbours, after the first point
        parts = np.array_split(np.arange(1, len(steps)), _SMOOTHED)
        losses = [losses[0], *(float(np.mean([losses[i] for i in part])) for part in parts)]
        steps = [steps[0], *(steps[part[-1]] for part in parts)]
    return _Curve(steps, losses, val_steps, val_losses, diverged)


def _label(table: Table, row: JobRow, width: int) -> str:
    """The job's number and settings. Starts with a digit: matplotlib omits labels that start
    with an underscore."""
    return _plain(shorten(f"{row.job.number}: {table.label(row)}", width))


def _plain(text: str) -> str:
    """Escape dollars, which start formulas."""
    return text.replace("$", r"\$")


def _style(axes: Axes, title: str, grid: Any, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, axis=grid, color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, colors=INK)
