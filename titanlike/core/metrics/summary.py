"""A run's latest metrics, read from the end of metrics.jsonl. Does not import torch."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import IO, Any

from titanlike.core.config import files
from titanlike.core.config.schema import OBJECTIVES

_MAXIMIZED = ("tokens_per_second", "samples_per_second", "mfu")  # of OBJECTIVES of a sweep
STEPS = 500  # limit of records in a median: a table of 1,000 runs then takes seconds
_BLOCK = 1 << 17  # bytes; about 500 records


@dataclass(frozen=True)
class Summary:
    """A run's latest metrics; None = not logged."""

    steps: int = 0  # the last logged step
    loss: float | None = None  # the last; may be nan
    val_loss: float | None = None  # the last
    tokens_per_second: float | None = None  # this and the next three: medians, see `summarize`
    samples_per_second: float | None = None  # for data without tokens
    step_seconds: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None  # peak of the fullest rank since the last launch


def summarize(run_dir: Path) -> Summary:
    """Summarize run_dir/metrics.jsonl; without the file, return an empty Summary.

    Speeds are medians over the second half of the steps since the last launch, at most the last
    `STEPS`: first steps compile and allocate.
    """
    try:
        with files.open_regular(Path(run_dir) / "metrics.jsonl") as file:
            # lines from the newest on; the very last one is empty or truncated
            lines = _backwards(file)
            next(lines, b"")
            records = [*parse_records(islice(lines, STEPS))][::-1]
            val_loss = _newest("val_loss", records)
            if val_loss is None:  # a run may validate more rarely than every STEPS steps
                val_loss = _last(lines, "val_loss")
    except (FileNotFoundError, NotADirectoryError, files.NotRegularFile):
        return Summary()
    if not records:
        return Summary()
    last = records[-1]["step"]
    events = jsonl_records(Path(run_dir) / "events.jsonl", b'"resume"')
    resumes = [0, *(event["step"] for event in events if event.get("event") == "resume")]
    start = resumes[-1] if resumes[-1] < last else 0  # later restarted from step 0
    recent = [record for record in records if record["step"] > start]
    half = [record for record in recent if record["step"] > start + (last - start) // 2]
    memory = [record["memory_bytes"] for record in recent if is_number(record, "memory_bytes")]
    return Summary(
        steps=last,
        loss=_newest("loss", records),
        val_loss=val_loss,
        tokens_per_second=_median("tokens_per_second", half),
        samples_per_second=_median("samples_per_second", half),
        step_seconds=_median("step_seconds", half),
        mfu=_median("mfu", half),
        memory_bytes=int(max(memory)) if memory else None,
    )


def objective_value(name: str, run_dir: Path) -> float | None:
    """The value of a run's objective `name`. Without validation, val_loss is the training loss."""
    numbers = summarize(run_dir)
    if name == "val_loss" and numbers.val_loss is None:
        return numbers.loss
    if name in OBJECTIVES:
        return getattr(numbers, name)
    try:
        with files.open_regular(Path(run_dir) / "metrics.jsonl") as file:
            return _last(_backwards(file), name.removeprefix("-"))  # of a metric that falls
    except OSError:
        return None


def is_maximized(name: str) -> bool:
    """Whether an objective is maximized: custom metrics are, unless a minus precedes the name."""
    own = name not in OBJECTIVES and not name.startswith(("-", "val_loss"))
    return own or name in _MAXIMIZED


def _last(lines: Iterator[bytes], key: str) -> float | None:
    """The value of `key` in the first of these lines that has it."""
    records = parse_records(line for line in lines if f'"{key}"'.encode() in line)
    return next((record[key] for record in records if is_number(record, key)), None)


def _backwards(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file, last first, beginning with what follows the last newline, even if
    empty; a line over `files.MOST_LINE` is the last one."""
    position = file.seek(0, os.SEEK_END)
    rest: list[bytes] = []  # end of a line whose beginning is not read yet, last part first
    while position > 0 and sum(map(len, rest)) <= files.MOST_LINE:
        size = min(_BLOCK, position)
        position -= size
        file.seek(position)
        first, *lines = file.read(size).split(b"\n")
        if lines:
            lines[-1] += b"".join(reversed(rest))
            yield from reversed(lines)
            rest = []
        rest.append(first)
    yield b"".join(reversed(rest))


def parse_records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Parse the lines of a metrics.jsonl or events.jsonl, skipping invalid ones."""
    for line in lines:
        try:
            record = files.loads(line)
        except ValueError:
            continue
        if type(step := record.get("step")) is int and 0 <= step < files.LARGEST:
            yield record


def jsonl_records(path: Path, having: bytes = b"") -> Iterator[dict[str, Any]]:
    """Yield the records of a JSONL file whose line contains `having`; none if there is no file. No
    run writes a line over `files.MOST_LINE`: the file ends there."""
    try:
        with files.open_regular(path) as file:
            lines = iter(partial(file.readline, files.MOST_LINE), b"")
            lines = takewhile(lambda line: len(line) < files.MOST_LINE, lines)
            yield from parse_records(line for line in lines if having in line)
    except OSError:
        return


def _newest(key: str, records: list[dict[str, Any]]) -> float | None:
    return next((record[key] for record in reversed(records) if is_number(record, key)), None)


def _median(key: str, records: list[dict[str, Any]]) -> float | None:
    values = [record[key] for record in records if is_number(record, key)]
    return statistics.median(values) if values else None


def flat_record(record: dict[str, Any]) -> dict[str, Any]:
    """Flatten lists and dicts in a record to name/index and name/key."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        several = isinstance(value, dict)
        flat |= {f"{name}/{key}": v for key, v in value.items()} if several else {name: value}
    return flat


def is_number(record: dict[str, Any], key: str) -> bool:
    value = record.get(key)
    return type(value) is float or (type(value) is int and abs(value) < files.LARGEST)
