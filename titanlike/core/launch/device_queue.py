"""Track how far a device has executed the work that its training thread has queued."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Event

# Limit of marks. Beyond it new ones are dropped, since the oldest show what hangs. A step has a few
# hundred, of 0.5 KB each
_MOST_MARKS = 8192


class Mark(NamedTuple):
    """A position in a device's queue."""

    number: int  # counts up from 0
    step: int
    phase: str
    action: Any
    received: bool  # True: before the action, once its inputs have arrived; False: after the action
    event: Event


class DeviceQueue:
    """The progress of a device through the work that its training thread has queued.

    GPU work is asynchronous: Python may have queued a full step when the GPU hangs in its second
    action. So an event is recorded after each action, and the first event that is not complete
    tells the action. A CPU has no queue. Marks are made in one thread and read in others.
    """

    def __init__(
        self, new_event: Callable[[], Event], enter_thread: Callable[[], None] = lambda: None
    ) -> None:
        """enter_thread: called once in each reading thread before it reads; selects the device."""
        self._new_event, self.enter_thread = new_event, enter_thread
        self._marks: deque[Mark] = deque()
        self._free: list[Event] = []  # events to reuse
        self._made = 0

    def mark(self, step: int, phase: str, action: Any, received: bool = False) -> None:
        """Record a mark behind all work queued so far. Takes a few microseconds."""
        while self._marks and self._marks[0].event.query():
            self._free.append(self._marks.popleft().event)
        if len(self._marks) == _MOST_MARKS:
            return
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        self._marks.append(Mark(self._made, step, phase, action, received, event))
        self._made += 1

    def first_unfinished(self) -> Mark | None:
        """The first mark that the device has not reached; None if it has finished everything."""
        while True:
            try:
                marks = tuple(self._marks)
            except RuntimeError:  # the other thread has changed the deque
                continue
            mark = next((mark for mark in marks if not mark.event.query()), None)
            if mark is None:
                return None
            if self._marks and self._marks[0].number <= mark.number:
                return mark
            # it completed meanwhile, and its event was reused for a later mark
