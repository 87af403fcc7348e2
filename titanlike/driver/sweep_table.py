"""A sweep's table, printed at its end: a row for each job, errors, the best job, what is left."""

from __future__ import annotations

import math
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlike.driver.job import SWEEP_FILE
from titanlike.driver.sweep_status import JobRow, SweepSpec, read_job_rows, read_spec
from titanlike.metrics import units
from titanlike.metrics.console import LOG_WIDTH, shorten, table_lines
from titanlike.metrics.summary import OBJECTIVES, is_maximized

_FRACTION = re.compile(r"-?\d*\.\d+(e[-+]?\d+)?", re.IGNORECASE)
_WIDEST = 160  # columns of a terminal used at most
_NAMED = 12  # unfinished jobs that are listed
_SETTINGS = 5  # settings that have a column each; more are in one column
_ERRORS = 20  # distinct errors below the table
_ROUNDING = 1e-5  # relative difference of equal objectives: layouts round differently


@dataclass(frozen=True)
class Table:
    """A sweep's jobs and spec."""

    spec: SweepSpec
    rows: list[JobRow]

    @property
    def keys(self) -> list[str]:
        """The settings that differ between jobs."""
        return list(dict.fromkeys(key for row in self.rows for key in row.settings))

    @property
    def best(self) -> JobRow | None:
        """Return the completed job with the best objective, the fastest among equals; None if not
        comparable.

        None for a tool's sweep, where it is unknown whether the value is maximized.
        """
        if self.spec.inner:
            return None
        sign = -1 if is_maximized(self.spec.value) else 1
        rows = [(row.value, row) for row in self.rows if row.done]
        done = [(sign * v, row) for v, row in rows if v is not None and math.isfinite(v)]
        least = min((value for value, _ in done), default=0.0)

        def slowness(row: JobRow) -> tuple[float, float, int]:
            seconds = math.inf if row.seconds is None else row.seconds
            speed = row.summary.tokens_per_second or row.summary.samples_per_second or 0.0
            return -speed, seconds, row.job.number

        ties = (row for value, row in done if value - least <= _ROUNDING * abs(least))
        return min(ties, key=slowness, default=None)

    @property
    def left(self) -> list[JobRow]:
        """Return the jobs that are not done."""
        return [row for row in self.rows if not row.done]


def read_table(folder: Path, ended: Collection[int] = ()) -> Table:
    """Read the table of a sweep's directory, at any time. ended: see `read_job_rows`.

    Raises ValueError for a folder that is not a sweep's, OSError for unreadable files.
    """
    if (spec := read_spec(folder)) is None:
        raise ValueError(f"{folder} is no sweep's: no {SWEEP_FILE} is in it")
    return Table(spec, read_job_rows(folder, spec, ended))


