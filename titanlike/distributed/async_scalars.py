"""Numbers that leave the device while it computes on, and the time that it takes.

A host that reads a number of a device waits until everything that it launched is done, and the device
then waits for the host to launch more. So numbers are sent off, and read when the next step has been
launched: on a device by a copy into pinned memory on a stream of its own, on the CPU by a message
that gloo's thread completes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.distributed.mesh import Mesh


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on the device, which is not waited for: only pinned memory is copied so."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Late:
    """Sends numbers of this rank's device to the host."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        # a copy that waits for a message must not hold up the stream that computes
        self._stream = None if mesh.device.type == "cpu" else torch.Stream(mesh.device)

    def send(self, numbers: Sequence[Tensor], largest: Sequence[float]) -> Sent:
        """Send fp32 scalars of the device, the same on all ranks, and numbers of the host, of which
        the largest of all ranks is wanted. Collective; waits neither for the device nor for ranks."""
        mesh = self._mesh
        host = on_device(torch.tensor(largest, dtype=torch.float32), mesh.device)
        all_ = torch.cat([torch.stack([*numbers]), host])
        work = None
        if mesh.world_size > 1:
            work = dist.all_reduce(all_, op=dist.ReduceOp.MAX, async_op=True)
        if self._stream is None:
            return Sent(all_, work, None)
        current = torch.accelerator.current_stream(mesh.device)
        pinned = torch.empty(all_.shape, dtype=all_.dtype, pin_memory=True)
        self._stream.wait_stream(current)
        with self._stream:
            if work is not None:
                work.wait()  # the stream does
            pinned.copy_(all_, non_blocking=True)
        arrived = self._stream.record_event()
        return Sent(pinned, None, arrived, kept=all_)


class Sent:
    """Numbers on their way."""

    def __init__(
        self, numbers: Tensor, work: Any, arrived: Any, kept: Tensor | None = None
    ) -> None:
        """work: of gloo, that completes them; arrived: the event on a device that does; kept: what is
        copied, and must not be freed before."""
        self._numbers, self._work, self._arrived, self._kept = numbers, work, arrived, kept

    def read(self, timeout: float | None = None) -> list[float] | None:
        """The numbers in the order in which they were sent; waits for them.

        timeout: seconds, after which the result is None; without it that of the process group holds.
        """
        if self._work is not None:
            if timeout is None:
                self._work.wait()
            else:
                try:
                    self._work.wait(timedelta(seconds=timeout))
                except RuntimeError:
                    return None
        elif self._arrived is not None:
            end = None if timeout is None else time.monotonic() + timeout
            while end is not None and not self._arrived.query():
                if time.monotonic() > end:
                    return None
                time.sleep(0.01)
            self._arrived.synchronize()
        self._work = self._arrived = self._kept = None
        return self._numbers.tolist()


class Timer:
    """Seconds of this rank's work between two points: of the device by its own clock."""

    def __init__(self, device: torch.device) -> None:
        """The first point is now, for a device: after what is launched so far."""
        self._device = device
        self._begin = self._now()

    def stop(self) -> None:
        """The second point is now."""
        self._end = self._now()

    def seconds(self) -> float:
        """After `stop`, once the device has come that far, e.g. because numbers sent later arrived."""
        if self._device.type == "cpu":
            return self._end - self._begin
        return self._begin.elapsed_time(self._end) / 1e3

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event
