"""Ends a run that hangs, and says where each rank was."""

from __future__ import annotations

from typing import Any

from titanlike.config.schema import Launch
from titanlike.launch.worker import Worker


class Watchdog:
    """Watches this rank's progress while it is entered."""

    def __init__(self, worker: Worker, settings: Launch) -> None:
        self._worker, self._settings = worker, settings

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def at(self, step: int, doing: str, patience: float | None = None) -> None:
        """This rank begins something else; it may take `patience` seconds (step_timeout)."""

    def act(self, action: Any) -> None:
        """This rank begins an action of the schedule (its text is made only when it is shown)."""
