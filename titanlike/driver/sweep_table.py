"""A sweep's table in the terminal, printed at its end and by tools/sweep.py, and its page
sweep.html."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titanlike.config.files import same_folder
from titanlike.config.program import argument_parser, exit_code, program_length, train_program
from titanlike.driver.job import SWEEP_FILE
from titanlike.driver.sweep_status import JobRow, SweepSpec, read_job_rows, read_spec, run_dir_word
from titanlike.metrics import units
from titanlike.metrics.console import LOG_WIDTH, Console, shorten, table_lines
from titanlike.metrics.report import MOST_RUNS, write_reports
from titanlike.metrics.summary import OBJECTIVES, is_maximized

PAGE = "sweep.html"
_FRACTION = re.compile(r"-?\d*\.\d+(e[-+]?\d+)?", re.IGNORECASE)
_WIDEST = 160  # columns of a terminal used at most
_NAMED = 12  # unfinished jobs that are listed
_SETTING = 12  # columns of a setting in a narrow terminal
_ERRORS = 20  # distinct errors below the table
_ROUNDING = 1e-5  # relative difference of equal objectives: layouts round differently


@dataclass(frozen=True)
class Table:
    """A sweep's jobs and spec."""

    folder: Path
    spec: SweepSpec
    rows: list[JobRow]

    @property
    def keys(self) -> list[str]:
        """The settings that differ between jobs, one column each."""
        return list(dict.fromkeys(key for row in self.rows for key in row.settings))

    def label(self, row: JobRow) -> str:
        """Return a job's settings with short names; "job" if it has none."""
        names = _short_names(self.keys)
        return " ".join(f"{names[key]}={_setting(row, key)}" for key in row.settings) or "job"

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
        what = "one run" if (folder / "config.yaml").exists() else f"no {SWEEP_FILE} is in it"
        reason = f"is no sweep's: {what}" if folder.is_dir() else "is no folder"
        raise ValueError(f"{folder} {reason}")
    spec = replace(spec, command=_of_folder(spec.command, folder))
    return Table(folder, spec, read_job_rows(folder, spec, ended))


def _of_folder(command: str, folder: Path) -> str:
    """Return the command with the sweep's current folder, which may have been moved."""
    with contextlib.suppress(ValueError):  # an unclosed quote
        words = shlex.split(command)
        for i, word in enumerate(words):
            key, _, named = word.partition("=")
            if key in ("run_dir", "hydra.sweep.dir") and not same_folder(named.strip("'"), folder):
                words[i] = run_dir_word(folder.absolute())
                command = shlex.join(words)
    return command


def terminal_lines(table: Table, width: int) -> list[str]:
    """Format the table in `width` columns at most, then errors, the best job and the unfinished
    ones.

    Commands are not cut, so that they can be copied.
    """
    width = min(width, _WIDEST)
    columns = _fitting(table, width)
    cells = [[column.cells[i] for column in columns] for i in range(len(table.rows))]
    headers = [column.header for column in columns]
    lines = table_lines("", headers, cells, width) if cells else []
    if errors := _errors(table.rows, width):
        lines += ["", *errors]
    if (best := table.best) is not None and best.value is not None:
        name, number = table.spec.value, best.job.number
        forms = {"tokens_per_second": units.count, "memory_bytes": units.size}
        shown = {**forms, "mfu": "{:.1%}".format}.get(name, units.decimal)(best.value)
        lines += [
            "",
            f"best {name}: {shown}, of job {number}",
            f"  {job_command(table.spec, best)}",
        ]
    lines += ["", counts(table)]
    if again := resume_command(table):
        lines += [f"{again[0]}:", f"  {again[1]}"]
    return lines


@dataclass(frozen=True)
class Column:
    header: str
    cells: list[str]
    number: bool = False

    @property
    def width(self) -> int:
        return max(map(len, [self.header, *self.cells]))


