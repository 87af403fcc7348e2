"""A training step as time spans of every pipeline rank: the data behind pictures of plans and
timelines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titanlike.core.config import files

# kind -> (name, colour on a rank's first stage, colour on its other stages)
KINDS = {
    "F": ("forward", "#3f90da", "#8fc0ee"),
    "again": ("recomputation", "#ffa90e", "#ffd080"),
    "B": ("backward", "#2a9d5c", "#7fcea0"),
    "I": ("input gradient", "#1b8a8f", "#74c4c8"),
    "W": ("weight gradient", "#832db6", "#c190de"),
    "gather": ("all-gather", "#a96b59", "#a96b59"),
    "reduce": ("gradient reduction", "#bd1f01", "#bd1f01"),
    "update": ("update", "#333333", "#333333"),
    "agree": ("all-reduce of metrics", "#94a4a2", "#94a4a2"),
    "data": ("data", "#c8b400", "#c8b400"),
    "host": ("host", "#717581", "#717581"),
    "other": ("validation, save", "#c9b8a8", "#c9b8a8"),
    "message": ("P2P send", "#e76300", "#e76300"),
}


class Span(NamedTuple):
    """One activity of a rank. kind: a key of KINDS; stage, mb (microbatch): -1 if it belongs to
    none."""

    kind: str
    stage: int
    mb: int
    start: float  # seconds since the chart begins
    end: float

    @property
    def words(self) -> str:
        """The span in words, e.g. "forward stage 1 microbatch 3"."""
        name = KINDS[self.kind][0] if self.kind in KINDS else self.kind
        name += f" stage {self.stage}" if self.stage >= 0 else ""
        return name + (f" microbatch {self.mb}" if self.mb >= 0 else "")


class Transfer(NamedTuple):
    """A P2P send."""

    sender: int  # pipeline rank
    start: float
    end: float


class MemoryCurve(NamedTuple):
    """A rank's memory over time."""

    seconds: list[float]
    nbytes: list[int]


@dataclass(frozen=True)
class Chart:
    title: str
    rows: list[list[Span]]  # one per pipeline rank
    first: list[int]  # each rank's first stage, drawn darker; -1 = it has none
    seconds: float  # until the end
    timed: bool = True  # False: of equal stages, in no unit
    messages: list[Transfer] = field(default_factory=list)
    memory: list[MemoryCurve] = field(default_factory=list)  # one per rank; empty = unknown
    device_memory: int = 0  # bytes; 0 = unknown


def write_trace(chart: Chart, path: Path) -> None:
    """Write a trace file for Perfetto or chrome://tracing."""
    text = json.dumps({"traceEvents": [*_events(chart)], "displayTimeUnit": "ms"})
    files.atomic_write_text(path, text)


def _events(chart: Chart) -> Iterator[dict[str, Any]]:
    for rank, row in enumerate(chart.rows):
        names = {"process_name": f"pipeline rank {rank}", "thread_name": "device"}
        for kind, name in names.items():
            yield {"ph": "M", "pid": rank, "tid": 0, "name": kind, "args": {"name": name}}
        for span in row:
            times = {"ts": 1e6 * span.start, "dur": 1e6 * (span.end - span.start)}
            words = {"name": span.words, "cat": span.kind}
            yield {"ph": "X", "pid": rank, "tid": 0, **times, **words}
