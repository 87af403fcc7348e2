"""The end of a sweep, and tools/sweep.py: print the table, write it, draw the picture."""

from __future__ import annotations

import argparse
import csv
import io
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from titanlike.config import files
from titanlike.config.program import program
from titanlike.driver import sweep_table
from titanlike.driver.sweep_status import is_sweep
from titanlike.driver.sweep_table import CSV, MARKDOWN, PICTURE, Column, Table, counts, read_table
from titanlike.metrics.console import LOG_WIDTH, Console

DONE, LEFT, INVALID = 0, 1, 2  # exit codes


def report(
    folder: Path, say: Callable[[str], None], *, ended: Collection[int] = (), picture: bool = True
) -> Table:
    """Print a sweep's table, and write sweep.csv, sweep.md and sweep.png into its folder.

    ended: see `read_job_rows`. A file that cannot be written is reported by a line. Raises as
    `read_table` does.
    """
    table = read_table(folder, ended)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else LOG_WIDTH
    for line in sweep_table.terminal_lines(table, width):
        say(line)
    drawn = _try(say, PICTURE, lambda: _draw(table)) if picture else None
    numbers = _try(say, CSV, lambda: write_csv(table))
    text = _try(say, MARKDOWN, lambda: write_markdown(table, drawn is not None))
    if written := [str(path) for path in (numbers, text, drawn) if path]:
        say(f"written: {', '.join(written)}")
    return table


def main(argv: list[str] | None = None) -> int:
    """tools/sweep.py; the exit code: 0 where all is done, 1 where something is left, 2 for a folder
    that is no sweep's."""
    parser = argparse.ArgumentParser(
        prog=shlex.join(program()),
        description="Print the table of a sweep, also while it runs, and write sweep.csv, sweep.md "
        "and the picture sweep.png into its directory. Exit code 0 if all jobs are done, else 1.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="the sweep's run_dir")
    parser.add_argument("--no-picture", action="store_true", help="draw nothing")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder
    try:
        if not folder.is_dir():
            return _fail(f"{folder} is no folder")
        if not is_sweep(folder):
            run = (folder / "config.yaml").exists()
            return _fail(f"{folder} is no sweep's: {'one run' if run else 'no job is in it'}")
        say = Console(steps=1).line
        table = report(folder, say, picture=not arguments.no_picture)
    except (OSError, ValueError) as error:
        return _fail(" ".join(str(error).split()))
    return LEFT if table.left else DONE


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
        settings = [row.settings.get(key, "") for key in table.keys]
        rest = [row.error, row.job.folder, shlex.join(row.job.overrides)]
        writer.writerow([row.job.number, *settings, row.status, *values, *rest])
    files.atomic_write_text(table.folder / CSV, text.getvalue())
    return table.folder / CSV


def write_markdown(table: Table, picture: bool) -> Path:
    """A GitHub table with readable numbers, the best job in bold; `picture`: link sweep.png."""
    best = table.best
    columns = sweep_table.read_columns(table, table.keys)
    if any(row.error for row in table.rows):
        columns.append(Column("error", [sweep_table.first_line(row.error) for row in table.rows]))
    lines = [f"# Sweep {_escaped(table.folder.resolve().name)}", ""]
    lines += [_md_line([_escaped(column.header) for column in columns])]
    lines += [_md_line(["---:" if column.number else "---" for column in columns])]
    for i, row in enumerate(table.rows):
        cells = [_escaped(column.cells[i]) for column in columns]
        lines.append(_md_line([f"**{cell}**" if row is best and cell else cell for cell in cells]))
    lines += ["", _escaped(counts(table))]
    if best is not None:
        lines += [
            "",
            _escaped(sweep_table.best_line(table, best)),
            "",
            f"    {sweep_table.job_command(table.plan, best)}",
        ]
    if again := sweep_table.resume_command(table):
        purpose, command = again
        lines += ["", f"{purpose[0].upper()}{purpose[1:]}:", "", f"    {command}"]
    if picture:
        lines += ["", f"![loss curves and throughput]({PICTURE})"]
    files.atomic_write_text(table.folder / MARKDOWN, "\n".join(lines) + "\n")
    return table.folder / MARKDOWN


def _md_line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escaped(text: str) -> str:
    """Text that a table's cell shows as it is."""
    return re.sub(r"([\\`*<\[\]|~]|\b_|_\b)", r"\\\1", " ".join(text.split()))


def _draw(table: Table) -> Path | None:
    from titanlike.driver.sweep_picture import draw  # matplotlib takes a second to import

    return draw(table)


def _try(say: Callable[[str], None], name: str, write: Callable[[], Path | None]) -> Path | None:
    try:
        return write()
    except Exception as error:  # its report must not make a sweep fail
        say(f"{name} could not be written: {type(error).__name__}: {error}")
        return None


def _fail(text: str) -> int:
    print("error:", text, file=sys.stderr)
    return INVALID
