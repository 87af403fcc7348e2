"""A sweep's table: on the terminal, as sweep.csv and sweep.md; which job was best; what is left."""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlike.config import files
from titanlike.config.program import program_length, train_program
from titanlike.metrics import units
from titanlike.metrics.console import table_lines
from titanlike.sweeps import rows as sweep_rows
from titanlike.sweeps.plan import Plan, read_plan
from titanlike.sweeps.rows import Row, read_rows

CSV, MARKDOWN, PICTURE = "sweep.csv", "sweep.md", "sweep.png"
_FRACTION = re.compile(r"-?\d*\.\d+(e[-+]?\d+)?", re.IGNORECASE)
_WIDEST = 160  # columns of a terminal that are used
_NAMED = 12  # jobs that are left are named, up to so many
_SETTING = 12  # columns of a setting, where there is little room
_SEARCH = "throughput"  # conf/experiment/throughput.yaml
_ERRORS = 20  # different errors below the terminal's table


@dataclass(frozen=True)
class Table:
    """A sweep's rows, and what they are read with."""

    folder: Path
    plan: Plan | None  # None: of an older sweep, or another sweeper
    rows: list[Row]

    @property
    def value(self) -> str:
        """The objective's name."""
        return self.plan.value if self.plan else "val_loss"

    @property
    def keys(self) -> list[str]:
        """What differs between the jobs: a column each."""
        return list(dict.fromkeys(key for row in self.rows for key in row.settings))

    def label(self, row: Row) -> str:
        """A job in a few words: what is special about it, with short names; else "job"."""
        names = _short_names(self.keys)
        return " ".join(f"{names[key]}={_setting(row, key)}" for key in row.settings) or "job"

    @property
    def best(self) -> Row | None:
        """None for a tool's sweep: what its value is, and whether more is better, nobody has said."""
        if self.plan is not None and self.plan.inner:
            return None
        return sweep_rows.best(self.rows, self.value)

    @property
    def left(self) -> list[Row]:
        return sweep_rows.left(self.rows)


def read_table(folder: Path, ended: Collection[int] = ()) -> Table:
    """The table of a sweep's directory, at any time. ended: see `read_rows`.

    Raises ValueError where the plan is damaged, OSError where something cannot be read.
    """
    plan = read_plan(folder)
    return Table(folder, plan, read_rows(folder, plan, ended))


# --- files -------------------------------------------------------------------------------------


def write_csv(table: Table) -> Path:
    """Every column of every job, numbers with all their digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = [
        *("last_step", "final_loss", "val_loss", "grad_norm", "tokens_per_second", "step_seconds"),
        *("mfu", "memory_bytes", "seconds", "objective"),
    ]
    writer.writerow(["job", *table.keys, "status", *numbers, "error", "folder", "overrides"])
    for row in table.rows:
        s = row.summary
        values = [
            *(s.steps or None, s.loss, s.val_loss, s.grad_norm, s.tokens_per_second),
            *(s.step_seconds, s.mfu, s.memory_bytes, row.seconds, row.value),
        ]
        writer.writerow(
            [
                row.job.number,
                *(row.settings.get(key, "") for key in table.keys),
                row.status,
                *values,
                row.error,
                row.job.folder,
                shlex.join(row.job.overrides),
            ]
        )
    path = table.folder / CSV
    files.atomic_write_text(path, text.getvalue())
    return path


def write_markdown(table: Table, picture: bool) -> Path:
    """A GitHub table with readable numbers, the best job in bold; `picture`: link sweep.png."""
    best = table.best
    columns = _columns(table, table.keys)
    if any(row.error for row in table.rows):
        columns.append(_Column("error", [_first_line(row.error) for row in table.rows]))
    lines = [f"# Sweep {_escaped(table.folder.resolve().name)}", ""]
    lines += [_md_line([_escaped(column.header) for column in columns])]
    lines += [_md_line(["---:" if column.number else "---" for column in columns])]
    for i, row in enumerate(table.rows):
        cells = [_escaped(column.cells[i]) for column in columns]
        bold = best is not None and row is best
        lines.append(_md_line([f"**{cell}**" if bold and cell else cell for cell in cells]))
    lines += ["", *(_escaped(line) for line in counts(table.rows))]
    if best is not None:
        lines += ["", _escaped(_best_is(table, best)), "", f"    {command_of(table.plan, best)}"]
    if again := command_again(table):
        lines += ["", "To run what is left:", "", f"    {again}"]
    if picture:
        lines += ["", f"![loss curves and throughput]({PICTURE})"]
    path = table.folder / MARKDOWN
    files.atomic_write_text(path, "\n".join(lines) + "\n")
    return path


def _md_line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escaped(text: str) -> str:
    """Text that a table's cell shows as it is."""
    text = re.sub(r"([\\`*<\[\]|~]|\b_|_\b)", r"\\\1", " ".join(text.split()))
    return text


