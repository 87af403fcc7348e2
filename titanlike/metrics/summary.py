"""The last numbers of a run, read from the end of its metrics.jsonl. Imports no torch."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from titanlike.config import files

# what a sweep can compare its jobs by -> whether it is maximized
OBJECTIVES: dict[str, bool] = {
    "val_loss": False,
    "loss": False,
    "tokens_per_second": True,
    "step_seconds": False,
    "mfu": True,
    "memory_bytes": False,
}

STEPS = 500  # the most that count for a median: a table of 1,000 runs takes seconds
_BLOCK = 1 << 17  # bytes; about 500 records


@dataclass(frozen=True)
class Summary:
    """A run's numbers; None where there is none yet, or at all."""

    steps: int = 0  # the last one that was logged
    loss: float | None = None  # the last; may be nan
    val_loss: float | None = None  # the last
    grad_norm: float | None = None  # the last
    tokens_per_second: float | None = None  # this and the next two: a median, see `summarize`
    step_seconds: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None  # peak of the worst rank, since the run's last start


def summarize(run_dir: Path) -> Summary:
    """Summarize run_dir/metrics.jsonl; without the file, an empty Summary.

    Speed is the median of the second half of the steps since the run's last start, at most the
    last `STEPS`: first steps compile and allocate.
    """
    try:
        with files.open_regular(Path(run_dir) / "metrics.jsonl") as file:
            records = _last_records(file)
            val_loss = _newest("val_loss", records)
            if val_loss is None:  # a run may validate more rarely than every STEPS steps
                val_loss = _last_val_loss(file)
    except (FileNotFoundError, NotADirectoryError):
        return Summary()
    if not records:
        return Summary()
    last = records[-1]["step"]
    start = _last_resume(Path(run_dir))
    start = start if start < last else 0  # an event of a run that has since restarted from step 0
    recent = [record for record in records if record["step"] > start]
    half = [record for record in recent if record["step"] > start + (last - start) // 2]
    memory = [record["memory_bytes"] for record in recent if _is_number(record, "memory_bytes")]
    return Summary(
        steps=last,
        loss=_newest("loss", records),
        val_loss=val_loss,
        grad_norm=_newest("grad_norm", records),
        tokens_per_second=_median("tokens_per_second", half),
        step_seconds=_median("step_seconds", half),
        mfu=_median("mfu", half),
        memory_bytes=int(max(memory)) if memory else None,
    )


def objective_value(name: str, numbers: Summary) -> float | None:
    """An objective's number; val_loss of a run without validation is its loss.

    Raises KeyError for a name that is not in OBJECTIVES.
    """
    if name not in OBJECTIVES:
        raise KeyError(name)
    if name == "val_loss" and numbers.val_loss is None:
        return numbers.loss
    return getattr(numbers, name)


def _last_records(file: IO[bytes]) -> list[dict[str, Any]]:
    """The last records of a metrics.jsonl, STEPS at most, in order."""
    end = file.seek(0, os.SEEK_END)
    start, data = end, b""
    while start > 0 and data.count(b"\n") <= STEPS:
        size = min(_BLOCK, start)
        start -= size
        file.seek(start)
        data = file.read(size) + data
    lines = data.split(b"\n")
    complete = lines[:-1] if start == 0 else lines[1:-1]  # the last one is truncated, or empty
    return list(parse_records(complete[-STEPS:]))


def _last_val_loss(file: IO[bytes]) -> float | None:
    """The last one in the file, searched from its end."""
    position = file.seek(0, os.SEEK_END)
    rest = b""  # the part of a line that begins in the block before
    while position > 0:
        size = min(8 * _BLOCK, position)
        position -= size
        file.seek(position)
        head, newline, lines = (file.read(size) + rest).partition(b"\n")
        if position == 0:
            head, lines = b"", head + newline + lines
        with_it = [line for line in lines.split(b"\n")[:-1] if b'"val_loss"' in line]
        for record in parse_records(reversed(with_it)):
            if _is_number(record, "val_loss"):
                return record["val_loss"]
        rest = head + newline
    return None


def parse_records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The records among the lines of a metrics.jsonl, or the events of an events.jsonl."""
    for line in lines:
        try:
            record = files.loads(line)
        except ValueError:
            continue
        if type(step := record.get("step")) is int and 0 <= step < files.LARGEST:
            yield record


def _last_resume(run_dir: Path) -> int:
    """The step that the run's last start resumed from, in events.jsonl; 0 if it did not resume."""
    try:
        with files.open_regular(run_dir / "events.jsonl") as file:
            lines = file.read().splitlines()
    except OSError:
        return 0
    events = parse_records(line for line in reversed(lines) if b'"resume"' in line)
    return next((event["step"] for event in events if event.get("event") == "resume"), 0)


def _newest(key: str, records: list[dict[str, Any]]) -> float | None:
    return next((record[key] for record in reversed(records) if _is_number(record, key)), None)


def _median(key: str, records: list[dict[str, Any]]) -> float | None:
    values = [record[key] for record in records if _is_number(record, key)]
    return statistics.median(values) if values else None


def _is_number(record: dict[str, Any], key: str) -> bool:
    value = record.get(key)
    return type(value) is float or (type(value) is int and abs(value) < files.LARGEST)
