"""What a host reads of a device that computes on: numbers, and when work was done.

A host that waits for a number of a device waits until everything that it launched is done, and the
device then waits for the host to launch more. So numbers are sent off, and read when the next step
has been launched: on a device by a copy into pinned memory on a stream of its own, on the CPU by a
message that gloo's thread completes.

A CPU's work is timed by the host's clock. A device's is timed by events in its queue, which its own
clock stamps; they are laid on the host's by one point that both know.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.distributed.mesh import Mesh

if TYPE_CHECKING:
    from titanlike.launch.device_queue import DeviceQueue


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on the device, which is not waited for: only pinned memory is copied
    so."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class AsyncScalars:
    """Sends numbers of this rank's device to the host."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        # a copy that waits for a message must not hold up the stream that computes
        self._stream = None if mesh.device.type == "cpu" else torch.Stream(mesh.device)

    def send(
        self, numbers: Mapping[str, Tensor], host: Mapping[str, float | list[float]]
    ) -> PendingScalars:
        """Send fp32 scalars and vectors of the device, and numbers of the host, by their names,
        which are the same on all ranks. What arrives is the largest of all ranks (NaN may be lost
        to a number). Collective; waits neither for the device nor for other ranks."""
        mesh = self._mesh
        sizes = {name: len(value) if value.dim() else 0 for name, value in numbers.items()} | {
            name: len(value) if isinstance(value, list) else 0 for name, value in host.items()
        }
        flat = [x for v in host.values() for x in (v if isinstance(v, list) else [v])]
        on_host = on_device(torch.tensor(flat, dtype=torch.float32), mesh.device)
        all_ = torch.cat([*(value.view(-1) for value in numbers.values()), on_host])
        work = None
        if mesh.world_size > 1:
            work = dist.all_reduce(all_, op=dist.ReduceOp.MAX, async_op=True)
        if self._stream is None:
            return PendingScalars(sizes, all_, work, None)
        pinned = torch.empty(all_.shape, dtype=all_.dtype, pin_memory=True)
        self._stream.wait_stream(torch.accelerator.current_stream(mesh.device))
        with self._stream:
            if work is not None:
                work.wait()  # the stream does
            pinned.copy_(all_, non_blocking=True)
        return PendingScalars(sizes, pinned, None, self._stream.record_event(), kept=all_)


class PendingScalars:
    """Numbers on their way."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        numbers: Tensor,
        work: Any,
        arrived: Any,
        kept: Tensor | None = None,
    ) -> None:
        """sizes: name -> numbers of a list, 0 for one that is none; work: of gloo, that completes
        them; arrived: the event on a device that does; kept: what is copied, and must not be freed
        before."""
        self._sizes, self._numbers = sizes, numbers
        self._work, self._arrived, self._kept = work, arrived, kept

    def read(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The numbers, and lists of them, by the names under which they were sent; waits for them.

        timeout: seconds, after which the result is None; without it that of the process group
        holds.
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
        left = iter(self._numbers.tolist())
        return {
            name: [next(left) for _ in range(size)] if size else next(left)
            for name, size in self._sizes.items()
        }


# --- times ---------------------------------------------------------------------------------------


def mark(device: torch.device) -> Any:
    """Now; of a device: behind what is launched so far, an event."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Seconds between two marks, once the device has come to them."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


class Timer:
    """Seconds of this rank's work between two points: of the device by its own clock."""

    def __init__(self, device: torch.device) -> None:
        """The first point is now, for a device: after what is launched so far."""
        self._device = device
        self._begin = mark(device)

    def stop(self) -> None:
        """The second point is now."""
        self._end = mark(self._device)

    def seconds(self) -> float:
        """The seconds, after `stop`, once the device has come that far, e.g. because numbers sent
        later arrived."""
        return seconds_between(self._begin, self._end)


def device_queue(device: torch.device) -> DeviceQueue | None:
    """The queue of an accelerator's current stream; None for the CPU, which has none."""
    if device.type == "cpu":
        return None
    from titanlike.launch.device_queue import DeviceQueue

    # each thread has a current device of its own
    select = partial(torch.accelerator.set_device_index, device.index)
    return DeviceQueue(partial(torch.Event, device), select)