# --- terminal ----------------------------------------------------------------------------------


def terminal_lines(table: Table, width: int) -> list[str]:
    """The table in at most `width` columns, below it the errors, the best job, and what is left.

    Commands are not cut, for they are to be copied.
    """
    width = min(width, _WIDEST)
    columns = _fitting(table, width)
    skipped = sum(row.status == "skipped" for row in table.rows)
    shown = [  # many that were never started are told by one line a reason alone
        i for i, row in enumerate(table.rows) if skipped <= _NAMED or row.status != "skipped"
    ]
    cells = [[column.cells[i] for column in columns] for i in shown]
    headers = [column.header for column in columns]
    lines = table_lines("", headers, cells, width) if cells else []
    if errors := _errors(table.rows, width):
        lines += ["", *errors]
    if (best := table.best) is not None:
        lines += ["", _best_is(table, best), f"  {command_of(table.plan, best)}"]
    lines += ["", *counts(table.rows)]
    if again := command_again(table):
        lines += ["to run what is left:", f"  {again}"]
    return lines


@dataclass(frozen=True)
class _Column:
    header: str
    cells: list[str]
    number: bool = False

    @property
    def width(self) -> int:
        return max(map(len, [self.header, *self.cells]))


def _columns(table: Table, keys: list[str]) -> list[_Column]:
    """The columns that people read: of what no job has, there is none."""
    rows = table.rows

    def numbers(header: str, values: Iterable[Any], form: Any) -> list[_Column]:
        values = list(values)
        if all(value is None for value in values):
            return []
        return [_Column(header, ["-" if v is None else form(v) for v in values], number=True)]

    settings = [_Column(key, [_setting(row, key) for row in rows]) for key in keys]
    return [
        _Column("job", [str(row.job.number) for row in rows], number=True),
        *settings,
        _Column("status", [row.status for row in rows]),
        *numbers("loss", (row.summary.loss for row in rows), units.decimal),
        *numbers("val_loss", (row.summary.val_loss for row in rows), units.decimal),
        *numbers("tok/s", (row.summary.tokens_per_second for row in rows), units.count),
        *numbers("memory", (row.summary.memory_bytes for row in rows), units.size),
        *numbers("time", (row.seconds for row in rows), units.duration),
    ]


def _setting(row: Row, key: str) -> str:
    """As it was written, but 0.00031622776601683795, of a search, as 0.0003162."""
    text = row.settings.get(key, "")
    return f"{float(text):.4g}" if len(text) > 8 and _FRACTION.fullmatch(text) else text


def _fitting(table: Table, width: int) -> list[_Column]:
    """The columns as they fit: where long settings, shortened, do not do, some are left out."""
    names = _short_names(table.keys)
    if 2 * len(names) > width // 12:  # too many for a column each
        labels = [table.label(row) if row.settings else "" for row in table.rows]
        settings = [_Column("overrides", labels)]
    else:
        settings = []
    columns = _columns(table, [] if settings else table.keys)
    columns = [_Column(names.get(c.header, c.header), c.cells, c.number) for c in columns]
    columns[1:1] = settings
    first, last = 1, 1 + (len(settings) or len(table.keys))
    losses = {column.header for column in columns} & {"loss", "val_loss"}
    other = "loss" if table.value == "val_loss" else "val_loss"
    spare = ["time", "memory", *([other] if len(losses) > 1 else []), "tok/s"]

    def fits() -> bool:
        widths = [
            min(column.width, _SETTING) if first <= i < last else column.width
            for i, column in enumerate(columns)
        ]
        return 2 * len(widths) + sum(widths) <= width

    for name in spare:
        if not fits():
            columns = [column for column in columns if column.header != name]
    return columns


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """optimizer.lr -> lr, as long as no other column is called so."""
    taken = Counter(key.rpartition(".")[2] for key in keys)
    taken.update(["job", "status", "loss", "val_loss", "tok/s", "memory", "time"])
    names = {key: key.rpartition(".")[2] for key in keys}
    return {key: name if taken[name] == 1 else key for key, name in names.items()}


