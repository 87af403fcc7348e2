"""The group `profile`: a few steps of a run recorded in detail, into run_dir/profile."""

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
