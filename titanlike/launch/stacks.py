"""Where the ranks of a command stand, asked from outside: SIGURG makes a rank write the stacks of its
threads into its log. Nobody else needs that signal, and a process that does not know it ignores it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

STACKS = signal.SIGURG
_ANSWER = 1.0  # seconds in which a process that can answer does
_FRAMES = 8  # of a rank's stack that are shown, innermost


@dataclass(frozen=True)
class _Look:
    log: str  # of the rank that answered; "" = none did
    stack: str  # of its main thread
    state: str  # of Linux: R runs, S waits, T is stopped
    cpu: float  # seconds so far


def where_ranks_stand(root: int, run_dir: Path, between: float = 5.0) -> tuple[str, str]:
    """(whether it is slow or stuck, the stacks) of the ranks that a process has started, or is, by
    two looks so many seconds apart; none answers before it has started, or without
    Linux' /proc."""
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
    """Return, by process id, what each process with a handler of the signal answers. They are asked
    one at a time, since a rank's children write into its log."""
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
    """The name of the log in which a process answers, and the stack of its main thread."""
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
            if stack and stack == before:  # whole
                frames = [line for line in stack.splitlines() if line.startswith("  File ")]
                return path.name, "\n".join(frames[:_FRAMES])
            before = stack or before
    return "", ""
