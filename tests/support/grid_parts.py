"""`pytest -m grid --part 3/9`: a part of the tests that .ci/run leaves out, and a note of what ran.

Tests are dealt in turn, so that each part has a share of every table. What a part found is kept in
`.grid.json` beside pyproject.toml (not in the repository): by commit, part, tests and seconds. Each
run ends with the parts of this commit that are still to be run.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT

NOTES = ROOT / ".grid.json"


def parse_part(text: str) -> tuple[int, int]:
    """'3/9' -> (3, 9). Raises UsageError."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--part {text}: write a part and their number, as in --part 3/9")
    return int(number), int(count)


def deal(items: list[Any], part: tuple[int, int]) -> tuple[list[Any], list[Any]]:
    """The items of a part, and all others; in turn, so that parts differ by one item at most."""
    number, count = part
    mine = items[number - 1 :: count]
    return mine, [item for at, item in enumerate(items) if at % count != number - 1]


class GridPart:
    """Chooses the tests of a part; writes down what it found."""

    def __init__(self, part: tuple[int, int], notes: Path = NOTES) -> None:
        self.part, self.notes, self.begin = part, notes, time.time()

    @pytest.hookimpl(trylast=True)  # of those that -m has chosen
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        items[:], others = deal(items, self.part)
        config.hook.pytest_deselected(items=others)

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if hasattr(config, "workerinput") or config.option.collectonly:
            return
        stats = terminalreporter.stats
        failed = sorted({r.nodeid for key in ("failed", "error") for r in stats.get(key, [])})
        note = {
            "commit": commit(),
            "part": "/".join(map(str, self.part)),
            "passed": len(stats.get("passed", [])),
            "skipped": len(stats.get("skipped", [])),
            "failed": failed,
            "seconds": round(time.time() - self.begin),
        }
        terminalreporter.write_line(record(note, self.notes))


def record(note: dict[str, Any], path: Path) -> str:
    """Add a part's outcome to the notes; a line about the parts that this commit still needs."""
    notes = json.loads(path.read_text()) if path.exists() else []
    same = {key: note[key] for key in ("commit", "part")}
    notes = [old for old in notes if {key: old[key] for key in same} != same] + [note]
    path.write_text("\n".join(["[", ",\n".join(map(json.dumps, notes)), "]"]) + "\n")
    count = int(note["part"].partition("/")[2])
    done = {old["part"] for old in notes if old["commit"] == note["commit"] and not old["failed"]}
    left = [str(n) for n in range(1, count + 1) if f"{n}/{count}" not in done]
    text = f"still to pass: parts {', '.join(left)}" if left else "all parts have passed"
    return f"grid at {note['commit']}, of {count} parts: {text} ({path.name})"


def commit() -> str:
    """The checkout's commit, with `+` if files have been changed since."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "?") + "+" * bool(git("status", "--porcelain"))
