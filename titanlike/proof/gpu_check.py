"""`python tools/gpu_check.py`: does everything work on the GPUs of this machine, and how fast?

1. The plan (`gpu_cells`): cells chosen by the number of GPUs.
2. Each runs in processes of its own, with a time limit; a failure costs no other cell.
3. The report is a Markdown file, written after every cell.

With `--device cpu` the same code runs on as many gloo ranks, with tiny models and few cells.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from titanlike.config.files import atomic_write_text, make_new_folder
from titanlike.config.program import argument_parser, exit_code
from titanlike.launch.environment import child_environment
from titanlike.metrics import units
from titanlike.metrics.console import shorten
from titanlike.proof.gpu_cells import KINDS, Cell, Outcome, plan, run_cell

_END = "exit code: 0 everything passed, 1 something failed, 2 nothing could be run"


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    arguments = _parser().parse_args(argv)
    return exit_code(lambda: _check(arguments))


def _check(arguments: argparse.Namespace) -> int:
    """Raises ValueError, OSError where nothing can be run."""
    kinds = tuple(arguments.only.split(",")) if arguments.only else tuple(KINDS)
    if any(kind not in KINDS for kind in kinds):
        raise ValueError(f"--only {','.join(kinds)}: no such check; checks: {', '.join(KINDS)}")
    if arguments.gpus is not None and arguments.gpus < 1:
        raise ValueError(f"--gpus {arguments.gpus}: must be at least 1")
    machine = _describe_machine()
    cpu, gpus = arguments.device == "cpu", len(machine["names"])
    if not cpu and not gpus:
        raise ValueError("there is no GPU; --device cpu runs what works without one")
    count = arguments.gpus or (2 if cpu else gpus)
    if not cpu and count > gpus:
        raise ValueError(f"--gpus {count}: there are {gpus}")
    cells = plan(count, kinds, cpu=cpu)
    if arguments.list:
        for cell in cells:
            print(f"{cell.kind:12} {cell.name}")
        return 0
    named = Path(arguments.folder or time.strftime("outputs/gpu_check/%Y-%m-%d_%H-%M-%S"))
    return _run(cells, make_new_folder(named), machine)


def _parser() -> argparse.ArgumentParser:
    kinds = "\n".join(f"  {kind:12} {text}" for kind, text in KINDS.items())
    parser = argument_parser(
        "Check the GPUs of this machine, and write a report to keep.",
        epilog=f"kinds of checks, for --only:\n{kinds}\n\n{_END}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tiny = "cpu: tiny models, few checks"
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help=tiny)
    few = "use N (ranks with cpu); default all, 2"
    parser.add_argument("--gpus", type=int, metavar="N", help=few)
    parser.add_argument("--only", metavar="KIND,...", help="these checks alone")
    parser.add_argument("--list", action="store_true", help="print what would run, run nothing")
    folder = "outputs/gpu_check/DATE if not given"
    parser.add_argument("folder", nargs="?", metavar="DIR", help=folder)
    return parser


def _run(cells: Sequence[Cell], folder: Path, machine: dict[str, Any]) -> int:
    report = folder / "report.md"
    outcomes: list[Outcome] = []
    started = time.strftime("%Y-%m-%d %H:%M")
    print(f"{len(cells)} checks; the report is {report}, whole after each of them", flush=True)
    end = "still running"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the report says how it ended
    try:
        for number, cell in enumerate(cells, start=1):
            _write_report(report, machine, cells, outcomes, f"Started {started}; {end}.")
            place, name = f"[{number}/{len(cells)}]", f"{cell.kind}: {cell.name}"
            if sys.stdout.isatty():
                _print_line(f"{place} running  {name}", end="\r")
            outcome = run_cell(cell, folder / f"{number:03}-{cell.kind}")
            outcomes.append(outcome)
            _print_line(f"{place} {outcome.status:7} {outcome.seconds:4.0f} s  {name}")
            for text in textwrap.wrap(outcome.text, _width() - 10):
                print(f"          {text}", flush=True)
            if outcome.status == "ok":  # checkpoints are large, logs of what works not needed
                shutil.rmtree(folder / f"{number:03}-{cell.kind}", ignore_errors=True)
        end = f"ended {time.strftime('%Y-%m-%d %H:%M')}"
    except KeyboardInterrupt:
        end = "interrupted"
    finally:
        _write_report(report, machine, cells, outcomes, f"Started {started}; {end}.")
    print(f"{_counted(outcomes) or 'nothing has run'}; report: {report}")
    if end == "interrupted":
        return 130
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1


def _print_line(text: str, end: str = "\n") -> None:
    """Print it, on a terminal over the line of the cell that was running."""
    width = _width() - 1
    shown = shorten(text, width)
    print(shown.ljust(width) if sys.stdout.isatty() else shown, end=end, flush=True)


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns


def _counted(outcomes: Iterable[Outcome]) -> str:
    counts = Counter(outcome.status for outcome in outcomes)
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))


# --- the report ---------------------------------------------------------------------------------


def _describe_machine() -> dict[str, Any]:
    """Versions, names and bytes of memory of the GPUs. Raises OSError if torch fails here."""
    # in a process of its own: this one must not hold memory on a GPU while cells run
    command = "from titanlike.device.memory import print_machine; print_machine()"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, env=child_environment()
    )
    if done.returncode:
        raise OSError(f"torch does not start here: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _write_report(
    path: Path,
    machine: dict[str, Any],
    cells: Sequence[Cell],
    outcomes: Sequence[Outcome],
    note: str,
) -> None:
    """outcomes: of the first cells; note: the line below the title: when, how far."""
    names = Counter(zip(machine["names"], machine["memory"], strict=True))
    gpus = ", ".join(f"{n} x {name} ({units.size(size)})" for (name, size), n in names.items())
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items() if v)
    host = f"{platform.node()}, {os.cpu_count()} cores, {platform.platform()}"
    lines = ["# Check of this machine", "", note, "", f"- {gpus or 'no GPU'}", f"- {host}"]
    lines += [f"- Python {platform.python_version()}, {versions}", ""]
    left = len(cells) - len(outcomes)
    summary = f"**{_counted(outcomes) or 'nothing has run yet'}**"
    lines += [summary + (f", {left} not run" if left else ""), ""]
    pairs = [*zip(cells, [*outcomes, *[None] * left], strict=True)]
    for kind, title in KINDS.items():
        if rows := [(cell, outcome) for cell, outcome in pairs if cell.kind == kind]:
            lines += [f"## {kind}: {title}", "", *_table(kind, rows), ""]
    failed = [(cell, out) for cell, out in pairs if out is not None and out.status != "ok"]
    lines += ["## What failed", ""] if failed else []
    for cell, outcome in failed:
        lines += [f"### {cell.kind}: {cell.name}", "", f"{outcome.status}: {outcome.text}", ""]
        lines += ["```sh", outcome.command, "```", ""]
        if outcome.output:
            lines += ["```text", outcome.output.replace("```", "'''").strip(), "```", ""]
    atomic_write_text(path, "\n".join(lines).rstrip() + "\n")


def _table(kind: str, rows: Sequence[tuple[Cell, Outcome | None]]) -> list[str]:
    speed = kind == "speed"
    head = ["tokens/s", "a device", "MFU", "step", "memory"] if speed else []
    lines = [["cell", "", "seconds", *head, *([] if speed else ["what was found"])]]
    lines.append(["---"] * len(lines[0]))
    for cell, outcome in rows:
        if outcome is None:
            cells = ["not run"]
        else:
            cells = [outcome.status, f"{outcome.seconds:.0f}"]
            cells += _figures(outcome.figures) if outcome.figures else [outcome.text]
        line = [f"`{cell.name}`", *cells]
        lines.append([*line, *[""] * (len(lines[0]) - len(line))])
    return [
        "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in line) + " |"
        for line in lines
    ]


def _figures(figures: dict[str, Any]) -> list[str]:
    speed, mfu = figures["tokens_per_second"], figures["mfu"]
    each, step = speed / figures["devices"], figures["step_seconds"] * 1e3
    share = "" if mfu is None else f"{mfu:.1%}"
    memory = units.size(figures["memory_bytes"])
    return [f"{speed:,.0f}", f"{each:,.0f}", share, f"{step:,.0f} ms", memory]
