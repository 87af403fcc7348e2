"""How long a rank of several works in a step: all of it but what it waits for others.

On a CPU these are waits for messages, for gathers and reductions, and for all ranks to agree. A device
waits in its queue: between events before and after a wait for a message, a gather or a reduction of a
whole stage, or an agreement. Gathers of single blocks (ZeRO 2 and 3) go beside what a device computes,
and are not told there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from titanlike.torch_private.fsdp import exchanges_told

_AGREE = ("forward and backward", "agree")  # phases that begin with a sum over all ranks
_COLLECTIVE = ("UNSHARD", "REDUCE_GRAD")  # actions that are an exchange as a whole
_COMPUTED = ("F", "B", "I")


class BusyTime:
    """A listener of `training/build.py`, on each rank."""

    def __init__(self, device: torch.device, groups: Iterable[Any]) -> None:
        """groups: of FSDP, see `parameter_groups`."""
        self._on_cpu = device.type == "cpu"
        self._now: Callable[[], Any] = time.perf_counter if self._on_cpu else self._event
        self._device = device
        self._waits: list[tuple[Any, Any]] = []  # begin and end, of this step
        self._before: list[tuple[Any, Any]] = []  # of the step before
        self._begun: Any = None  # a wait, perhaps
        self._receiving: set[Any] = set()  # actions that wait for a message
        self._inside = 0  # exchanges that call each other
        if self._on_cpu:
            exchanges_told(groups, self._exchange)

    def waited(self) -> float:
        """Seconds of this step, of a device: of the step before, whose numbers have arrived. Asked once
        a step."""
        self._close()
        waits, self._waits = self._waits, []
        if self._on_cpu:
            return sum(end - begin for begin, end in waits)
        waits, self._before = self._before, waits
        return sum(begin.elapsed_time(end) for begin, end in waits) / 1e3

    def begin(self, phase: str) -> None:
        self._close()
        if phase == _AGREE[0]:
            self._waits = []  # a step begins: those of a validation before it are none of its
        if phase in _AGREE:
            self._begun = self._now()

    def start_action(self, action: Any) -> None:
        self._close()
        if action is None:
            return
        kind = action.computation_type
        if kind.name in _COLLECTIVE or (kind.value in _COMPUTED and action in self._receiving):
            self._begun = self._now()

    def action_queued(self, action: Any, received: bool) -> None:
        if received:
            self._receiving.add(action)
            self._close()
        elif action.computation_type.name in _COLLECTIVE:
            self._close()
        else:
            self._begun = None

    def _exchange(self, kind: str) -> None:
        if kind:
            if not self._inside and self._begun is None:
                self._begun = self._now()
            self._inside += 1
        else:
            self._inside -= 1
            if not self._inside:
                self._close()

    def _close(self) -> None:
        if self._begun is not None:
            self._waits.append((self._begun, self._now()))
            self._begun = None

    def _event(self) -> Any:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event
