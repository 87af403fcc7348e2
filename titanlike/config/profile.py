"""The keys `profile` and `timeline`: what is recorded of a few steps of a run, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titanlike.config.keys import key


@dataclass
class NoProfile:
    """Nothing is recorded."""

    name: str = key("none", "choice")


@dataclass
class MemoryProfile(NoProfile):
    """What is allocated and freed: a snapshot of a GPU's memory, on a CPU a trace with a curve."""

    name: str = key("memory", "choice")
    steps: list[int] = key([10, 12], "first and last step that are recorded")
    ranks: list[int] = key(
        [], "ranks that write a file: [0,8]; [] = the first rank of each pipeline rank"
    )


@dataclass
class TraceProfile(MemoryProfile):
    """When each operator, kernel and action of the schedule began and ended, for Perfetto."""

    name: str = key("trace", "choice")
    stacks: bool = key(False, "Python's functions, too: slower, and larger files")


def profile_folder(run_dir: str | Path) -> Path:
    """Where the files of all ranks are."""
    return Path(run_dir) / "profile"


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


def timeline_folder(run_dir: str | Path) -> Path:
    """Where each rank writes a file, before rank 0 merges them."""
    return Path(run_dir) / "timeline"
