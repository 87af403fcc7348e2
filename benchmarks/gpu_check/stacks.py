"""Find out from outside where the ranks of a command are: on SIGURG a rank writes the stacks of its
threads to its log. Nothing else uses that signal, and processes without a handler ignore it."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from titanlike.core.launch.signals import STACKS

_ANSWER = 1.0  # seconds to wait for a process' stacks
_FRAMES = 8  # innermost frames shown of a rank's stack


@dataclass(frozen=True)
class _Look:
    log: str  # name of the rank's log; "" = it did not answer
    stack: str  # the main thread's
    state: str  # Linux' process state: R runs, S waits, T is stopped
    cpu: float  # seconds of CPU time so far


def where_ranks_stand(root: int, run_dir: Path, between: float = 5.0) -> tuple[str, str]:
    """Compare two looks at the ranks, `between` seconds apart; returns (slow or stuck, stacks).

    root: the process that launched the ranks, or is the only one. Ranks do not answer before they
    have started, or without Linux' /proc.
    """
    first = _look(root, run_dir)
    time.sleep(between if first else 0)
    second = _look(root, run_dir)
    rows, moved = [], []
    for pid in sorted(first.keys() & second.keys(), key=lambda pid: (second[pid].log, pid)):
        a, b = first[pid], second[pid]
        name = b.log.removesuffix(".log").replace("rank", "rank ") or "a process"
        moved += [name] * (a.stack != b.stack)
        how = "stands still" if a.stack == b.stack else "moved on"
        if not b.stack:
            how = "is stopped" if b.state == "T" else "did not answer"
        cpu = f"{b.cpu - a.cpu:.1f} s of CPU in {between:.0f} s"
        rows += [f"{name} (pid {pid}) {how}, {cpu}", b.stack]
    if not rows:
        return "no rank answers", ""
    used = sum(second[pid].cpu - first[pid].cpu for pid in first.keys() & second.keys())
    busy = f"its ranks used {used:.1f} s of CPU in {between:.0f} s"
    text = f"slow: {', '.join(moved)} moved on" if moved else f"stuck, or in one long call: {busy}"
    return text, "\n".join(filter(None, rows))


def _look(root: int, run_dir: Path) -> dict[int, _Look]:
    """Ask each process under `root` that handles the signal for its stack; by process id. One at a
    time, since a rank's children write to the same log."""
    parents: dict[int, int] = {}
    facts = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            caught = re.search(r"SigCgt:\s*(\w+)", (folder / "status").read_text())
            parents[int(folder.name)] = int(fields[1])
            if caught and int(caught[1], 16) >> (STACKS - 1) & 1:
                cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                facts[int(folder.name)] = fields[0], cpu
    looks = {}
    for pid in facts:
        above = pid
        while above not in (root, 0):
            above = parents.get(above, 0)
        if above:
            with contextlib.suppress(OSError):
                looks[pid] = _Look(*_asked(pid, run_dir), *facts[pid])
    return looks


def _asked(pid: int, run_dir: Path) -> tuple[str, str]:
    """Return (name of the log in which a process answers, stack of its main thread)."""
    sizes = {path: path.stat().st_size for path in run_dir.rglob("rank*.log")}
    os.kill(pid, STACKS)
    deadline, before = time.monotonic() + _ANSWER, ""
    while time.monotonic() < deadline:
        time.sleep(0.1)
        for path, size in sizes.items():
            with open(path, encoding="utf-8", errors="replace") as file:
                file.seek(size)
                # the main thread is the last, as it is the oldest
                *_, stack = file.read().rpartition(" (most recent call first):\n")
            if stack and stack == before:  # unchanged, so completely written
                frames = [line for line in stack.splitlines() if line.startswith("  File ")]
                return path.name, "\n".join(frames[:_FRAMES])
            before = stack or before
    return "", ""
