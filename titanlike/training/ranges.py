"""What a rank does, told to profiles and timelines: phases of a step, actions of the schedule.

Ranges of a step follow one another, so one call names the next and ends the one before. Actions of
the schedule lie inside them; the pipeline calls back for those only while somebody listens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from titanlike.pipeline.pipeline import Pipeline


class Listener(Protocol):
    def begin(self, phase: str) -> None:
        """The next phase of a step begins."""

    def start_action(self, action: Any) -> None:
        """An action of the schedule begins; None: all are done."""

    def action_queued(self, action: Any, received: bool) -> None:
        """A computation, gather or reduction has been launched; received: the messages that it
        waits for have been, not it."""


class Ranges:
    """With no listener, a call costs a comparison."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._pipeline: Pipeline | None = None
        self._always: Callable[[Any], None] = lambda _: None
        self._always_queued: Callable[[Any, bool], None] | None = None

    def connect(
        self,
        pipeline: Pipeline,
        start_action: Callable[[Any], None],
        action_queued: Callable[[Any, bool], None] | None,
    ) -> None:
        """The pipeline calls these back, whoever listens; action_queued: None = nobody need know."""
        self._pipeline, self._always, self._always_queued = pipeline, start_action, action_queued
        self._call_back()

    def begin(self, phase: str) -> None:
        """The next phase of a step begins."""
        for listener in self._listeners:
            listener.begin(phase)

    def add(self, listener: Listener) -> None:
        self._listeners += (listener,)
        self._call_back()

    def remove(self, listener: Listener) -> None:
        """Does nothing for one that does not listen."""
        self._listeners = tuple(each for each in self._listeners if each is not listener)
        self._call_back()

    def _call_back(self) -> None:
        if self._pipeline is not None:
            heard = bool(self._listeners)
            self._pipeline.on_action(self._start_action if heard else self._always)
            self._pipeline.on_queued(self._action_queued if heard else self._always_queued)

    def _start_action(self, action: Any) -> None:
        self._always(action)
        for listener in self._listeners:
            listener.start_action(action)

    def _action_queued(self, action: Any, received: bool) -> None:
        if self._always_queued is not None:
            self._always_queued(action, received)
        for listener in self._listeners:
            listener.action_queued(action, received)
