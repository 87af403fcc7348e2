"""The keys `timeline`: a few steps of a run as they were computed, rank by rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titanlike.config.errors import Problem
from titanlike.config.keys import key

TIMELINE = "timeline.json"  # in the directory of a run
_FIRST = 11  # of the steps by default: what compiles and allocates is over


@dataclass
class Timeline:
    """When each rank computed, waited and exchanged, beside the plan (tools/timeline.py)."""

    enabled: bool = key(False, "record; timeline=true is short for timeline.enabled=true")
    steps: list[int] = key(
        [], "first and last step that are recorded: [10,11]; [] = two after ten, or the last two"
    )

    def window(self, last: int) -> tuple[int, int]:
        """The first and the last step that are recorded, in a run of `last` steps."""
        if self.steps:
            return self.steps[0], self.steps[1]
        first = max(1, min(_FIRST, last - 1))
        return first, min(last, first + 1)


def timeline_problems(timeline: Timeline, last: int) -> Iterator[Problem]:
    """Steps that a run of `last` steps does not have."""
    steps, reason = timeline.steps, ""
    if not steps:
        return
    if len(steps) != 2:
        reason = "must be two numbers: the first and the last step that are recorded"
    elif steps[0] < 1:
        reason = "the first step of a run is 1"
    elif steps[1] < steps[0]:
        reason = "the last step is before the first"
    elif steps[1] > last:
        reason = f"the run ends with step {last}"
    elif steps[1] - steps[0] >= 100:
        reason = "has more than 100 steps"
    if reason:
        first, end = Timeline().window(max(1, last))
        yield Problem("timeline.steps", steps, reason, f"timeline.steps=[{first},{end}]")


def timeline_folder(run_dir: str | Path) -> Path:
    """Where each rank writes a file, before rank 0 merges them."""
    return Path(run_dir) / "timeline"
