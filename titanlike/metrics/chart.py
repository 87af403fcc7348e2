"""A step of every pipeline rank as boxes in time: what plans and timelines are drawn from. Plain data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titanlike.config import files

KINDS = {
    "F": "forward",
    "again": "recomputation",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "gather": "gather",
    "reduce": "reduce",
    "update": "update",
    "agree": "agree on the norm",
    "data": "data",
    "host": "host",
    "other": "validation, save",
}


class Box(NamedTuple):
    """What a rank does for a while. kind: of KINDS; stage, mb: -1 of what belongs to none."""

    kind: str
    stage: int
    mb: int
    start: float  # seconds since the chart begins
    end: float

    @property
    def words(self) -> str:
        """forward stage 1 microbatch 3"""
        name = KINDS.get(self.kind, self.kind)
        name += f" stage {self.stage}" if self.stage >= 0 else ""
        return name + (f" microbatch {self.mb}" if self.mb >= 0 else "")


class Message(NamedTuple):
    """way: "F" to the next stage, "B" to the one before; stage: that which sends."""

    way: str
    stage: int
    mb: int
    sender: int
    receiver: int
    start: float
    end: float


class MemoryCurve(NamedTuple):
    """Of a rank."""

    seconds: list[float]
    nbytes: list[int]


@dataclass(frozen=True)
class Chart:
    title: str
    rows: list[list[Box]]  # of each pipeline rank
    first: list[int]  # each rank's first stage, drawn darker; -1 = it has none
    seconds: float  # until the end
    messages: list[Message] = field(default_factory=list)
    memory: list[MemoryCurve] = field(default_factory=list)  # of each rank; empty = unknown
    device_memory: int = 0  # bytes


_MICRO = 1e6


def write_trace(chart: Chart, path: Path) -> None:
    text = json.dumps({"traceEvents": [*_events(chart)], "displayTimeUnit": "ms"})
    files.atomic_write_text(path, text)


def _events(chart: Chart) -> Iterator[dict[str, Any]]:
    for rank, row in enumerate(chart.rows):
        yield _name("process_name", rank, 0, f"pipeline rank {rank}")
        yield _name("thread_name", rank, 0, "device")
        if chart.messages:
            yield _name("thread_name", rank, 1, "messages it sends")
        for box in row:
            yield _slice(box.words, box.kind, rank, 0, box.start, box.end)
    for number, message in enumerate(chart.messages):
        what = "activations" if message.way == "F" else "gradients"
        name = f"{what} of stage {message.stage} microbatch {message.mb} to rank {message.receiver}"
        yield _slice(name, "message", message.sender, 1, message.start, message.end)
        arrow = {"name": what, "cat": "message", "id": number}
        yield arrow | {"ph": "s", "pid": message.sender, "tid": 1, "ts": _MICRO * message.start}
        end = {"ph": "f", "bp": "e", "pid": message.receiver, "tid": 0, "ts": _MICRO * message.end}
        yield arrow | end
    for rank, curve in enumerate(chart.memory):
        for seconds, nbytes in zip(*curve, strict=True):
            counter = {"ph": "C", "name": "memory", "pid": rank, "ts": _MICRO * seconds}
            yield counter | {"args": {"bytes": nbytes}}


def _slice(name: str, kind: str, rank: int, row: int, start: float, end: float) -> dict[str, Any]:
    when = {"ts": _MICRO * start, "dur": _MICRO * (end - start)}
    return {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": row, **when}


def _name(kind: str, rank: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": name}}
