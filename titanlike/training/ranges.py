"""What a rank does, as named ranges that profilers show: phases of a step, actions of the schedule.

Ranges of a step follow one another, so one call names the next and ends the one before. Actions of
the schedule lie inside them; the pipeline calls back for those only while ranges are on.
"""

from __future__ import annotations

from typing import Any

from torch.profiler import record_function

from titanlike.launch.action_words import read_action


class Ranges:
    """Off, a call costs a comparison."""

    def __init__(self) -> None:
        self._on = False
        self._open: list[
            record_function
        ] = []  # of the step, its phase, the action; outermost first

    def begin(self, phase: str) -> None:
        """The next phase of a step begins."""
        if self._on:
            self._enter(1, phase)

    def start_step(self, step: int) -> None:
        """Ranges are on from here; a step's first phase is its data."""
        self._on = True
        self._enter(0, f"step {step}")
        self._enter(1, "data")

    def start_action(self, action: Any) -> None:
        """An action of the schedule begins; None: all are done."""
        if action is None:
            self._leave(2)
        else:
            self._enter(2, action_name(action))

    def stop(self) -> None:
        """Ranges are off from here."""
        self._leave(0)
        self._on = False

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
