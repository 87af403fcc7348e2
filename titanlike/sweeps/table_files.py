"""sweep.csv and sweep.md."""

from __future__ import annotations

import csv
import io
import re
import shlex
from pathlib import Path

from titanlike.config import files
from titanlike.sweeps.job_commands import job_command, resume_command
from titanlike.sweeps.table import (
    CSV,
    PICTURE,
    Column,
    Table,
    best_line,
    counts,
    first_line,
    read_columns,
)

MARKDOWN = "sweep.md"


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
    columns = read_columns(table, table.keys)
    if any(row.error for row in table.rows):
        columns.append(Column("error", [first_line(row.error) for row in table.rows]))
    lines = [f"# Sweep {_escaped(table.folder.resolve().name)}", ""]
    lines += [_md_line([_escaped(column.header) for column in columns])]
    lines += [_md_line(["---:" if column.number else "---" for column in columns])]
    for i, row in enumerate(table.rows):
        cells = [_escaped(column.cells[i]) for column in columns]
        bold = best is not None and row is best
        lines.append(_md_line([f"**{cell}**" if bold and cell else cell for cell in cells]))
    lines += ["", *(_escaped(line) for line in counts(table.rows))]
    if best is not None:
        lines += ["", _escaped(best_line(table, best)), "", f"    {job_command(table.plan, best)}"]
    if again := resume_command(table.plan, table.left):
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
