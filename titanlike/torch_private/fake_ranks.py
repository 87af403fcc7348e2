"""One rank of a job whose other ranks are not there: collectives that return at once, tensors that
have a size but no memory; and the bytes of the storages that live, of real tensors and of fake
ones."""

from __future__ import annotations

import contextlib
import weakref
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
    """A context in which this process is a rank whose collectives change nothing and whose messages
    neither leave nor arrive. There must be no process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with contextlib.ExitStack() as stack:
            # torch prints the whole order beside an error, which is raised as well
            stack.enter_context(patch.object(schedules.logger, "disabled", True))
            owner: Any = schedules._PipelineSchedule
            if hasattr(owner, "_warmup_p2p"):  # 2.11 and 2.15 do not ask
                stack.enter_context(patch.object(owner, "_warmup_p2p", _first_messages_known))
            yield
    finally:
        dist.destroy_process_group()
        # Symptom without it (2.13): parameters of the next such job have the mesh of this one,
        # whose groups are gone. Test: test_exact_memory.py (muon in a pipeline)
        from torch.distributed.tensor import debug  # imports the compiler

        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


def fake_tensors() -> FakeTensorMode:
    """A context in which tensors have no memory. An operation that needs a value raises.
    Enter one and the same mode again: tensors of another are copied."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@torch.no_grad()
def allocate(stage: nn.Module, device: torch.device) -> None:
    """Give a meta stage parameters and buffers on `device`. Within `fake_tensors` alone.

    Symptom of torch's `Module.to_empty` there (2.11 to 2.15): "Cannot swap t2 because it has
    weakref associated with it". Test: `test_fake_ranks.py::test_to_empty_fails_under_fake_tensors`.
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
    """Instead of asking the neighbours, in a runtime's first step, whether all know the sizes of
    messages: all of ours do (`make_stage`). Symptom without it (2.13): the answer, which never
    comes, is read. Test: `test_fake_ranks.py::test_torchs_runtime_asks_its_neighbours_first`.
    """
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


class LiveStorages(TorchDispatchMode):
    """A context in which bytes of the storages that were made within it and are still there.

    torch's own trackers (`torch.distributed._tools.mem_tracker`) fail with microbatches (2.11 to
    2.15). Tensors on the meta device do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._bytes: dict[int, int] = {}

    def __enter__(self) -> LiveStorages:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = super(torch.UntypedStorage, storage).resize_(size)
            self._resized(storage)
            return result

        # FSDP frees gathered parameters so, which no operator shows
        patched: Any = torch.UntypedStorage
        patched.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        del torch.UntypedStorage.resize_
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # what DTensor calls inside is not seen here
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
