"""`python tools/gpu_check.py`: does everything work on the GPUs of this machine, and how fast?

1. The plan (`gpu_plan`): cells chosen by the number of GPUs.
2. Each runs in processes of its own, with a time limit (`gpu_cells`); a failure costs no other cell.
3. The report (`gpu_report`) is written after every cell.

With `--device cpu` the same code runs on as many gloo ranks, with tiny models and few cells.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlike.config.files import make_new_folder
from titanlike.config.program import program
from titanlike.metrics.console import shorten
from titanlike.proof.gpu_cells import Outcome, run_cell
from titanlike.proof.gpu_plan import KINDS, Cell, plan
from titanlike.proof.gpu_report import describe_machine, write_report

_HELP = """\
kinds of checks, for --only:
  verify       schedules, ZeRO levels, bf16, compile: against one process of torch
  determinism  two runs with deterministic=true are equal to the last bit
  hangs        a rank is stopped: the run ends in time and names it
  kills        a rank is killed: the run restarts, and no number changes
  speed        tokens/s, MFU and memory of 1B and 8B, with recommended settings

exit code: 0 everything passed, 1 something failed, 2 nothing could be run"""


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    arguments = _parser().parse_args(argv)
    kinds = tuple(arguments.only.split(",")) if arguments.only else KINDS
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        return _refuse(f"--only {','.join(unknown)}: no such check; checks: {', '.join(KINDS)}")
    if arguments.gpus is not None and arguments.gpus < 1:
        return _refuse(f"--gpus {arguments.gpus}: must be at least 1")
    try:
        machine = describe_machine()
    except RuntimeError as error:
        return _refuse(str(error))
    cpu, found = arguments.device == "cpu", len(machine["names"])
    if not cpu and not found:
        return _refuse("there is no GPU; --device cpu runs what works without one")
    count = arguments.gpus or (2 if cpu else found)
    if not cpu and count > found:
        return _refuse(f"--gpus {count}: there are {found}")
    cells = plan(count, kinds, cpu=cpu)
    if arguments.list:
        for cell in cells:
            print(f"{cell.kind:12} {cell.name}")
        return 0
    try:
        named = Path(arguments.folder or time.strftime("outputs/gpu_check/%Y-%m-%d_%H-%M-%S"))
        folder = make_new_folder(named)
    except OSError as error:
        return _refuse(f"{arguments.folder}: cannot be made: {error.strerror}")
    return _run(cells, folder, machine)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=shlex.join(program()),
        description="Check the GPUs of this machine, and write a report to keep.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", choices=("gpu", "cpu"), default="gpu", help="cpu: tiny models, few checks"
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="use N (ranks with cpu); default all, 2"
    )
    parser.add_argument("--only", metavar="KIND,...", help="these checks alone")
    parser.add_argument("--list", action="store_true", help="print what would run, run nothing")
    parser.add_argument(
        "folder", nargs="?", metavar="DIR", help="outputs/gpu_check/DATE if not given"
    )
    return parser


def _refuse(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return 2


def _run(cells: Sequence[Cell], folder: Path, machine: dict[str, Any]) -> int:
    report = folder / "report.md"
    outcomes: list[Outcome] = []
    started = time.strftime("%Y-%m-%d %H:%M")
    print(f"{len(cells)} checks; the report is {report}, whole after each of them", flush=True)
    end = "still running"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the report says how it ended
    try:
        for number, cell in enumerate(cells, start=1):
            write_report(report, machine, cells, outcomes, f"Started {started}; {end}.")
            if sys.stdout.isatty():
                _print_line(f"[{number}/{len(cells)}] running  {cell.kind}: {cell.name}", end="\r")
            outcome = run_cell(cell, folder / f"{number:03}-{cell.kind}")
            outcomes.append(outcome)
            _print(number, len(cells), cell, outcome)
            if outcome.status == "ok":  # checkpoints are large, logs of what works not needed
                shutil.rmtree(folder / f"{number:03}-{cell.kind}", ignore_errors=True)
        end = f"ended {time.strftime('%Y-%m-%d %H:%M')}"
    except KeyboardInterrupt:
        end = "interrupted"
    finally:
        write_report(report, machine, cells, outcomes, f"Started {started}; {end}.")
    counts = Counter(outcome.status for outcome in outcomes)
    text = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    print(f"{text or 'nothing has run'}; report: {report}")
    if end == "interrupted":
        return 130
    return 0 if counts["ok"] == len(cells) else 1


def _print(number: int, of: int, cell: Cell, outcome: Outcome) -> None:
    """A line for the cell, and one for what was found, cut to the terminal."""
    _print_line(
        f"[{number}/{of}] {outcome.status:7} {outcome.seconds:4.0f} s  {cell.kind}: {cell.name}"
    )
    for text in textwrap.wrap(outcome.text, _width() - 10):
        print(f"          {text}", flush=True)


def _print_line(text: str, end: str = "\n") -> None:
    """On a terminal over the line of the cell that was running."""
    width = _width() - 1
    shown = shorten(text, width)
    print(shown.ljust(width) if sys.stdout.isatty() else shown, end=end, flush=True)


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns
