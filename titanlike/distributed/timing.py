"""When work was done, on one clock for all ranks.

A CPU's work is timed by the host's clock. A device's is timed by events in its queue, which its own
clock stamps; they are laid on the host's by one point that both know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from titanlike.launch.device_queue import DeviceQueue
from titanlike.torch_private.fsdp import exchanges_told

_ROUNDS = 16


class Clock:
    """Marks of one rank's work. On a device a mark is an event behind what is launched so far."""

    def __init__(self, device: torch.device) -> None:
        """Waits once until a device has done what is launched so far."""
        self._device = device
        self._zero: Any = None
        if device.type != "cpu":
            self._zero = self._event()
            torch.accelerator.synchronize(device)
        self._host_zero = time.perf_counter()

    def mark(self) -> Any:
        return time.perf_counter() if self._zero is None else self._event()

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Of this host's clock (`time.perf_counter`), once the device has come to the last mark."""
        if self._zero is None:
            return [*marks]
        return [self._host_zero + self._zero.elapsed_time(mark) / 1e3 for mark in marks]

    def _event(self) -> Any:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event


def clock_offset(rank: int, world_size: int) -> tuple[float, float]:
    """(seconds by which this host's clock is ahead of rank 0's, the most that this may be wrong).

    Collective. Every rank enters an all-reduce before any leaves it: so rank 0 entered before this
    rank left, and this one before rank 0 left. Each such round gives a lower and an upper bound.
    """
    low, high = float("-inf"), float("inf")
    if world_size == 1:
        return 0.0, 0.0
    flag = torch.zeros(1)
    for _ in range(_ROUNDS):
        entered = time.perf_counter()
        dist.all_reduce(flag)
        left = time.perf_counter()
        # rank 0's times of this round; of the CPU, so by gloo whatever the device
        zeros = torch.tensor([entered, left], dtype=torch.float64)
        dist.broadcast(zeros, 0)
        entered_0, left_0 = zeros.tolist()
        low, high = max(low, entered - left_0), min(high, left - entered_0)
    return (0.0, 0.0) if rank == 0 else ((low + high) / 2, (high - low) / 2)


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


def device_queue(device: torch.device) -> DeviceQueue | None:
    """The queue of an accelerator's current stream; None for the CPU, which has none."""
    if device.type == "cpu":
        return None
    return DeviceQueue(partial(torch.Event, device), partial(_select, device))


def _select(device: torch.device) -> None:
    torch.accelerator.set_device_index(device.index)  # each thread has a current device of its own