def _errors(rows: list[Row], width: int) -> list[str]:
    """A line an error, with the jobs that ended by it."""
    told: dict[str, list[Row]] = {}
    for row in rows:
        if row.error and row.status != "completed":
            told.setdefault(f"{row.status}: {_first_line(row.error)}", []).append(row)
    lines = [
        shorten_end(f"  {_numbers(those)} {text}", width)
        for text, those in list(told.items())[:_ERRORS]
    ]
    if len(told) > _ERRORS:
        lines.append(f"  and {len(told) - _ERRORS} other errors; {CSV} has all")
    return lines


def shorten_end(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _first_line(error: str | None) -> str:
    lines = [line.strip() for line in (error or "").splitlines() if line.strip()]
    return lines[0] if lines else ""


# --- the end -----------------------------------------------------------------------------------


def counts(rows: list[Row]) -> list[str]:
    """How many are done, and which are left, by what became of them: one line."""
    to_do = [row for row in rows if row.status != "skipped"]
    not_done = sweep_rows.left(rows)
    skipped = f", {len(rows) - len(to_do)} skipped" if len(to_do) < len(rows) else ""
    text = f"{len(to_do) - len(not_done)} of {len(to_do)} done{skipped}"
    if 0 < len(not_done) <= _NAMED:
        named = ", ".join(f"{row.job.number} ({row.status})" for row in not_done)
        text += f"; left: {named}"
    elif not_done:
        by_status: dict[str, list[Row]] = {}
        for row in not_done:
            by_status.setdefault(row.status, []).append(row)
        text += "; left: " + "; ".join(
            f"{len(those)} {status} ({_numbers(those)})" for status, those in by_status.items()
        )
    return [text]


def command_again(table: Table) -> str:
    """The shell line that runs what is left; "" where nothing is, or nobody knows the line."""
    if table.plan is None or not table.plan.command:
        return ""
    if all(row.status == "running" for row in table.left):
        return ""
    command = table.plan.command
    return command if "sweep.resume=true" in command else f"{command} sweep.resume=true"


def command_of(plan: Plan | None, row: Row) -> str:
    """The shell line that runs one job by itself; of a throughput search, that trains with it."""
    overrides = list(_without_search(row.job.overrides))
    words = _words(plan.command if plan else "")
    count = program_length(words)
    if not count:
        return shlex.join([*train_program(), *overrides])
    program, rest, options = words[:count], words[count:], []
    for i, word in enumerate(rest):  # where the config is
        if word.startswith("--config") or word in ("-cp", "-cn", "-cd"):
            options += [word] if "=" in word else rest[i : i + 2]
    start = [
        word if "=" in word and i == 0 else shlex.quote(word) for i, word in enumerate(program)
    ]
    if not {"-m", "--multirun"} & set(rest) and any("experiment=" in text for text in overrides):
        overrides.append("hydra.mode=RUN")  # the experiment's file says that it is a sweep
    return " ".join([*start, shlex.join([*options, *overrides])]).rstrip()


def _without_search(overrides: list[str]) -> Iterator[str]:
    """Overrides without the experiment that makes a search, and its few steps, of any run."""
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        if key != "experiment":
            yield text
            continue
        names = [name.strip() for name in value.strip("[]").split(",")]
        if _SEARCH not in names:
            yield text
        elif others := [name for name in names if name != _SEARCH]:
            yield f"experiment=[{','.join(others)}]"


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quote that is not closed
        return []


def _best_is(table: Table, best: Row) -> str:
    assert best.value is not None
    form = {"tokens_per_second": units.count, "memory_bytes": units.size, "mfu": "{:.1%}".format}
    shown = form.get(table.value, units.decimal)(best.value)
    return f"best {table.value}: {shown}, of job {best.job.number}"


def _numbers(rows: list[Row]) -> str:
    """Job numbers as 3, 7-9; the first few of many."""
    runs: list[list[int]] = []
    for number in sorted(row.job.number for row in rows):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(texts[:8]) + (", ..." if len(texts) > 8 else "")
