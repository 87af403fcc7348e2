"""The report of gpu_check: a Markdown file that is whole after every cell."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlike.config.files import atomic_write_text
from titanlike.metrics import units
from titanlike.proof.gpu_cells import Outcome
from titanlike.proof.gpu_plan import KINDS, Cell

_TITLES = {
    "verify": "Against one process in plain torch",
    "determinism": "Two runs are equal",
    "hangs": "A rank that hangs is named in time",
    "kills": "A rank that is killed costs nothing",
    "resumes": "What one layout saves another continues",
    "speed": "Speed and memory",
}


def describe_machine() -> dict[str, Any]:
    """Versions, names and bytes of memory of the GPUs. Raises RuntimeError if torch fails here."""
    # in a process of its own: this one must not hold memory on a GPU while cells run
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.getenv("PYTHONPATH")]))
    program = "from titanlike.device.memory import print_machine; print_machine()"
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"torch does not start here: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def write_report(
    path: Path,
    machine: dict[str, Any],
    cells: Sequence[Cell],
    outcomes: Sequence[Outcome],
    note: str,
) -> None:
    """outcomes: of the first cells. note: the line below the title: when, how far."""
    lines = ["# Check of this machine", "", note, "", *_machine(machine), ""]
    counts = Counter(outcome.status for outcome in outcomes)
    left = len(cells) - len(outcomes)
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    lines += [f"**{summary or 'nothing has run yet'}**" + (f", {left} not run" if left else ""), ""]
    pairs = [*zip(cells, outcomes, strict=False)]
    for kind in KINDS:
        rows = [(cell, outcome) for cell, outcome in pairs if cell.kind == kind]
        waiting = [cell for cell in cells[len(outcomes) :] if cell.kind == kind]
        if rows or waiting:
            lines += [f"## {_TITLES[kind]}", "", *_table(kind, rows, waiting), ""]
    failed = [(cell, outcome) for cell, outcome in pairs if outcome.status != "ok"]
    if failed:
        lines += ["## What failed", ""]
    for cell, outcome in failed:
        lines += [f"### {cell.kind}: {cell.name}", "", f"{outcome.status}: {outcome.text}", ""]
        lines += ["```sh", outcome.command, "```", ""]
        if outcome.output:
            lines += ["```text", outcome.output.replace("```", "'''").strip(), "```", ""]
    atomic_write_text(path, "\n".join(lines).rstrip() + "\n")


def _machine(machine: dict[str, Any]) -> list[str]:
    names = Counter(zip(machine["names"], machine["memory"], strict=True))
    gpus = ", ".join(f"{n} x {name} ({units.size(size)})" for (name, size), n in names.items())
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items() if v)
    host = f"{platform.node()}, {os.cpu_count()} cores, {platform.platform()}"
    python = platform.python_version()
    return [f"- {gpus or 'no GPU'}", f"- {host}", f"- Python {python}, {versions}"]


def _table(kind: str, rows: Sequence[tuple[Cell, Outcome]], waiting: Sequence[Cell]) -> list[str]:
    header = ["cell", "", "seconds", "what was found"]
    lines = []
    if kind == "speed":
        header = ["cell", "", "tokens/s", "a device", "MFU", "step", "memory", "seconds"]
    for cell, outcome in rows:
        start = [f"`{cell.name}`", outcome.status]
        if kind != "speed":
            lines.append([*start, f"{outcome.seconds:.0f}", outcome.text])
        elif not (figures := outcome.figures):
            lines.append([*start, outcome.text, *[""] * 4, f"{outcome.seconds:.0f}"])
        else:
            speed, mfu = figures["tokens_per_second"], figures["mfu"]
            lines.append(
                [
                    *start,
                    f"{speed:,.0f}",
                    f"{speed / figures['devices']:,.0f}",
                    "" if mfu is None else f"{mfu:.1%}",
                    f"{figures['step_seconds'] * 1e3:,.0f} ms",
                    units.size(figures["memory_bytes"]),
                    f"{outcome.seconds:.0f}",
                ]
            )
    lines += [[f"`{cell.name}`", "not run", *[""] * (len(header) - 2)] for cell in waiting]
    shown = [header, ["---"] * len(header), *lines]
    return [
        "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in r) + " |" for r in shown
    ]
