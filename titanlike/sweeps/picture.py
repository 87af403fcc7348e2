"""sweep.png: the loss curves of a sweep's jobs, and their throughput. Imports matplotlib.

Few jobs have a colour each and a legend. Many are coloured by how they rank, and the best and the
worst are named. No pyplot: nothing of a program that draws pictures of its own is touched.
"""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from titanlike.config import files
from titanlike.metrics import units
from titanlike.metrics.console import shorten
from titanlike.metrics.summary import OBJECTIVES, parse_records
from titanlike.sweeps.rows import Row
from titanlike.sweeps.table import PICTURE, Table

FEW = 10  # jobs that have a colour each
BARS = 60  # of more jobs, the fastest and the slowest are shown
_SLOWEST = 15
_POINTS = 100_000  # of all curves together
_BINS = 60  # of many jobs, a curve has so many points, each the mean of what is near
# Petroff's ten colours (arXiv 2107.02270): told apart with any colour vision
_COLOURS = [
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
]
_RANKS = "viridis"
_GREY, _INK = "#b8b8b8", "#333333"
_DASHED = ("failed", "killed", "interrupted")
_STEEP = 4.0  # a loss that falls by this factor is drawn on a log scale


@dataclass
class _Curve:
    """The points of a job that are drawn; the loss is finite in all of them."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    val_steps: list[int] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)
    broke: bool = False  # whether a loss was not finite


def draw(table: Table) -> Path | None:
    """Draw folder/sweep.png, whole or not at all. None where no job has logged a step."""
    rows = [row for row in table.rows if row.summary.steps]
    if not rows:
        return None
    points = min(1000, max(100, _POINTS // len(rows)))
    curves = {row.job.number: _read(row.run_dir, points) for row in rows}
    if len(rows) > FEW:
        curves = {number: _smooth(curve) for number, curve in curves.items()}
    colours = _colours(rows, table.value)
    bars = _bars(rows)
    height = min(14.0, max(4.6, 1.3 + 0.19 * len(bars)))
    figure = Figure(figsize=(14, height), dpi=110, layout="constrained", facecolor="white")
    ratio = [1.75, 1] if bars else [1]
    axes = figure.subplots(1, len(ratio), gridspec_kw={"width_ratios": ratio}, squeeze=False)[0]
    _draw_losses(axes[0], rows, curves, colours, table)
    if bars:
        _draw_throughput(axes[1], bars, colours, table)
    path = table.folder / PICTURE
    image = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # drawn as a box
        FigureCanvasAgg(figure).print_png(image)
    files.atomic_write_bytes(path, image.getvalue())
    return path


def _read(run_dir: Path, most: int) -> _Curve:
    """A run's curve by at most about `most` of its steps, and as many validations."""
    try:
        lines = (run_dir / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:  # somebody starts it anew this moment
        return _Curve()
    stride = -(-len(lines) // most) or 1
    chosen = [line for i, line in enumerate(lines) if (len(lines) - 1 - i) % stride == 0 or i == 0]
    curve = _Curve()
    for record in parse_records(chosen):
        loss = record.get("loss")
        if isinstance(loss, (int, float)) and math.isfinite(loss):
            curve.steps.append(record["step"])
            curve.losses.append(loss)
        else:
            curve.broke = True
    validated = [line for line in lines if b'"val_loss"' in line]
    for record in parse_records(validated[-1 :: -(-len(validated) // most) * -1 or -1]):
        loss = record.get("val_loss")
        if isinstance(loss, (int, float)) and math.isfinite(loss):
            curve.val_steps.insert(0, record["step"])
            curve.val_losses.insert(0, loss)
    return curve


def _smooth(curve: _Curve) -> _Curve:
    """Means of neighbours; the first point stays as it is."""
    size = -(-len(curve.steps) // _BINS)
    if size < 2:
        return curve
    cuts = [0, *range(1, len(curve.steps), size), len(curve.steps)]
    spans = list(zip(cuts, cuts[1:], strict=False))
    steps = [curve.steps[end - 1] for _, end in spans]
    losses = [sum(curve.losses[start:end]) / (end - start) for start, end in spans]
    return replace(curve, steps=steps, losses=losses)


def _ranked(rows: list[Row], value: str) -> list[Row]:
    """The rows whose objective can be compared, the best first."""
    sign = -1 if OBJECTIVES.get(value) else 1
    comparable = [row for row in rows if row.value is not None and math.isfinite(row.value)]
    finished = [row for row in comparable if row.status == "completed"] or comparable
    return sorted(finished, key=lambda row: sign * (row.value or 0.0))


def _colours(rows: list[Row], value: str) -> dict[int, Any]:
    """Job number -> colour. Of many jobs, one that has no rank is grey."""
    if len(rows) <= FEW:
        return {row.job.number: _COLOURS[i] for i, row in enumerate(rows)}
    ranked = _ranked(rows, value)
    scale = max(1, len(ranked) - 1)
    shades = {row.job.number: colormaps[_RANKS](0.93 * i / scale) for i, row in enumerate(ranked)}
    return {row.job.number: shades.get(row.job.number, _GREY) for row in rows}


# --- losses ------------------------------------------------------------------------------------


def _draw_losses(
    axes: Axes,
    rows: list[Row],
    curves: dict[int, _Curve],
    colours: dict[int, Any],
    table: Table,
) -> None:
    few = len(rows) <= FEW
    ranked = _ranked(rows, table.value)
    best = {row.job.number for row in ranked[:3]}
    lines = []
    below = _coinciding(rows, curves) if few else {}
    wider = min(2.0, 8 / max([1, *below.values()]))  # points
    for row in sorted(rows, key=lambda row: row.job.number in best and not few):  # these on top
        curve, colour = curves[row.job.number], colours[row.job.number]
        dashed = row.status in _DASHED
        strong = few or row.job.number in best
        (line,) = axes.plot(
            curve.steps,
            curve.losses,
            color=colour,
            linewidth=1.6 + wider * below.get(row.job.number, 0) if strong else 0.9,
            linestyle=(0, (4, 2)) if dashed else "-",
            alpha=0.9 if strong else 0.6,
        )
        lines.append((row, line))
        if strong:
            axes.plot(
                *(curve.val_steps, curve.val_losses),
                linestyle="none",
                marker="o",
                markersize=5,
                color=colour,
                markeredgecolor="white",
                markeredgewidth=0.7,
            )
        if (curve.broke or dashed) and curve.steps:
            axes.plot(curve.steps[-1], curve.losses[-1], marker="x", markersize=6, color=colour)
    _scale(axes, list(curves.values()))
    axes.set_xlabel("step")
    validated = any(curve.val_steps for curve in curves.values())
    smooth = "" if few else ", smoothed"
    axes.set_ylabel(f"loss{smooth}" + (" (dots: validation)" if validated else ""))
    axes.set_title("loss", loc="left", fontsize=11, fontweight="bold", color=_INK)
    _plain(axes)
    axes.grid(True, color="#e6e6e6", linewidth=0.7)
    if few:
        lines.sort(key=lambda pair: pair[0].job.number)
        labels = [_label(table, row, 60) + _ending(row, table.best) for row, _ in lines]
        legend = axes.legend([line for _, line in lines], labels, fontsize=8, framealpha=0.85)
        for handle in legend.get_lines():
            handle.set_linewidth(2)
        return
    _name_some(axes, ranked, curves, colours, table)
    if len(ranked) > 1:
        colourbar = axes.figure.colorbar(
            ScalarMappable(Normalize(0, 1 / 0.93), _RANKS),
            ax=axes,
            orientation="horizontal",
            location="bottom",
            aspect=50,
            pad=0.02,
            boundaries=[i / 100 for i in range(101)],
        )
        colourbar.set_ticks([0, 1], labels=["best", "worst"])
        unranked = " (grey, dashed: did not complete)" if len(ranked) < len(rows) else ""
        colourbar.set_label(f"rank by {_math_free(table.value)}{unranked}", fontsize=8, labelpad=-8)
        colourbar.ax.tick_params(labelsize=8, length=0)
        colourbar.outline.set_visible(False)


def _coinciding(rows: list[Row], curves: dict[int, _Curve]) -> dict[int, int]:
    """Job number -> how many curves are drawn on top of its own.

    Layouts of one model have the same losses: drawn wider, those below are still seen.
    """
    told = {}
    for i, row in enumerate(rows):
        own = dict(zip(curves[row.job.number].steps, curves[row.job.number].losses, strict=True))
        told[row.job.number] = 0
        for above in rows[i + 1 :]:
            other = curves[above.job.number]
            pairs = [
                abs(own[step] - loss) / (abs(loss) or 1)
                for step, loss in zip(other.steps, other.losses, strict=True)
                if step in own
            ]
            told[row.job.number] += bool(pairs) and max(pairs) <= 1e-3
    return told


def _scale(axes: Axes, curves: list[_Curve]) -> None:
    """Limits by what runs begin and end with: one that diverges leaves the picture at its top."""
    drawn = [curve for curve in curves if curve.losses]
    low = min((min(curve.losses + curve.val_losses) for curve in drawn), default=0.0)
    high = max((max(curve.losses) for curve in drawn), default=1.0)
    begin = max((curve.losses[0] for curve in drawn), default=1.0)
    if begin > 0:
        high = min(high, 1.5 * begin)
    if low > 0 and high / low > _STEEP:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.08, high * 1.08)
        decades = high / low > 10
        axes.yaxis.set_major_locator(
            LogLocator(subs=(1, 2, 5)) if decades else MaxNLocator(7, steps=[1, 2, 5, 10])
        )
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    elif high > low:
        margin = 0.04 * (high - low)
        axes.set_ylim(low - margin, high + margin)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.count(value)))


def _name_some(
    axes: Axes,
    ranked: list[Row],
    curves: dict[int, _Curve],
    colours: dict[int, Any],
    table: Table,
) -> None:
    """Name the three best and the two worst at the right edge, one below the other."""
    named = [*ranked[:3], *(ranked[-2:] if len(ranked) > 5 else ())]
    named = [row for row in named if curves[row.job.number].losses]
    if not named:
        return
    low, high = axes.get_ylim()
    to_axes = axes.transData + axes.transAxes.inverted()

    def place(row: Row) -> float:
        curve = curves[row.job.number]
        y = min(max(curve.losses[-1], low), high)
        return float(to_axes.transform((curve.steps[-1], y))[1])

    apart = 0.05
    spots: list[float] = []
    ordered = sorted(named, key=place)
    for row in ordered:
        spots.append(max(place(row), spots[-1] + apart if spots else 0.01))
    over = max(0.0, spots[-1] - 0.98)
    for row, spot in zip(ordered, [spot - over for spot in spots], strict=True):
        curve = curves[row.job.number]
        axes.annotate(
            _label(table, row, 34),
            xy=(curve.steps[-1], min(max(curve.losses[-1], low), high)),
            xytext=(1.02, spot),
            textcoords="axes fraction",
            fontsize=8,
            va="center",
            color=_INK,
            arrowprops={
                "arrowstyle": "-",
                "color": colours[row.job.number],
                "linewidth": 1.2,
                "relpos": (0, 0.5),
                "shrinkB": 0,
            },
            annotation_clip=False,
        )


# --- throughput --------------------------------------------------------------------------------


def _bars(rows: list[Row]) -> list[Row]:
    """The rows that have a bar: few by number, many by speed."""
    fast = [row for row in rows if row.summary.tokens_per_second]
    if len(fast) <= FEW:
        return fast
    fast.sort(key=lambda row: -(row.summary.tokens_per_second or 0))
    return fast if len(fast) <= BARS else fast[: BARS - _SLOWEST] + fast[-_SLOWEST:]


def _draw_throughput(axes: Axes, bars: list[Row], colours: dict[int, Any], table: Table) -> None:
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
    axes.bar_label(drawn, notes, padding=3, fontsize=small, color=_INK)
    for bar, row in zip(drawn, bars, strict=True):
        if row.status in _DASHED:
            colour = colours[row.job.number]
            bar.set(facecolor=to_rgba(colour, 0.2), edgecolor=colour, linestyle="--")
    axes.set_yticks(places, [_label(table, row, 40) for row in bars])
    axes.set_ylim(max(len(bars), 4) - 0.4, -0.6)  # the first at the top
    axes.set_xlim(0, max(speeds) * 1.32)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.count(value)))
    axes.set_xlabel("tokens/s, and the peak memory of a rank")
    most = sum(row.summary.tokens_per_second is not None for row in table.rows) > len(bars)
    some = f", the {BARS - _SLOWEST} fastest and the {_SLOWEST} slowest" if most else ""
    axes.set_title(f"throughput{some}", loc="left", fontsize=11, fontweight="bold", color=_INK)
    _plain(axes)
    axes.grid(True, axis="x", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0, labelsize=small)


# --- text --------------------------------------------------------------------------------------


def _label(table: Table, row: Row, width: int) -> str:
    """The job's number and what is special about it. Starts with a digit: matplotlib leaves
    labels out that start with an underscore."""
    return _math_free(shorten(f"{row.job.number}: {table.label(row)}", width))


def _ending(row: Row, best: Row | None) -> str:
    if row is best:
        return " (best)"
    return "" if row.status == "completed" else f" ({row.status})"


def _math_free(text: str) -> str:
    """Dollars would be taken for formulas."""
    return text.replace("$", r"\$")


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, colors=_INK)
