"""sweep.png: the loss curves of a sweep's jobs, and their throughput. Imports matplotlib, not pyplot,
so that a program's own figures are not affected."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from titanlike.config import files
from titanlike.driver.sweep_status import JobRow
from titanlike.driver.sweep_table import PICTURE, Table
from titanlike.metrics import units
from titanlike.metrics.console import shorten
from titanlike.metrics.summary import OBJECTIVES, parse_records

BARS = 60  # of more jobs, the fastest and the slowest are shown
_SLOWEST = 15
_POINTS = 100_000  # of all curves together
_BINS = 60  # points of a smoothed curve, each the mean of its neighbours
_STEEP = 4.0  # a loss that falls by this factor is drawn on a log scale
FEW = 10  # jobs that have a colour each
# Petroff's ten colours (arXiv 2107.02270), distinguishable with any colour vision
COLOURS = [
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
]
_COLOURMAP = "viridis"
_BEST_TO_WORST = 0.93  # of the colour map: its brightest end is hard to see on white
GREY, INK = "#b8b8b8", "#333333"
DASHED = ("failed", "killed", "interrupted")


def draw(table: Table) -> Path | None:
    """Write folder/sweep.png; None where no job has logged a step."""
    rows = [row for row in table.rows if row.summary.steps]
    if not rows:
        return None
    points = min(1000, max(100, _POINTS // len(rows)))
    curves = {row.job.number: _read_curve(row.run_dir, points) for row in rows}
    if len(rows) > FEW:
        curves = {number: _smooth(curve) for number, curve in curves.items()}
    colours = _job_colours(rows, table.value)
    bars = [row for row in rows if row.summary.tokens_per_second]
    if len(bars) > FEW:  # few in order of their numbers, many by speed
        bars.sort(key=lambda row: -(row.summary.tokens_per_second or 0))
        bars = bars if len(bars) <= BARS else bars[: BARS - _SLOWEST] + bars[-_SLOWEST:]
    height = min(14.0, max(4.6, 1.3 + 0.19 * len(bars)))
    figure = Figure(figsize=(14, height), dpi=110, layout="constrained", facecolor="white")
    ratio = [1.75, 1] if bars else [1]
    axes = figure.subplots(1, len(ratio), gridspec_kw={"width_ratios": ratio}, squeeze=False)[0]
    _draw_losses(axes[0], rows, curves, colours, table)
    if bars:
        _draw_throughput(axes[1], bars, colours, table)
    image = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # drawn as a box
        FigureCanvasAgg(figure).print_png(image)
    files.atomic_write_bytes(table.folder / PICTURE, image.getvalue())
    return table.folder / PICTURE


def _draw_throughput(axes: Axes, bars: list[JobRow], colours: dict[int, Any], table: Table) -> None:
    places = list(range(len(bars)))
    speeds = [row.summary.tokens_per_second or 0.0 for row in bars]
    drawn = axes.barh(places, speeds, height=0.72, color=[colours[row.job.number] for row in bars])
    small = 8 if len(bars) <= 40 else 6.5
    memories = [row.summary.memory_bytes for row in bars]
    sizes = [f"  {units.size(memory)}" if memory else "" for memory in memories]
    notes = [units.count(speed) + size for speed, size in zip(speeds, sizes, strict=True)]
    axes.bar_label(drawn, notes, padding=3, fontsize=small, color=INK)
    for bar, row in zip(drawn, bars, strict=True):
        if row.status in DASHED:
            colour = colours[row.job.number]
            bar.set(facecolor=to_rgba(colour, 0.2), edgecolor=colour, linestyle="--")
    axes.set_yticks(places, [_job_label(table, row, 40) for row in bars])
    axes.set_ylim(max(len(bars), 4) - 0.4, -0.6)  # the first at the top
    axes.set_xlim(0, max(speeds) * 1.32)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.count(value)))
    axes.set_xlabel("tokens/s, and the peak memory of a rank")
    most = sum(row.summary.tokens_per_second is not None for row in table.rows) > len(bars)
    some = f", the {BARS - _SLOWEST} fastest and the {_SLOWEST} slowest" if most else ""
    _style_axes(axes, f"throughput{some}", grid="x")
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0, labelsize=small)


# --- losses ---------------------------------------------------------------------------------------


def _draw_losses(
    axes: Axes, rows: list[JobRow], curves: dict[int, _Curve], colours: dict[int, Any], table: Table
) -> None:
    """Few jobs with a legend; of many, the best and the worst are named, all coloured by rank."""
    few = len(rows) <= FEW
    compared = _ranked(rows, table.value)
    best = {row.job.number for row in compared[:3]}
    hidden = _coinciding(rows, curves) if few else {}
    extra_width = min(2.0, 8 / max([1, *hidden.values()]))  # points
    lines: dict[int, Line2D] = {}
    for row in sorted(rows, key=lambda row: row.job.number in best and not few):  # best on top
        number = row.job.number
        strong = few or number in best
        width = 1.6 + extra_width * hidden.get(number, 0) if strong else 0.9
        lines[number] = _draw_curve(
            axes, row, curves[number], colours[number], width=width, strong=strong
        )
    _scale(axes, list(curves.values()))
    axes.set_xlabel("step")
    validated = any(curve.val_steps for curve in curves.values())
    smoothed = "" if few else ", smoothed"
    axes.set_ylabel(f"loss{smoothed}" + (" (dots: validation)" if validated else ""))
    _style_axes(axes, "loss", grid="both")
    if few:
        _add_legend(axes, rows, lines, table)
        return
    _name_some(axes, compared, curves, colours, table)
    if len(compared) > 1:
        _add_colourbar(axes, table.value, len(compared) == len(rows))


def _draw_curve(
    axes: Axes, row: JobRow, curve: _Curve, colour: Any, *, width: float, strong: bool
) -> Line2D:
    dashed = row.status in DASHED
    style: dict[str, Any]
    style = {"linestyle": (0, (4, 2)) if dashed else "-", "alpha": 0.9 if strong else 0.6}
    (line,) = axes.plot(curve.steps, curve.losses, color=colour, linewidth=width, **style)
    if strong:
        dots: dict[str, Any]
        dots = {"markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.7}
        axes.plot(curve.val_steps, curve.val_losses, "o", color=colour, **dots)
    if (curve.diverged or dashed) and curve.steps:
        axes.plot(curve.steps[-1], curve.losses[-1], marker="x", markersize=6, color=colour)
    return line


def _add_legend(axes: Axes, rows: list[JobRow], lines: dict[int, Line2D], table: Table) -> None:
    labels = []
    for row in rows:
        note = "best" if row is table.best else row.status
        label = _job_label(table, row, 60)
        labels.append(label if note == "completed" else f"{label} ({note})")
    handles = [lines[row.job.number] for row in rows]
    for handle in axes.legend(handles, labels, fontsize=8, framealpha=0.85).get_lines():
        handle.set_linewidth(2)


def _add_colourbar(axes: Axes, value: str, all_ranked: bool) -> None:
    ranks = ScalarMappable(Normalize(0, 1 / _BEST_TO_WORST), _COLOURMAP)
    place: dict[str, Any]
    place = {"orientation": "horizontal", "location": "bottom", "aspect": 50, "pad": 0.02}
    colourbar = axes.figure.colorbar(
        ranks, boundaries=[i / 100 for i in range(101)], ax=axes, **place
    )
    colourbar.set_ticks([0, 1], labels=["best", "worst"])
    unranked = "" if all_ranked else " (grey, dashed: did not complete)"
    colourbar.set_label(f"rank by {_without_math(value)}{unranked}", fontsize=8, labelpad=-8)
    colourbar.ax.tick_params(labelsize=8, length=0)
    colourbar.outline.set_visible(False)


def _scale(axes: Axes, curves: list[_Curve]) -> None:
    """Limits by first and lowest losses: a run that diverges leaves the plot at its top."""
    drawn = [curve for curve in curves if curve.losses]
    low = min((min(curve.losses + curve.val_losses) for curve in drawn), default=0.0)
    high = max((max(curve.losses) for curve in drawn), default=1.0)
    begin = max((curve.losses[0] for curve in drawn), default=1.0)
    if begin > 0:
        high = min(high, 1.5 * begin)
    if low > 0 and high / low > _STEEP:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.08, high * 1.08)
        locator = LogLocator(subs=(1, 2, 5)) if high / low > 10 else None
        axes.yaxis.set_major_locator(locator or MaxNLocator(7, steps=[1, 2, 5, 10]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    elif high > low:
        margin = 0.04 * (high - low)
        axes.set_ylim(low - margin, high + margin)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.count(value)))


def _name_some(
    axes: Axes,
    compared: list[JobRow],
    curves: dict[int, _Curve],
    colours: dict[int, Any],
    table: Table,
) -> None:
    """Name the three best and the two worst at the right edge, one below the other."""
    named = [*compared[:3], *(compared[-2:] if len(compared) > 5 else ())]
    named = [row for row in named if curves[row.job.number].losses]
    if not named:
        return
    low, high = axes.get_ylim()
    to_axes = axes.transData + axes.transAxes.inverted()

    def end(row: JobRow) -> tuple[int, float]:
        curve = curves[row.job.number]
        return curve.steps[-1], min(max(curve.losses[-1], low), high)

    def height(row: JobRow) -> float:
        return float(to_axes.transform(end(row))[1])

    ordered = sorted(named, key=height)
    spots: list[float] = []
    for row in ordered:
        spots.append(max(height(row), spots[-1] + 0.05 if spots else 0.01))
    over = max(0.0, spots[-1] - 0.98)
    arrow = {"arrowstyle": "-", "linewidth": 1.2, "relpos": (0, 0.5), "shrinkB": 0}
    text: dict[str, Any]
    text = {"fontsize": 8, "va": "center", "color": INK, "annotation_clip": False}
    for row, spot in zip(ordered, spots, strict=True):
        axes.annotate(
            *(_job_label(table, row, 34), end(row), (1.02, spot - over), "data", "axes fraction"),
            arrowprops={**arrow, "color": colours[row.job.number]},
            **text,
        )


# --- the points that are drawn --------------------------------------------------------------------


@dataclass
class _Curve:
    """The points of a job that are drawn; all losses are finite."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    val_steps: list[int] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)
    diverged: bool = False  # a loss was not finite


