"""The keys `profile` and `timeline`: what is recorded of a few steps of a run, rank by rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titanlike.config.errors import Problem
from titanlike.config.files import check_writable
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


def profile_problems(profile: NoProfile, last: int, world_size: int) -> Iterator[Problem]:
    """Steps and ranks that a run of `last` steps does not have."""
    if not isinstance(profile, MemoryProfile):
        return
    steps, fit = profile.steps, f"profile.steps=[{max(1, min(10, last - 2))},{min(12, last)}]"
    reason = ""
    if len(steps) != 2:
        reason = "must be two numbers: the first and the last step that are recorded"
    elif steps[0] < 1:
        reason = "the first step of a run is 1"
    elif steps[1] < steps[0]:
        reason, fit = "the last step is before the first", f"profile.steps=[{steps[1]},{steps[0]}]"
        if not 1 <= steps[1] <= steps[0] <= last:
            fit = f"profile.steps=[{max(1, last - 2)},{last}]"
    elif steps[1] > last:
        reason = f"the run ends with step {last}"
    if reason and last >= 1:
        yield Problem("profile.steps", steps, reason, fit)
    for rank in profile.ranks:
        if not 0 <= rank < world_size:
            reason = f"there is no rank {rank}: the run has ranks 0 to {world_size - 1}"
            known = sorted({rank for rank in profile.ranks if 0 <= rank < world_size})
            fixed = f"[{','.join(map(str, known or [0]))}]"
            yield Problem("profile.ranks", profile.ranks, reason, f"profile.ranks={fixed}")
            return


def folder_problem(profile: NoProfile, run_dir: str) -> Problem | None:
    """Whether the folder of the files can be written."""
    folder = profile_folder(run_dir)
    if isinstance(profile, MemoryProfile):
        try:
            check_writable(folder)
        except OSError as error:
            reason = f"{folder} cannot be written: {error.strerror}"
            return Problem("profile", profile.name, reason, "profile=none")
    return None


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