def read_columns(table: Table, keys: list[str]) -> list[Column]:
    """Return the columns, except those that are empty for all jobs."""
    rows, known = table.rows, table.spec.value in OBJECTIVES
    numbers: list[tuple[str, list[Any], Callable[[Any], str]]] = [
        ("loss", [row.summary.loss for row in rows], units.decimal),
        ("val_loss", [row.summary.val_loss for row in rows], units.decimal),
        *([] if known else [(table.spec.value, [row.value for row in rows], units.decimal)]),
        ("tok/s", [row.summary.tokens_per_second for row in rows], units.count),
        ("samples/s", [row.summary.samples_per_second for row in rows], units.count),
        ("memory", [row.summary.memory_bytes for row in rows], units.size),
        ("time", [row.seconds for row in rows], units.duration),
    ]
    return [
        Column("job", [str(row.job.number) for row in rows], number=True),
        *(Column(key, [_setting(row, key) for row in rows]) for key in keys),
        Column("status", [row.status for row in rows]),
        *(
            Column(header, ["-" if v is None else form(v) for v in values], number=True)
            for header, values, form in numbers
            if any(v is not None for v in values)
        ),
    ]


def _setting(row: JobRow, key: str) -> str:
    """Return a setting as written, except long fractions: 0.00031622776601683795 as 0.0003162."""
    text = row.settings.get(key, "")
    return f"{float(text):.4g}" if len(text) > 8 and _FRACTION.fullmatch(text) else text


def _fitting(table: Table, width: int) -> list[Column]:
    """Return the columns that fit; settings are shortened first, then columns omitted."""
    names = _short_names(table.keys)
    settings = []
    if 2 * len(names) > width // 12:  # too many for one column each
        labels = [table.label(row) if row.settings else "" for row in table.rows]
        settings = [Column("overrides", labels)]
    columns = read_columns(table, [] if settings else table.keys)
    columns = [Column(names.get(c.header, c.header), c.cells, c.number) for c in columns]
    columns[1:1] = settings
    last = 1 + (len(settings) or len(table.keys))
    losses = {column.header for column in columns} & {"loss", "val_loss"}
    other = "loss" if table.spec.value == "val_loss" else "val_loss"
    spare = ["time", "memory", *([other] if len(losses) > 1 else []), "tok/s", "samples/s"]

    def fits() -> bool:
        widths = [column.width for column in columns]
        widths[1:last] = [min(setting, _SETTING) for setting in widths[1:last]]
        return 2 * len(widths) + sum(widths) <= width

    for name in spare:
        if not fits():
            columns = [column for column in columns if column.header != name]
    return columns


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


def resume_command(table: Table) -> tuple[str, str] | None:
    """Return (purpose, shell line) to run the unfinished jobs; None if there are none or it is
    unknown.

    Values with which every job is invalid are left out of the line; other invalid jobs are named.
    """
    spec, left = table.spec, table.left
    if not spec.command or all(row.status == "running" for row in left):
        return None
    invalid = [row for row in left if row.status == "invalid"]
    command = spec.command
    purpose = "to run what is left"
    if invalid and len(invalid) == len(left):
        purpose += f", with other values for what is invalid ({_numbers(invalid)})"
    elif invalid:
        command, dropped = _without_invalid(command, table.rows)
        rest = [row for row in invalid if not dropped.intersection(row.job.overrides)]
        purpose += f" (jobs {_numbers(rest)} are invalid as they are)" if rest else ""
        purpose += f", without {shlex.join(sorted(dropped))}" if dropped else ""
    return purpose, command if "sweep.resume=true" in command else f"{command} sweep.resume=true"


