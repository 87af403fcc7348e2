"""A chart in the format of Chrome's traces, for https://ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlike.config import files
from titanlike.metrics.chart import Chart

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
