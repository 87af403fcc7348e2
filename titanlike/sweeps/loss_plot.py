"""The loss curves of a sweep's jobs. Imports matplotlib."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from titanlike.metrics import units
from titanlike.sweeps.curves import Curve, coinciding
from titanlike.sweeps.job_status import JobRow
from titanlike.sweeps.plot_style import (
    BEST_TO_WORST,
    COLOURMAP,
    DASHED,
    FEW,
    INK,
    job_label,
    ranked,
    style_axes,
    without_math,
)
from titanlike.sweeps.table import Table

_STEEP = 4.0  # a loss that falls by this factor is drawn on a log scale


def draw_losses(
    axes: Axes, rows: list[JobRow], curves: dict[int, Curve], colours: dict[int, Any], table: Table
) -> None:
    """Few jobs with a legend; of many, the best and the worst are named, all coloured by rank."""
    few = len(rows) <= FEW
    compared = ranked(rows, table.value)
    best = {row.job.number for row in compared[:3]}
    hidden = coinciding(rows, curves) if few else {}
    extra_width = min(2.0, 8 / max([1, *hidden.values()]))  # points
    lines = []
    for row in sorted(rows, key=lambda row: row.job.number in best and not few):  # best on top
        number = row.job.number
        strong = few or number in best
        width = 1.6 + extra_width * hidden.get(number, 0) if strong else 0.9
        line = _draw_curve(axes, row, curves[number], colours[number], width=width, strong=strong)
        lines.append((row, line))
    _scale(axes, list(curves.values()))
    axes.set_xlabel("step")
    validated = any(curve.val_steps for curve in curves.values())
    smoothed = "" if few else ", smoothed"
    axes.set_ylabel(f"loss{smoothed}" + (" (dots: validation)" if validated else ""))
    axes.set_title("loss", loc="left", fontsize=11, fontweight="bold", color=INK)
    style_axes(axes)
    axes.grid(True, color="#e6e6e6", linewidth=0.7)
    if few:
        _add_legend(axes, lines, table)
        return
    _name_some(axes, compared, curves, colours, table)
    if len(compared) > 1:
        _add_colourbar(axes, table.value, len(compared) == len(rows))


def _draw_curve(
    axes: Axes, row: JobRow, curve: Curve, colour: Any, *, width: float, strong: bool
) -> Line2D:
    dashed = row.status in DASHED
    (line,) = axes.plot(
        curve.steps,
        curve.losses,
        color=colour,
        linewidth=width,
        linestyle=(0, (4, 2)) if dashed else "-",
        alpha=0.9 if strong else 0.6,
    )
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
    if (curve.diverged or dashed) and curve.steps:
        axes.plot(curve.steps[-1], curve.losses[-1], marker="x", markersize=6, color=colour)
    return line


def _add_legend(axes: Axes, lines: list[tuple[JobRow, Line2D]], table: Table) -> None:
    lines.sort(key=lambda pair: pair[0].job.number)
    labels = [job_label(table, row, 60) + _ending(row, table.best) for row, _ in lines]
    legend = axes.legend([line for _, line in lines], labels, fontsize=8, framealpha=0.85)
    for handle in legend.get_lines():
        handle.set_linewidth(2)


def _ending(row: JobRow, best: JobRow | None) -> str:
    if row is best:
        return " (best)"
    return "" if row.status == "completed" else f" ({row.status})"


def _add_colourbar(axes: Axes, value: str, all_ranked: bool) -> None:
    colourbar = axes.figure.colorbar(
        ScalarMappable(Normalize(0, 1 / BEST_TO_WORST), COLOURMAP),
        ax=axes,
        orientation="horizontal",
        location="bottom",
        aspect=50,
        pad=0.02,
        boundaries=[i / 100 for i in range(101)],
    )
    colourbar.set_ticks([0, 1], labels=["best", "worst"])
    unranked = " (grey, dashed: did not complete)" if not all_ranked else ""
    colourbar.set_label(f"rank by {without_math(value)}{unranked}", fontsize=8, labelpad=-8)
    colourbar.ax.tick_params(labelsize=8, length=0)
    colourbar.outline.set_visible(False)


def _scale(axes: Axes, curves: list[Curve]) -> None:
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
    compared: list[JobRow],
    curves: dict[int, Curve],
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

    def place(row: JobRow) -> float:
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
            job_label(table, row, 34),
            xy=(curve.steps[-1], min(max(curve.losses[-1], low), high)),
            xytext=(1.02, spot),
            textcoords="axes fraction",
            fontsize=8,
            va="center",
            color=INK,
            arrowprops={
                "arrowstyle": "-",
                "color": colours[row.job.number],
                "linewidth": 1.2,
                "relpos": (0, 0.5),
                "shrinkB": 0,
            },
            annotation_clip=False,
        )
