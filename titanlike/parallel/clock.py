"""When work was done, on one clock for all ranks.

A CPU's work is timed by the host's clock. A device's is timed by events in its queue, which its own
clock stamps; they are laid on the host's by one point that both know.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

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