def _read_curve(run_dir: Path, most: int) -> _Curve:
    """At most about `most` steps of a run, and as many validations."""
    try:
        with files.open_regular(run_dir / "metrics.jsonl") as file:
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:  # the run is being restarted
        return _Curve()
    stride = -(-len(lines) // most) or 1
    chosen = [line for i, line in enumerate(lines) if (len(lines) - 1 - i) % stride == 0 or i == 0]
    records = list(parse_records(chosen))
    steps, losses = _finite(records, "loss")
    validated = [line for line in lines if b'"val_loss"' in line]
    stride = -(-len(validated) // most) or 1
    validations = _finite(
        parse_records(validated[(len(validated) - 1) % stride :: stride]), "val_loss"
    )
    return _Curve(steps, losses, *validations, diverged=len(steps) < len(records))


def _finite(records: Iterable[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """The steps at which a loss is finite, and its values."""
    has: list[tuple[int, Any]] = [(record["step"], record.get(name)) for record in records]
    has = [pair for pair in has if isinstance(pair[1], (int, float)) and math.isfinite(pair[1])]
    return [step for step, _ in has], [loss for _, loss in has]


def _smooth(curve: _Curve) -> _Curve:
    """Means of neighbours; the first point is unchanged."""
    size = -(-len(curve.steps) // _BINS)
    if size < 2:
        return curve
    cuts = [0, *range(1, len(curve.steps), size), len(curve.steps)]
    spans = list(zip(cuts, cuts[1:], strict=False))
    steps = [curve.steps[end - 1] for _, end in spans]
    losses = [sum(curve.losses[start:end]) / (end - start) for start, end in spans]
    return replace(curve, steps=steps, losses=losses)


def _coinciding(rows: list[JobRow], curves: dict[int, _Curve]) -> dict[int, int]:
    """Job number -> how many curves hide its own.

    Layouts of one model have the same losses: those below are drawn wider, so that all are seen.
    """
    hidden = {}
    for i, row in enumerate(rows):
        own = dict(zip(curves[row.job.number].steps, curves[row.job.number].losses, strict=True))
        hidden[row.job.number] = 0
        for above in rows[i + 1 :]:
            other = curves[above.job.number]
            pairs = [
                abs(own[step] - loss) / (abs(loss) or 1)
                for step, loss in zip(other.steps, other.losses, strict=True)
                if step in own
            ]
            hidden[row.job.number] += bool(pairs) and max(pairs) <= 1e-3
    return hidden


# --- colours, labels, axes ------------------------------------------------------------------------


def _ranked(rows: list[JobRow], value: str) -> list[JobRow]:
    """The rows with a finite objective, the best first."""
    sign = -1 if OBJECTIVES.get(value) else 1
    comparable = [row for row in rows if row.value is not None and math.isfinite(row.value)]
    finished = [row for row in comparable if row.status == "completed"] or comparable
    return sorted(finished, key=lambda row: sign * (row.value or 0.0))


def _job_colours(rows: list[JobRow], value: str) -> dict[int, Any]:
    """Job number -> colour. Of many jobs, those without a rank are grey."""
    if len(rows) <= FEW:
        return {row.job.number: COLOURS[i] for i, row in enumerate(rows)}
    compared = _ranked(rows, value)
    scale = max(1, len(compared) - 1)
    shades = {
        row.job.number: colormaps[_COLOURMAP](_BEST_TO_WORST * i / scale)
        for i, row in enumerate(compared)
    }
    return {row.job.number: shades.get(row.job.number, GREY) for row in rows}


def _job_label(table: Table, row: JobRow, width: int) -> str:
    """The job's number and settings. Starts with a digit: matplotlib omits labels that start
    with an underscore."""
    return _without_math(shorten(f"{row.job.number}: {table.label(row)}", width))


def _without_math(text: str) -> str:
    """Escape dollars, which start formulas."""
    return text.replace("$", r"\$")


def _style_axes(axes: Axes, title: str, *, grid: Literal["both", "x", "y"]) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.grid(True, axis=grid, color="#e6e6e6", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, colors=INK)
