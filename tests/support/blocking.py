"""Calls in a step that would make the host wait for a GPU, counted on the CPU."""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.models import documents
from titanlike.core.training import loop
from titanlike.core.training.loop import train

aten = torch.ops.aten
# values on the device decide about a number, or a shape, on the host
READS = (
    *(aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.item, aten.nonzero),
    *(aten.masked_select, aten._unique2, aten.unique_consecutive, aten.unique_dim),
    *(aten.bincount, aten.allclose),
)
BY_MASK = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
METHODS = (
    *(Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__float__),
    *(Tensor.__int__, Tensor.__index__, Tensor.__contains__),
)
MADE = (torch.tensor, torch.as_tensor)  # with device=...: a copy from memory that is not pinned
OBJECTS = ("barrier", "monitored_barrier", "all_gather_object", "broadcast_object_list")


class Blocking:
    """Within `counted`, `calls` gets each call that blocks, with titanlike's line it is from."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._on = False
        for name in OBJECTS:
            setattr(dist, name, self._counting(getattr(dist, name), name))

    @contextmanager
    def counted(self) -> Any:
        before, self._on = self._on, True
        with _Functions(self), _Operations(self):
            try:
                yield
            finally:
                self._on = before

    def allowed(self, function: Any) -> Any:
        """The function, within which nothing counts."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before, self._on = self._on, False
            try:
                return function(*args, **kwargs)
            finally:
                self._on = before

        return call

    def add(self, what: str) -> None:
        if self._on:
            frames = [f for f in traceback.extract_stack() if "/titanlike/" in f.filename]
            where = frames[-1]
            self.calls.append(
                f"{what} in {where.filename.partition('/titanlike/')[2]}:{where.name}"
            )

    def _counting(self, function: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.add(name)
            return function(*args, **kwargs)

        return call


class _Functions(TorchFunctionMode):
    def __init__(self, blocking: Blocking) -> None:
        super().__init__()
        self._blocking = blocking

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in METHODS or (func in MADE and (kwargs or {}).get("device") is not None):
            self._blocking.add(func.__name__)
            return self._blocking.allowed(func)(*args, **(kwargs or {}))  # counted once
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, blocking: Blocking) -> None:
        super().__init__()
        self._blocking = blocking

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        masked = packet in BY_MASK and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if packet in READS or masked:
            self._blocking.add(str(packet))
        return func(*args, **(kwargs or {}))


PARTS = ("forward_backward", "finish_step", "update", "measured_step")  # of a step, in the loop


def blocking_calls(config: Config, worker: Worker) -> tuple[int, list[str]]:
    """Train: how many steps were counted, and the calls that block in them.

    The first two steps allocate, the last one's numbers are waited for. Two things may read: the
    numbers of the step before, and the documents of a batch that the host has, too.
    """
    blocking, counted = Blocking(), set()
    if hasattr(loop, "finish_step"):
        from titanlike.core.distributed.async_reads import PendingScalars

        PendingScalars.read = blocking.allowed(PendingScalars.read)
    documents._count_and_longest = blocking.allowed(documents._count_and_longest)

    def in_step(function: Any) -> Any:
        def call(run: Any, config: Config, at: Any, *more: Any) -> Any:
            step = at if isinstance(at, int) else at.step
            if not 2 < step < config.steps:
                return function(run, config, at, *more)
            counted.add(step)
            with blocking.counted():
                return function(run, config, at, *more)

        return call

    for name in PARTS:
        if hasattr(loop, name):
            setattr(loop, name, in_step(getattr(loop, name)))
    train(config, worker)
    return len(counted), blocking.calls
