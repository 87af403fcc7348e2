"""The end of a sweep, and tools/sweep.py: print the table, write it, draw the picture."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from titanlike.config.program import program
from titanlike.metrics.console import LOG_WIDTH, Console
from titanlike.sweeps.job_status import is_sweep
from titanlike.sweeps.table import Table, read_table, terminal_lines
from titanlike.sweeps.table_files import write_csv, write_markdown

DONE, LEFT, INVALID = 0, 1, 2  # exit codes


def report(
    folder: Path,
    say: Callable[[str], None],
    *,
    ended: Collection[int] = (),
    picture: bool = True,
) -> Table:
    """Print a sweep's table, and write sweep.csv, sweep.md and sweep.png into its folder.

    ended: see `read_job_rows`. A file that cannot be written is reported by a line. Raises as
    `read_table` does.
    """
    table = read_table(folder, ended)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else LOG_WIDTH
    for line in terminal_lines(table, width):
        say(line)
    drawn = _try(say, "sweep.png", lambda: _draw(table)) if picture else None
    csv = _try(say, "sweep.csv", lambda: write_csv(table))
    text = _try(say, "sweep.md", lambda: write_markdown(table, drawn is not None))
    if written := [str(path) for path in (csv, text, drawn) if path]:
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


def _draw(table: Table) -> Path | None:
    from titanlike.sweeps.picture import draw  # matplotlib takes a second to import

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
