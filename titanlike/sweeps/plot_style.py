"""Colours, labels and axes that the plots of a sweep share."""

from __future__ import annotations

import math
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes

from titanlike.metrics.console import shorten
from titanlike.metrics.summary import OBJECTIVES
from titanlike.sweeps.job_status import JobRow
from titanlike.sweeps.table import Table

FEW = 10  # jobs that have a colour each
# Petroff's ten colours (arXiv 2107.02270), distinguishable with any colour vision
COLOURS = [
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
]
COLOURMAP = "viridis"
BEST_TO_WORST = 0.93  # of the colour map: its brightest end is hard to see on white
GREY, INK = "#b8b8b8", "#333333"
DASHED = ("failed", "killed", "interrupted")


def ranked(rows: list[JobRow], value: str) -> list[JobRow]:
    """The rows with a finite objective, the best first."""
    sign = -1 if OBJECTIVES.get(value) else 1
    comparable = [row for row in rows if row.value is not None and math.isfinite(row.value)]
    finished = [row for row in comparable if row.status == "completed"] or comparable
    return sorted(finished, key=lambda row: sign * (row.value or 0.0))


def job_colours(rows: list[JobRow], value: str) -> dict[int, Any]:
    """Job number -> colour. Of many jobs, those without a rank are grey."""
    if len(rows) <= FEW:
        return {row.job.number: COLOURS[i] for i, row in enumerate(rows)}
    compared = ranked(rows, value)
    scale = max(1, len(compared) - 1)
    shades = {
        row.job.number: colormaps[COLOURMAP](BEST_TO_WORST * i / scale)
        for i, row in enumerate(compared)
    }
    return {row.job.number: shades.get(row.job.number, GREY) for row in rows}


def job_label(table: Table, row: JobRow, width: int) -> str:
    """The job's number and settings. Starts with a digit: matplotlib omits labels that start
    with an underscore."""
    return without_math(shorten(f"{row.job.number}: {table.label(row)}", width))


def without_math(text: str) -> str:
    """Escape dollars, which start formulas."""
    return text.replace("$", r"\$")


def style_axes(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, colors=INK)
