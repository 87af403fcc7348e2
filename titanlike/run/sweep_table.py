"""A sweep's jobs, how each ended, and the table at its end. No torch.

sweep.jsonl has a line for each job: {"number": 3, "overrides": [...]}; its files are in the folder of
its number. Several processes append to it at once: a launcher's, which add the jobs of a search.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlike.core.config import files
from titanlike.core.config.credentials import redact_override
from titanlike.core.config.overrides import key_of
from titanlike.core.launch.run_dir_lock import is_locked
from titanlike.core.metrics import units
from titanlike.core.metrics.console import LOG_WIDTH, shorten, table_lines
from titanlike.core.metrics.run_files import append_line, ended_by_max_time, read_result
from titanlike.core.metrics.summary import OBJECTIVES, Summary, is_maximized, summarize
from titanlike.run.job import SWEEP_FILE

_KILLED = re.compile(r"(rank \d+ failed: )?killed by ")
_LEFT_BY_RUNS = ("config.yaml", "metrics.jsonl", "logs", "result.json")
_ROUNDING = 1e-5  # relative difference of equal objectives: layouts round differently
_NAMED, _ERRORS = 8, 20  # jobs that are listed by number, distinct errors below the table


@dataclass(frozen=True)
class _Job:
    """A line of sweep.jsonl."""

    number: int
    overrides: list[str]


def add_job(folder: Path, number: int, overrides: Sequence[str]) -> None:
    """Append a job to sweep.jsonl; credentials are written as ***."""
    shown = [redact_override(text) for text in overrides]
    # after a new line, for a killed process may have torn the last one
    append_line(folder / SWEEP_FILE, "\n" + files.dumps({"number": number, "overrides": shown}))


def read_jobs(folder: Path) -> dict[int, list[str]]:
    """Read the jobs of a sweep's directory by number, the last line of each; none if there is none.

    Raises ValueError if sweep.jsonl is no regular file, OSError if it is unreadable.
    """
    jobs = {}
    try:
        lines = files.read_bytes(folder / SWEEP_FILE).split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise ValueError(f"{folder / SWEEP_FILE} {error}") from None
    for line in lines:
        with contextlib.suppress(ValueError):  # torn, empty, or the header of earlier versions
            job = files.as_record(files.loads(line), _Job)
            jobs[job.number] = job.overrides
    return dict(sorted(jobs.items()))


@dataclass(frozen=True)
class JobRow:
    """A job, its status and its numbers. Statuses:

    completed, failed, interrupted, stopped (early by a stop request: it can be resumed) and invalid
    (an error in its config, nothing was started), as result.json says; killed: it ended without
    result.json, or a signal killed one of its processes; running; waiting: not started yet.
    """

    number: int
    overrides: list[str]
    status: str
    error: str | None
    summary: Summary
    value: float | None  # the objective, once it has ended
    seconds: float | None  # wall time of its last launch

    @property
    def done(self) -> bool:
        """Whether it completed, or reached its max_time."""
        return self.status == "completed" or ended_by_max_time(self.status, self.error)


def read_row(run_dir: Path, number: int, overrides: list[str]) -> JobRow:
    """Return how a job stands. Raises OSError for unreadable files."""
    result, unread = dict[str, Any](), "it ended without a word: no result.json"
    try:
        result = read_result(run_dir) or {}
    except NotADirectoryError:
        pass
    except ValueError as odd:  # for example truncated by a copy
        unread = str(odd)
    status, error = result.get("status", "killed"), result.get("error") if result else unread
    if status == "failed" and _KILLED.match(error or ""):
        status = "killed"
    elif not result and is_locked(run_dir):
        status, error = "running", None
    elif not result and not any((run_dir / name).exists() for name in _LEFT_BY_RUNS):
        status, error = "waiting", None
    numbers = summarize(run_dir), result.get("value"), result.get("seconds")
    return JobRow(number, overrides, status, error, *numbers)


def best_job(rows: Sequence[JobRow], value: str) -> JobRow | None:
    """Return the completed job with the best objective, the fastest of those that are equal up to
    rounding; None = none has one."""
    sign = -1 if is_maximized(value) else 1
    numbers = [(row.value, row) for row in rows if row.done]
    done = [(sign * v, row) for v, row in numbers if v is not None and math.isfinite(v)]
    least = min((number for number, _ in done), default=0.0)
    ties = [row for number, row in done if number - least <= _ROUNDING * abs(least)]
    return max(ties, key=lambda row: row.summary.tokens_per_second or 0.0, default=None)


def sweep_lines(
    rows: Sequence[JobRow], value: str, best: JobRow | None, start: list[str], again: list[str]
) -> list[str]:
    """Format the table, errors, the best job and the unfinished ones.

    start: the words before a job's own overrides. again: those that run this sweep again, if it has
    jobs left. Both are this command's own: of sweep.jsonl, which others may have written, only
    overrides are printed, each quoted. Commands are not cut, so that they can be copied.
    """
    width = shutil.get_terminal_size((LOG_WIDTH, 0)).columns
    lines = table_lines("", *_columns(rows, value), width)
    told = [
        f"  {row.number} {row.status}: {row.error.splitlines()[0]}"
        for row in rows
        if row.error and row.status != "completed"
    ]
    lines += [""] * bool(told) + [shorten(line, width) for line in told[:_ERRORS]]
    if len(told) > _ERRORS:
        lines.append(f"  and {len(told) - _ERRORS} other errors, each in its job's result.json")
    if best is not None and best.value is not None:
        lines += ["", f"best {value}: {best.value:.6g}, of job {best.number}"]
        lines += [f"  {shlex.join([*start, *best.overrides])}"]
    left: dict[str, list[JobRow]] = {}
    for row in rows:
        if not row.done:
            left.setdefault(row.status, []).append(row)
    named = ", ".join(f"{_numbers(jobs)} ({status})" for status, jobs in left.items())
    done = f"{sum(row.done for row in rows)} of {len(rows)} done"
    lines += ["", f"{done}; left: {named}" if left else done]
    if again and left.keys() - {"running"}:
        invalid = _numbers(left.get("invalid", []))
        purpose = f" (jobs {invalid} are invalid as they are)" if invalid else ""
        lines += [f"to run what is left{purpose}:", f"  {shlex.join(again)}"]
    return lines


def _columns(rows: Sequence[JobRow], value: str) -> tuple[list[str], list[list[str]]]:
    """Return the headers, and each job's cells: what differs between jobs, and what was measured
    of any."""
    columns = [("job", [str(row.number) for row in rows])]
    settings = [{key_of(text): text.partition("=")[2] for text in row.overrides} for row in rows]
    for key in dict.fromkeys(key for values in settings for key in values):
        cells = [values.get(key, "") for values in settings]
        if len({*cells}) > 1:
            columns.append((key, cells))
    columns.append(("status", [row.status for row in rows]))
    numbers: list[tuple[str, list[Any], Callable[[Any], str]]] = [
        ("loss", [row.summary.loss for row in rows], units.decimal),
        ("val_loss", [row.summary.val_loss for row in rows], units.decimal),
        (value, [row.value for row in rows if value not in OBJECTIVES], units.decimal),
        ("tok/s", [row.summary.tokens_per_second for row in rows], units.count),
        ("samples/s", [row.summary.samples_per_second for row in rows], units.count),
        ("memory", [row.summary.memory_bytes for row in rows], units.size),
        ("time", [row.seconds for row in rows], units.duration),
    ]
    for header, values, form in numbers:
        if any(number is not None for number in values):
            columns.append((header, ["-" if v is None else form(v) for v in values]))
    headers, by_column = zip(*columns, strict=True)
    return [*headers], [[*row] for row in zip(*by_column, strict=True)]


def _numbers(rows: Sequence[JobRow]) -> str:
    """Format job numbers; only the first few."""
    numbers = [str(row.number) for row in rows]
    more = f", ... {len(numbers)} in all" if len(numbers) > _NAMED else ""
    return ", ".join(numbers[:_NAMED]) + more
