"""`python tools/gpu_check.py`: does everything work on the GPUs of this machine, and how fast?

1. The plan (`gpu_cells`): ordered cells of up to eight ranks, or as many as there are GPUs.
2. Each runs in its own processes, with a time limit, several at a time; failures are isolated.
3. After each, report.md and results.json are written; another call can continue from the latter.

With `--device cpu` the same code runs on gloo ranks, with tiny models and few cells.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_check.cells import KINDS, Cell, Outcome, plan, run_cell
from titanlike.core.config.files import atomic_write_text, make_new_folder, read_object
from titanlike.core.config.program import argument_parser, exit_code
from titanlike.core.launch.environment import available_cores, child_environment
from titanlike.core.launch.signals import StopRequest, die_with_parent, interruptible
from titanlike.core.metrics import units
from titanlike.core.metrics.console import shorten
from titanlike.core.metrics.run_files import own_version

_END = "exit code: 0 everything that ran passed, 1 something failed, 2 nothing could be run"
_MOST_RANKS = 8  # of a cell, if there are fewer GPUs
_RANK_MEMORY = 4 * 2**30  # GPU memory of a rank: context, kernels, a small model
_POLL = 0.5  # seconds between looks at whether a signal came
_MOST_PASSED_OVER = 16
_ENDING = 12.0  # seconds for a cell at its limit to report its stacks and end


def main(argv: list[str] | None = None) -> int:
    """Run the tool; return the exit code."""
    arguments = _parser().parse_args(argv)
    return exit_code(lambda: _check(arguments))


def _check(arguments: argparse.Namespace) -> int:
    """Raises ValueError or OSError if nothing can be run."""
    kinds = tuple(arguments.only.split(",")) if arguments.only else tuple(KINDS)
    if any(kind not in KINDS for kind in kinds):
        raise ValueError(f"--only {','.join(kinds)}: no such check; checks: {', '.join(KINDS)}")
    if arguments.gpus is not None and arguments.gpus < 1:
        raise ValueError(f"--gpus {arguments.gpus}: must be at least 1")
    machine = _describe_machine()
    cpu, gpus = arguments.device == "cpu", len(machine["names"])
    count = arguments.gpus or (2 if cpu else gpus)
    if not (cpu or gpus or (arguments.list and count)):
        raise ValueError("there is no GPU; --device cpu runs what works without one")
    if not (cpu or arguments.list) and count > gpus:
        raise ValueError(f"--gpus {count}: there are {gpus}")
    for name, value in (("minutes", arguments.minutes), ("at-once", arguments.at_once)):
        if value is not None and value <= 0:
            raise ValueError(f"--{name} {value:g}: must be more than 0")
    cells = plan(count if cpu else max(count, _MOST_RANKS), kinds, cpu=cpu, gpus=count)
    outcomes: dict[int, Outcome] = {}
    if arguments.go_on:
        path = Path(arguments.go_on)
        try:
            cells, outcomes = _passed_before(path, cells, machine)
        except (KeyError, TypeError, AttributeError):
            raise ValueError(
                f"--continue {path}: no results.json of gpu_check; leave it out"
            ) from None
    if arguments.list:
        for number, cell in enumerate(cells):
            if number not in outcomes:
                print(f"{cell.kind:12} {cell.seconds:4.0f} s  {cell.name}")
        return 0
    cores, memory = available_cores(), sum(machine["memory"])
    limit = cores if cpu else max(1, min(cores // 2, memory // _RANK_MEMORY))
    named = Path(arguments.folder or time.strftime("outputs/gpu_check/%Y-%m-%d_%H-%M-%S"))
    end = time.monotonic() + 60 * (arguments.minutes or math.inf)
    folder = make_new_folder(named)
    places = Places([] if cpu else visible_gpus(count), machine["memory"])
    return _run(cells, folder, machine, outcomes, arguments.at_once or limit, end, places)


def visible_gpus(count: int) -> list[str]:
    """The first `count` GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (given.split(",") if given else [*map(str, range(count))])[:count]