def _without_invalid(command: str, rows: list[JobRow]) -> tuple[str, set[str]]:
    """Return the command without values with which every job is invalid, and these overrides."""
    dropped: set[str] = set()
    try:
        words = shlex.split(command)
    except ValueError:  # a quote that is not closed
        return command, dropped
    for i, word in enumerate(words):
        key, _, text = word.partition("=")
        values = text.split(",")
        if any(character in text for character in "()[]{}'\"\\"):  # not a simple list
            continue
        statuses = {
            value: {row.status for row in rows if f"{key}={value.strip()}" in row.job.overrides}
            for value in values
        }
        wrong = [value for value in values if statuses[value] == {"invalid"}]
        if wrong and len(wrong) < len(values):
            dropped.update(f"{key}={value.strip()}" for value in wrong)
            words[i] = f"{key}={','.join(value for value in values if value not in wrong)}"
    return (shlex.join(words), dropped) if dropped else (command, dropped)


def job_command(spec: SweepSpec, row: JobRow) -> str:
    """Return the shell line that runs one job alone."""
    implied = {*spec.implied}.difference(row.job.swept)  # the program adds these itself
    overrides = [o for o in row.job.overrides if o not in implied]
    try:
        words = shlex.split(spec.command)
    except ValueError:  # a quote that is not closed
        words = []
    count = program_length(words)
    if not count:
        return shlex.join([*train_program(), *overrides])
    program, rest, options = words[:count], words[count:], []
    for i, word in enumerate(rest):  # find the config's options
        if word.startswith("--config") or word in ("-cp", "-cn", "-cd"):
            options += [word] if "=" in word else rest[i : i + 2]
    first = program[0] if "=" in program[0] else shlex.quote(program[0])  # VAR=value
    if not {"-m", "--multirun"} & set(rest) and any("experiment=" in text for text in overrides):
        overrides.append("hydra.mode=RUN")  # the experiment's file declares a sweep
    return " ".join([first, shlex.join([*program[1:], *options, *overrides])]).rstrip()


def report(folder: Path, say: Callable[[str], None], *, ended: Collection[int] = ()) -> Table:
    """Print a sweep's table and write sweep.html into its folder.

    ended: see `read_job_rows`. A page that cannot be written is reported by a line. Raises as
    `read_table`.
    """
    table = read_table(folder, ended)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else LOG_WIDTH
    for line in terminal_lines(table, width):
        say(line)
    try:
        if page := write_page(table):
            say(f"written: {page}")
    except Exception as error:  # a report must not make a sweep fail
        say(f"{PAGE} could not be written: {type(error).__name__}: {error}")
    return table


def main(argv: list[str] | None = None) -> int:
    """Run tools/sweep.py. Exit code: 0 if all jobs are done, 1 if not, 2 for a folder that is not a
    sweep's."""
    parser = argument_parser(
        "Print the table of a sweep, also while it runs, and write the page sweep.html into its "
        "directory. Exit code 0 if all jobs are done, else 1."
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="the sweep's run_dir")
    arguments = parser.parse_args(argv)
    say = Console(steps=1).line
    return exit_code(lambda: int(bool(report(arguments.folder, say).left)))


def write_page(table: Table) -> Path | None:
    """Write the objective of each job against each parameter that differs, and the jobs' curves in
    one picture (of many jobs the best); None if no job has logged a step."""
    sign = -1 if not table.spec.inner and is_maximized(table.spec.value) else 1

    def place(row: JobRow) -> tuple[bool, float]:
        value = math.inf if row.value is None or math.isnan(row.value) else sign * row.value
        return row.status != "completed", value

    rows = [row for row in table.rows if row.summary.steps]
    if len(rows) > MOST_RUNS:
        rows = sorted(rows, key=place)[:MOST_RUNS]
    runs = {row.run_dir: f"{row.job.number}: {table.label(row)}" for row in rows}
    sweep = {
        "name": table.folder.resolve().name,
        "value": table.spec.value,
        "best": table.best and table.best.job.number,
        "jobs": [
            {
                "number": row.job.number,
                "label": table.label(row),
                "status": row.status,
                "value": row.value,
                "settings": row.settings,
            }
            for row in table.rows
        ],
    }
    return write_reports(table.folder / PAGE, runs, sweep=sweep) if runs else None
