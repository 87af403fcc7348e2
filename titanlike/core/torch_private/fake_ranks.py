"""One rank without the others: collectives that return at once, fake tensors, and the bytes of live
storages, real and fake."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextlib.contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """A context in which this process is a rank whose collectives do nothing and whose sends and
    receives are dropped. Needs that no process group exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with contextlib.ExitStack() as stack:
            # torch prints the whole order when it raises an error
            stack.enter_context(patch.object(schedules.logger, "disabled", True))
            owner: Any = schedules._PipelineSchedule
            if hasattr(owner, "_warmup_p2p"):  # 2.13
                stack.enter_context(patch.object(owner, "_warmup_p2p", _first_messages_known))
            yield
    finally:
        dist.destroy_process_group()
        # Symptom without it (2.13): parameters of the next fake job have this one's mesh, whose
        # groups are gone. Test: test_counted_memory.py (muon in a pipeline)
        from torch.distributed.tensor import debug  # imports the compiler

        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


def fake_tensors() -> FakeTensorMode:
    """A context in which tensors have no memory; operations that need values raise. Re-enter the
    same mode: another one copies its tensors."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@torch.no_grad()
def allocate(stage: nn.Module, device: torch.device) -> None:
    """Give a meta stage parameters and buffers on `device`. Only within `fake_tensors`.

    Symptom of `Module.to_empty` there (2.11 to 2.15): "Cannot swap t2 because it has weakref
    associated with it". Test: `test_fake_ranks.py::test_to_empty_fails_under_fake_tensors`.
    """
    made: dict[int, nn.Parameter] = {}  # a tied parameter stays one
    for parameter in stage.parameters():
        held = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        new = torch.empty(held.shape, dtype=held.dtype, device=device)
        if isinstance(parameter, DTensor):
            new = DTensor.from_local(
                new,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        made[id(parameter)] = nn.Parameter(new, parameter.requires_grad)
    for module in stage.modules():
        for name, held in module._parameters.items():
            module._parameters[name] = None if held is None else made[id(held)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def _first_messages_known(_: object, stages: list[Any], *__: object) -> None:
    """Replace torch's handshake of the first step, on whether all stages know their message sizes:
    they do (`make_stage`). Symptom without it (2.13): it reads an answer that never comes. Test:
    `test_fake_ranks.py::test_torchs_runtime_asks_its_neighbours_first`."""
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


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