def report(
    table: Table, start: Sequence[str], again: Sequence[str], say: Callable[[str], None]
) -> None:
    """Print a sweep's table.

    start: the words before a job's own overrides. again: those that run this sweep again. Both are
    this command's own: of sweep.jsonl, which others may have written, only overrides are printed,
    each quoted.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else LOG_WIDTH
    for line in terminal_lines(table, start, again, width):
        say(line)


def terminal_lines(
    table: Table, start: Sequence[str], again: Sequence[str], width: int
) -> list[str]:
    """Format the table in `width` columns at most, then errors, the best job and the unfinished
    ones. Commands are not cut, so that they can be copied."""
    width = min(width, _WIDEST)
    headers, cells = _columns(table)
    lines = table_lines("", headers, cells, width) if cells else []
    if errors := _errors(table.rows, width):
        lines += ["", *errors]
    if (best := table.best) is not None and best.value is not None:
        name, number = table.spec.value, best.job.number
        forms = {"tokens_per_second": units.count, "memory_bytes": units.size}
        shown = {**forms, "mfu": "{:.1%}".format}.get(name, units.decimal)(best.value)
        line = shlex.join([*start, *best.job.overrides])
        lines += ["", f"best {name}: {shown}, of job {number}", f"  {line}"]
    lines += ["", counts(table)]
    if any(row.status != "running" for row in table.left):
        invalid = [row for row in table.left if row.status == "invalid"]
        purpose = f" (jobs {_numbers(invalid)} are invalid as they are)" if invalid else ""
        resume = [] if "sweep.resume=true" in again else ["sweep.resume=true"]
        lines += [f"to run what is left{purpose}:", f"  {shlex.join([*again, *resume])}"]
    return lines


def _columns(table: Table) -> tuple[list[str], list[list[str]]]:
    """Return the headers, and each job's cells, without columns that are empty for all jobs."""
    rows, known, keys = table.rows, table.spec.value in OBJECTIVES, table.keys
    names = _short_names(keys)
    numbers: list[tuple[str, list[Any], Callable[[Any], str]]] = [
        ("loss", [row.summary.loss for row in rows], units.decimal),
        ("val_loss", [row.summary.val_loss for row in rows], units.decimal),
        *([] if known else [(table.spec.value, [row.value for row in rows], units.decimal)]),
        ("tok/s", [row.summary.tokens_per_second for row in rows], units.count),
        ("samples/s", [row.summary.samples_per_second for row in rows], units.count),
        ("memory", [row.summary.memory_bytes for row in rows], units.size),
        ("time", [row.seconds for row in rows], units.duration),
    ]
    columns = [("job", [str(row.job.number) for row in rows])]
    if len(keys) > _SETTINGS:
        labels = [" ".join(f"{names[k]}={_setting(row, k)}" for k in row.settings) for row in rows]
        columns.append(("overrides", labels))
    else:
        columns += [(names[key], [_setting(row, key) for row in rows]) for key in keys]
    columns.append(("status", [row.status for row in rows]))
    columns += [
        (header, ["-" if v is None else form(v) for v in values])
        for header, values, form in numbers
        if any(v is not None for v in values)
    ]
    return [header for header, _ in columns], [
        [cells[i] for _, cells in columns] for i in range(len(rows))
    ]


def _setting(row: JobRow, key: str) -> str:
    """Return a setting as written, except long fractions: 0.00031622776601683795 as 0.0003162."""
    text = row.settings.get(key, "")
    return f"{float(text):.4g}" if len(text) > 8 and _FRACTION.fullmatch(text) else text


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Shorten optimizer.lr to lr, unless another column has that name."""
    taken = Counter(key.rpartition(".")[2] for key in keys)
    taken.update(["job", "status", "loss", "val_loss", "tok/s", "samples/s", "memory", "time"])
    names = {key: key.rpartition(".")[2] for key in keys}
    return {key: name if taken[name] == 1 else key for key, name in names.items()}


def _errors(rows: list[JobRow], width: int) -> list[str]:
    """Return a line for each distinct error, with its jobs' numbers."""
    by_text: dict[str, list[JobRow]] = {}
    for row in rows:
        if (error := (row.error or "").strip()) and row.status != "completed":
            by_text.setdefault(f"{row.status}: {error.splitlines()[0]}", []).append(row)
    errors = [*by_text.items()]
    lines = [shorten(f"  {_numbers(jobs)} {text}", width) for text, jobs in errors[:_ERRORS]]
    if len(errors) > _ERRORS:
        lines.append(f"  and {len(errors) - _ERRORS} other errors, each in its job's result.json")
    return lines


def counts(table: Table) -> str:
    """Return how many jobs are done, and how many unfinished by status."""
    left, every = table.left, len(table.rows)
    text = f"{every - len(left)} of {every} done"
    by_status = {row.status: [r for r in left if r.status == row.status] for row in left}
    if len(left) <= _NAMED:
        named = ", ".join(f"{row.job.number} ({row.status})" for row in left)
    else:
        groups = by_status.items()
        named = "; ".join(f"{len(jobs)} {status} ({_numbers(jobs)})" for status, jobs in groups)
    return f"{text}; left: {named}" if left else text


def _numbers(rows: list[JobRow]) -> str:
    """Format job numbers as 3, 7-9; only the first few."""
    runs: list[list[int]] = []
    for number in sorted(row.job.number for row in rows):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(texts[:8]) + (", ..." if len(texts) > 8 else "")