class Places:
    """Which GPUs a cell gets: the least loaded ones. On these, what stops or kills ranks, or is
    measured, runs alone; a GPU has no more ranks than its memory has room for."""

    ALONE = ("hangs", "kills", "speed")

    def __init__(self, gpus: Sequence[str], memory: Sequence[int]) -> None:
        """gpus: names; memory: bytes of each. Without GPUs every cell gets ()."""
        self._most = {
            g: max(1, size // _RANK_MEMORY) for g, size in zip(gpus, memory, strict=False)
        }
        self._taken: dict[int, tuple[Cell, tuple[str, ...]]] = {}

    @property
    def loads(self) -> dict[str, int]:
        """Ranks on each GPU."""
        loads = dict.fromkeys(self._most, 0)
        for cell, gpus in self._taken.values():
            for gpu in gpus:
                loads[gpu] += -(-cell.ranks // len(gpus))
        return loads

    def take(self, number: int, cell: Cell) -> tuple[str, ...] | None:
        """Give a cell its GPUs; None = they are not free yet."""
        loads, wanted = self.loads, min(cell.ranks, len(self._most))
        closed = {
            g for other, gpus in self._taken.values() if other.kind in self.ALONE for g in gpus
        }
        each = -(-cell.ranks // max(1, wanted))
        alone = cell.kind in self.ALONE
        fits = [
            gpu
            for gpu, load in loads.items()
            if gpu not in closed and (not load or (not alone and load + each <= self._most[gpu]))
        ]
        if len(fits) < wanted:
            return None
        chosen = tuple(sorted(fits, key=lambda gpu: loads[gpu])[:wanted])
        self._taken[number] = cell, chosen
        return chosen

    def free(self, number: int) -> None:
        self._taken.pop(number, None)


def _passed_before(
    path: Path, cells: Sequence[Cell], machine: Mapping[str, Any]
) -> tuple[list[Cell], dict[int, Outcome]]:
    """The cells with their seconds in earlier results, and the outcomes, by number, of those that
    passed. Raises ValueError, OSError."""
    before = read_object(path)
    for key, now in _place(machine).items():
        if key != "titanlike" and before.get(key) != now:
            raise ValueError(
                f"--continue {path}: {key} was {before.get(key)}, is {now}; leave it out"
            )
    known = {(r["kind"], r["name"]): r for r in before["cells"]}
    earlier = [known.get((cell.kind, cell.name)) for cell in cells]
    cells = [
        replace(cell, seconds=max(row["seconds"], cell.seconds * (row["status"] == "TIMEOUT")))
        if row
        else cell
        for cell, row in zip(cells, earlier, strict=True)
    ]
    names = Outcome.__dataclass_fields__
    passed = {
        number: Outcome(**{key: value for key, value in row.items() if key in names})
        for number, row in enumerate(earlier)
        if row and row["status"] == "ok"
    }
    return cells, passed


def _parser() -> argparse.ArgumentParser:
    kinds = "\n".join(f"  {kind:12} {text}" for kind, text in KINDS.items())
    parser = argument_parser(
        "Check the GPUs of this machine, and write a report to keep.",
        epilog=f"kinds of checks, for --only:\n{kinds}\n\n{_END}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tiny = "cpu: tiny models, few checks"
    parser.add_argument("--device", choices=("gpu", "cuda", "cpu"), default="gpu", help=tiny)
    few = "use N (ranks with cpu); default all, 2"
    parser.add_argument("--gpus", type=int, metavar="N", help=few)
    parser.add_argument("--only", metavar="KIND,...", help="these checks alone")
    limit = "start nothing that cannot end in M minutes; say what is left"
    parser.add_argument("--minutes", type=float, metavar="M", help=limit)
    less = "run what has not passed in that results.json"
    parser.add_argument("--continue", dest="go_on", metavar="RESULTS", help=less)
    at_once = "ranks at a time; default by cores and memory"
    parser.add_argument("--at-once", type=int, metavar="RANKS", help=at_once)
    parser.add_argument("--list", action="store_true", help="print what would run, run nothing")
    folder = "outputs/gpu_check/DATE if not given"
    parser.add_argument("folder", nargs="?", metavar="DIR", help=folder)
    return parser


def _run(
    cells: Sequence[Cell],
    folder: Path,
    machine: Mapping[str, Any],
    outcomes: dict[int, Outcome],
    at_once: int,
    end: float = math.inf,
    places: Places | None = None,
) -> int:
    """outcomes: by number, of cells that need not run; at_once: ranks; end: monotonic time; places:
    None = no GPUs."""
    places = places or Places([], [])
    started = time.strftime("%Y-%m-%d %H:%M")
    waiting = [number for number in range(len(cells)) if number not in outcomes]
    left: list[int] = []
    running: dict[Connection, tuple[int, multiprocessing.process.BaseProcess]] = {}
    passed_over = 0  # cells that have started while the first of the queue waited
    pace = [1.0]  # seconds that cells took, relative to the expected ones
    print(f"{len(waiting)} checks; the report is {folder / 'report.md'}, whole after each of them")

    def write(how: str) -> None:
        note = f"Started {started}; {how}."
        _write_report(folder / "report.md", machine, cells, outcomes, note)
        rows = [
            {"kind": cells[n].kind, "name": cells[n].name, "ranks": cells[n].ranks} | asdict(out)
            for n, out in sorted(outcomes.items())
        ]
        names = [f"{cells[n].kind} {cells[n].name}" for n in left + waiting]
        results = _place(machine) | {"note": note, "cells": rows, "left": names}
        atomic_write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")

    def start_those_that_fit() -> None:
        nonlocal passed_over
        for number in [*waiting]:
            cell, remaining = cells[number], end - time.monotonic() - _ENDING
            if cell.seconds * max(1.0, median(pace)) > remaining:
                waiting.remove(number)
                left.append(number)
                continue
            used = sum(cells[n].ranks for n, _ in running.values())
            kinds = cell.kind, *(cells[n].kind for n, _ in running.values())
            alone = not places.loads and "speed" in kinds  # with GPUs, alone on its own
            full = bool(running) and (alone or used + cell.ranks > at_once)
            gpus = None if full else places.take(number, cell)
            if gpus is None:
                if passed_over >= _MOST_PASSED_OVER * bool(places.loads):
                    return  # those that run end, and leave the first of the queue its GPUs
                continue
            passed_over = 0 if number == waiting[0] else passed_over + 1
            cell = replace(cell, timeout=min(cell.timeout, remaining), gpus=gpus)
            waiting.remove(number)
            ours, theirs = multiprocessing.Pipe(duplex=False)
            words = cell, folder / f"{number + 1:03}-{cell.kind}", theirs, os.getpid()
            process = multiprocessing.get_context("fork").Process(target=_run_one, args=words)
            process.start()
            theirs.close()
            running[ours] = number, process

    how, stop = "still running", StopRequest(answer="stopping the checks that run")
    with interruptible(stop=stop), stop.deferred():
        try:
            while (waiting or running) and not stop.received:
                write(how)
                start_those_that_fit()
                names = [f"{cells[n].kind}: {cells[n].name}" for n, _ in running.values()]
                if sys.stdout.isatty() and names:
                    place = f"[{len(outcomes)}/{len(cells)}]"
                    _print_line(f"{place} running  {'; '.join(names)}", end="\r")
                while running and not stop.received and not wait(list(running), _POLL):
                    pass
                for connection in [one for one in running if one.poll()]:
                    number, process = running[connection]
                    try:
                        outcome: Outcome = connection.recv()
                        process.join()
                    except EOFError:
                        process.join()
                        outcome = Outcome("FAILED", f"its process ended with {process.exitcode}")
                    del running[connection]
                    places.free(number)
                    outcomes[number] = outcome
                    if outcome.status == "ok":
                        pace.append(outcome.seconds / max(1.0, cells[number].seconds))
                        # checkpoints are large, and logs of passed cells not needed
                        name = f"{number + 1:03}-{cells[number].kind}"
                        shutil.rmtree(folder / name, ignore_errors=True)
                    _print_outcome(f"[{len(outcomes)}/{len(cells)}]", cells[number], outcome)
            how = "interrupted" if stop.received else f"ended {time.strftime('%Y-%m-%d %H:%M')}"
            for _, process in running.values():
                process.terminate()
            for number, process in running.values():
                process.join()
                waiting.append(number)
        finally:
            write(how)
    for number in left:
        print(f"left: {cells[number].kind}: {cells[number].name}")
    print(f"{_counted(outcomes.values()) or 'nothing has run'}; report: {folder / 'report.md'}")
    if left or waiting:
        again = f"--continue {folder / 'results.json'}"
        print(f"{len(left + waiting)} not run; {again} runs what has not passed")
    if stop.received:
        return 128 + stop.code()
    if not outcomes:
        return 2
    return 0 if all(outcome.status == "ok" for outcome in outcomes.values()) else 1


def _run_one(cell: Cell, folder: Path, results: Connection, parent: int) -> None:
    """A cell's own process, with which its commands end."""
    signal.set_wakeup_fd(-1)  # gpu_check's
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal; gpu_check sends SIGTERM
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    die_with_parent(parent, signal.SIGTERM)
    with contextlib.suppress(KeyboardInterrupt):
        results.send(run_cell(cell, folder))


def _print_outcome(place: str, cell: Cell, outcome: Outcome) -> None:
    status = f"{outcome.status:7} {outcome.seconds:4.0f} s"
    _print_line(f"{place} {status}  {cell.kind}: {cell.name}")
    for text in textwrap.wrap(outcome.text, _width() - 10):
        print(f"          {text}", flush=True)


def _print_line(text: str, end: str = "\n") -> None:
    """Print a line; on a terminal, over the line of running cells."""
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
    # in a subprocess: this process must not hold GPU memory while cells run
    command = [sys.executable, "-m", "benchmarks.gpu_check.machine"]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment())
    if done.returncode:
        raise OSError(f"torch does not start here: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _place(machine: Mapping[str, Any]) -> dict[str, Any]:
    """What produced the results: device, torch, NCCL, titanlike."""
    names = Counter(zip(machine["names"], machine["memory"], strict=True))
    gpus = ", ".join(f"{n} x {name} ({units.size(size)})" for (name, size), n in names.items())
    versions = {key: machine["versions"].get(key) or "none" for key in ("torch", "NCCL")}
    return {"device": gpus or "no GPU"} | versions | {"titanlike": own_version()}


def _write_report(
    path: Path,
    machine: Mapping[str, Any],
    cells: Sequence[Cell],
    outcomes: Mapping[int, Outcome],
    note: str,
) -> None:
    """outcomes: by cell number; note: the line below the title: when, how far."""
    place = _place(machine)
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items() if v)
    host = f"{platform.node()}, {os.cpu_count()} cores, {platform.platform()}"
    lines = ["# Check of this machine", "", note, "", f"- {place['device']}", f"- {host}"]
    lines += [
        f"- Python {platform.python_version()}, {versions}, titanlike {place['titanlike']}",
        "",
    ]
    left = len(cells) - len(outcomes)
    summary = f"**{_counted(outcomes.values()) or 'nothing has run yet'}**"
    lines += [summary + (f", {left} not run" if left else ""), ""]
    pairs = [(cell, outcomes.get(number)) for number, cell in enumerate(cells)]
    lines += _by_kind(place, pairs)
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


def _by_kind(place: Mapping[str, str], pairs: Sequence[tuple[Cell, Outcome | None]]) -> list[str]:
    """A table of what passed, by kind."""
    lines = [["device", "torch", "NCCL", "check", "passed", "not"]]
    for kind in dict.fromkeys(cell.kind for cell, out in pairs if out is not None):
        ran = [(cell, out) for cell, out in pairs if out is not None and cell.kind == kind]
        ok = [f"`{cell.name}`" for cell, out in ran if out.status == "ok"]
        bad = [f"`{cell.name}` ({out.status})" for cell, out in ran if out.status != "ok"]
        where = [place[key] for key in ("device", "torch", "NCCL")]
        lines.append([*where, kind, f"{len(ok)}: {', '.join(ok)}", ", ".join(bad)])
    return [*_markdown([lines[0], ["---"] * 6, *lines[1:]]), ""] if lines[1:] else []


def _table(kind: str, rows: Sequence[tuple[Cell, Outcome | None]]) -> list[str]:
    speed = kind == "speed"
    head = ["tokens/s", "a device", "MFU", "step", "memory", "of a plain loop's"] if speed else []
    lines = [["cell", "", "seconds", *head, *([] if speed else ["what was found"])]]
    lines.append(["---"] * len(lines[0]))
    for cell, outcome in rows:
        if outcome is None:
            cells = ["not run"]
        else:
            cells = [outcome.status, f"{outcome.seconds:.0f}"]
            figures = outcome.figures if speed else {}
            cells += _figures(figures) if figures else [outcome.text]
        line = [f"`{cell.name}`", *cells]
        lines.append([*line, *[""] * (len(lines[0]) - len(line))])
    return _markdown(lines)


def _markdown(lines: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in line) + " |"
        for line in lines
    ]


def _figures(figures: dict[str, Any]) -> list[str]:
    speed, mfu = figures["tokens_per_second"], figures["mfu"]
    each, step = speed / figures["devices"], figures["step_seconds"] * 1e3
    share = "" if mfu is None else f"{mfu:.1%}"
    memory = units.size(figures["memory_bytes"])
    ratio = figures.get("ratio")
    beside = f"{ratio:.3f}" if ratio else ""
    return [f"{speed:,.0f}", f"{each:,.0f}", share, f"{step:,.0f} ms", memory, beside]
