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
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.distributed.mesh import Mesh
from titanlike.launch.watchdog import DeviceQueue
from titanlike.torch_private.fsdp import exchanges_told

_ROUNDS = 16


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


def _mark(device: torch.device) -> Any:
    """Now; of a device: behind what is launched so far, an event."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def _seconds(begin: Any, end: Any) -> float:
    """Seconds between two marks, once the device has come to them."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


class Timer:
    """Seconds of this rank's work between two points: of the device by its own clock."""

    def __init__(self, device: torch.device) -> None:
        """The first point is now, for a device: after what is launched so far."""
        self._device = device
        self._begin = _mark(device)

    def stop(self) -> None:
        """The second point is now."""
        self._end = _mark(self._device)

    def seconds(self) -> float:
        """The seconds, after `stop`, once the device has come that far, e.g. because numbers sent
        later arrived."""
        return _seconds(self._begin, self._end)


class Clock:
    """Marks of one rank's work. On a device a mark is an event behind what is launched so far."""

    def __init__(self, device: torch.device) -> None:
        """Waits once until a device has done what is launched so far."""
        self.mark = partial(_mark, device)
        self._zero = self.mark()
        self._host_zero = self._zero
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
            self._host_zero = time.perf_counter()

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Times of this host's clock (`time.perf_counter`), once the device has come to the last
        mark."""
        if isinstance(self._zero, float):
            return [*marks]
        return [self._host_zero + _seconds(self._zero, mark) for mark in marks]


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
    """How long this rank waits for others; a listener of `training/build.py`."""

    def __init__(self, device: torch.device, groups: Iterable[Any]) -> None:
        """groups: of FSDP, see `parameter_groups`."""
        self._on_cpu = device.type == "cpu"
        self._now = partial(_mark, device)
        self._waits: list[tuple[Any, Any]] = []  # begin and end, of this step
        self._before: list[tuple[Any, Any]] = []  # of the step before
        self._begun: Any = None  # a wait, perhaps
        self._receiving: set[Any] = set()  # actions that wait for a message
        self._inside = 0  # exchanges that call each other
        if self._on_cpu:
            exchanges_told(groups, self._exchange)

    def waited(self) -> float:
        """Seconds of this step, of a device: of the step before, whose numbers have arrived. Asked
        once a step."""
        self._close()
        waits, self._waits = self._waits, []
        if not self._on_cpu:
            waits, self._before = self._before, waits
        return sum(_seconds(begin, end) for begin, end in waits)

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


def device_queue(device: torch.device) -> DeviceQueue | None:
    """The queue of an accelerator's current stream; None for the CPU, which has none."""
    if device.type == "cpu":
        return None
    # each thread has a current device of its own
    select = partial(torch.accelerator.set_device_index, device.index)
    return DeviceQueue(partial(torch.Event, device), select)
