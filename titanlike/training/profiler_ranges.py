"""Steps, their phases and the actions of the schedule as named ranges that torch's profiler shows."""

from __future__ import annotations

from typing import Any

from torch.profiler import record_function

from titanlike.launch.action_words import read_action


class ProfilerRanges:
    """A `Listener`."""

    def __init__(self) -> None:
        # of the step, its phase, the action; outermost first
        self._open: list[record_function] = []

    def start_step(self, step: int) -> None:
        """A step's first phase is its data."""
        self._enter(0, f"step {step}")
        self._enter(1, "data")

    def begin(self, phase: str) -> None:
        self._enter(1, phase)

    def start_action(self, action: Any) -> None:
        if action is None:
            self._leave(2)
        else:
            self._enter(2, action_name(action))

    def action_queued(self, action: Any, received: bool) -> None:
        """Kernels tell."""

    def close(self) -> None:
        self._leave(0)

    def _enter(self, depth: int, name: str) -> None:
        self._leave(depth)
        self._open.append(record_function(name))
        self._open[-1].__enter__()

    def _leave(self, depth: int) -> None:
        while len(self._open) > depth:
            self._open.pop().__exit__(None, None, None)


def action_name(action: Any) -> str:
    """1F3 -> "forward stage 1 microbatch 3"."""
    found = read_action(str(action))
    if found is None:
        return str(action)
    words, stage, microbatch = found
    return f"{words} stage {stage}" + (f" microbatch {microbatch}" if microbatch else "")
