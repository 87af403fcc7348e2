"""How far a device is in what its training thread has put into its queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Event

# Marks of a queue that is not read: then the oldest are kept, which tell what hangs. A step has a
# few hundred, of 0.5 KB
_MOST_MARKS = 8192


class Mark(NamedTuple):
    """A place in a device's queue."""

    number: int  # counts up from 0
    step: int
    phase: str
    action: Any
    received: bool  # before the action, once what it waits for from others has arrived; else after
    event: Event


class DeviceQueue:
    """What a device has done of what its training thread has put into its queue.

    A GPU's work is queued by Python and done later: Python has long gone through a step's schedule
    when the GPU hangs in its second action. So after each action an event is put into the queue,
    and the first event that has not come to pass tells the action. On a CPU work is done when it is
    called, and there is no queue. The marks are made in one thread and read in others.
    """

    def __init__(
        self, new_event: Callable[[], Event], enter_thread: Callable[[], None] = lambda: None
    ) -> None:
        """enter_thread: called in each thread that reads, before it does: selects the device."""
        self._new_event, self.enter_thread = new_event, enter_thread
        self._marks: deque[Mark] = deque()
        self._free: list[Event] = []  # events are used again
        self._made = 0

    def mark(self, step: int, phase: str, action: Any, received: bool = False) -> None:
        """Put a mark behind all that is in the queue now. Takes a few microseconds."""
        while self._marks and self._marks[0].event.query():
            self._free.append(self._marks.popleft().event)
        if len(self._marks) == _MOST_MARKS:
            return
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        self._marks.append(Mark(self._made, step, phase, action, received, event))
        self._made += 1

    def first_unfinished(self) -> Mark | None:
        """The first mark that the device has not come to; None where it has done all."""
        while True:
            try:
                marks = tuple(self._marks)
            except RuntimeError:  # changed meanwhile
                continue
            mark = next((mark for mark in marks if not mark.event.query()), None)
            if mark is None:
                return None
            if self._marks and self._marks[0].number <= mark.number:
                return mark
            # it was done meanwhile, and its event stands for a later place now
