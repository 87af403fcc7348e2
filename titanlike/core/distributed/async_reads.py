"""Asynchronous reads from the device: step metrics, and timings.

To read a value (`.item()`) the host waits for everything it has launched, and the device then idles
until the host launches more. So metrics are copied asynchronously and read when the next step has
been launched: on a GPU by a copy into pinned memory on a side stream, on the CPU by an async
all-reduce that gloo's thread completes.

CPU work is timed by the host's clock; GPU work by events, whose times are converted to the host's
clock by one point that is known in both.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.core.distributed.mesh import Mesh

if TYPE_CHECKING:
    from titanlike.core.launch.device_queue import DeviceQueue


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device without synchronizing, which needs pinned memory."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class AsyncScalars:
    """Copies scalars from this rank's device to the host asynchronously, reduced over all ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        # a copy that waits for a message must not hold up the stream that computes
        self._stream = None if mesh.device.type == "cpu" else torch.Stream(mesh.device)

    def send(
        self, numbers: Mapping[str, Tensor], host: Mapping[str, float | list[float]]
    ) -> PendingScalars:
        """Start to reduce (max over all ranks; NaN may be lost) and copy fp32 scalars and vectors
        of the device, and numbers of the host; all ranks give the same names. Collective; waits
        neither for the device nor for other ranks."""
        mesh = self._mesh
        sizes = {name: len(value) if value.dim() else 0 for name, value in numbers.items()} | {
            name: len(value) if isinstance(value, list) else 0 for name, value in host.items()
        }
        flat = [x for v in host.values() for x in (v if isinstance(v, list) else [v])]
        on_host = on_device(torch.tensor(flat, dtype=torch.float32), mesh.device)
        all_ = torch.cat([*(value.view(-1) for value in numbers.values()), on_host])
        work = None
        if mesh.world_size > 1:
            work = dist.all_reduce(all_, op=dist.ReduceOp.MAX, group=mesh.everyone, async_op=True)
        if self._stream is None:
            return PendingScalars(sizes, all_, work, None)
        pinned = torch.empty(all_.shape, dtype=all_.dtype, pin_memory=True)
        self._stream.wait_stream(torch.accelerator.current_stream(mesh.device))
        with self._stream:
            if work is not None:
                work.wait()  # only the side stream waits
            pinned.copy_(all_, non_blocking=True)
        return PendingScalars(sizes, pinned, None, self._stream.record_event(), kept=all_)


@dataclass
class PendingScalars:
    """Scalars whose copy to the host is in flight."""

    sizes: Mapping[str, int]  # name -> length of a list, 0 for a scalar
    numbers: Tensor
    work: Any  # gloo's handle of the all-reduce
    arrived: Any  # on a GPU the event after the copy
    kept: Tensor | None = None  # the source of the copy, which must stay alive until then

    def read(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Wait for the values, and return the numbers and lists by name.

        timeout: seconds after which to return None; without it the process group's timeout
        applies.
        """
        if self.work is not None:
            if timeout is None:
                self.work.wait()
            else:
                try:
                    self.work.wait(timedelta(seconds=timeout))
                except RuntimeError:
                    return None
        elif self.arrived is not None:
            end = None if timeout is None else time.monotonic() + timeout
            while end is not None and not self.arrived.query():
                if time.monotonic() > end:
                    return None
                time.sleep(0.01)
            self.arrived.synchronize()
        self.work = self.arrived = self.kept = None
        left = iter(self.numbers.tolist())
        return {
            name: [next(left) for _ in range(size)] if size else next(left)
            for name, size in self.sizes.items()
        }


# --- times ---------------------------------------------------------------------------------------


def mark(device: torch.device) -> Any:
    """Record a timestamp; on a device, an event after everything launched so far."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Seconds between two `mark`s, once the device has reached both."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def device_queue(device: torch.device) -> DeviceQueue | None:
    """The queue of an accelerator's current stream; None for the CPU, which has none."""
    if device.type == "cpu":
        return None
    from titanlike.core.launch.device_queue import DeviceQueue

    # each thread has a current device of its own
    select = partial(torch.accelerator.set_device_index, device.index)
    return DeviceQueue(partial(torch.Event, device), select)
