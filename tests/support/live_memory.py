"""What a training step computes and keeps: live storages, matrix products, forwards of blocks."""

from __future__ import annotations

import functools
import time
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.registry import open_data
from titanlike.core.distributed.mesh import close_mesh, open_mesh
from titanlike.core.launch.worker import Worker
from titanlike.core.training.build import build
from titanlike.core.training.device_batches import to_device
from titanlike.core.training.step import optimizer_step


class LiveStorages(TorchDispatchMode):
    """A context that counts the bytes of live storages made within it, except on the meta device,
    and the operators that run.

    torch's trackers (`torch.distributed._tools.mem_tracker`) fail with microbatches (2.11 to 2.15).
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.operators: Counter[str] = Counter()
        self._bytes: dict[int, int] = {}

    def __enter__(self) -> LiveStorages:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = super(torch.UntypedStorage, storage).resize_(size)
            self._resized(storage)
            return result

        # FSDP frees gathered parameters this way, without an operator
        patched: Any = torch.UntypedStorage
        patched.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        del torch.UntypedStorage.resize_
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operators[getattr(function, "overloadpacket", function).__name__] += 1
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # DTensor's inner operators are not dispatched here
            tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            # a fake tensor's storage is on meta, whatever its device
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._bytes:
            self._bytes[key] = 0
            weakref.finalize(storage, self._gone, key)
            self._resized(storage)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._bytes:
            self.now += storage.nbytes() - self._bytes[key]
            self._bytes[key] = storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._bytes.pop(key)


class Largest(TorchDispatchMode):
    """Within it: the numbers in the largest tensor that any operation makes in memory."""

    numbers = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self.numbers = max(self.numbers, leaf.numel())
        return result


@dataclass(frozen=True)
class Measured:
    """A training step of one rank."""

    forwards: int  # of its blocks, recomputed ones included
    products: int  # matrix products
    peak: int  # bytes of live storages: weights, gradients, optimizer state, activations, messages
    seconds: float  # of the process' CPU


def measured(config: Config, worker: Worker) -> Measured:
    """The second training step, and the peak over building and both."""
    mesh = open_mesh(config, worker)
    live = LiveStorages()
    forwards: Counter[bool] = Counter()
    with live:
        run = build(config, mesh)
        for stage in run.stages:
            for name in (unit.name for unit in run.plan.model_graph.units if unit.block):
                if name in dict(stage.named_modules()):
                    _count(stage.get_submodule(name), forwards)
        stream = batches(open_data(config).train, config, dp_rank=mesh.dp_rank)
        for step in (1, 2):
            forwards.clear()
            live.operators.clear()
            begin = time.process_time()
            run.pipeline.train(to_device(next(stream), mesh, config))
            optimizer_step(run, config, step, torch.ones(()))
            seconds = time.process_time() - begin
            for state in run.stage_states:
                state.zero_grad()
    close_mesh()
    products = sum(live.operators[name] for name in ("mm", "addmm", "bmm"))
    return Measured(forwards[True], products, live.peak, seconds)


def _count(block: torch.nn.Module, forwards: Counter[bool]) -> None:
    """Count the calls of what a checkpointed block's forward calls."""
    first = next(part for part in block.modules() if part is not block and not [*part.children()])
    first.register_forward_pre_hook(functools.partial(_called, forwards))


def _called(forwards: Counter[bool], *_: Any) -> None:
    forwards[True] += 1
