"""One rank of a job whose other ranks are not there: collectives that return at once, and tensors
that have a size but no memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import debug as tensor_debug


@contextlib.contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Within it this process is a rank whose collectives change nothing and whose messages neither
    leave nor arrive. There must be no process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with _without_first_messages(), _quiet(schedules.logger):
            yield
    finally:
        dist.destroy_process_group()
        # Symptom without it (2.13): parameters of the next such job have the mesh of this one, whose
        # groups are gone. Test: test_exact_memory.py (muon in a pipeline)
        getattr(tensor_debug, "_clear_sharding_prop_cache", lambda: None)()


def fake_tensors() -> FakeTensorMode:
    """Within it tensors have no memory. An operation that needs a value raises.
    Enter one and the same mode again: tensors of another are copied."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@torch.no_grad()
def allocate(stage: nn.Module, device: torch.device) -> None:
    """Give a meta stage parameters and buffers on `device`. Within `fake_tensors` alone.

    Symptom of torch's `Module.to_empty` there (2.11 to 2.15): "Cannot swap t2 because it has weakref
    associated with it". Test: `test_fake_ranks.py::test_to_empty_fails_under_fake_tensors`.
    """
    made: dict[int, nn.Parameter] = {}  # a tied parameter stays one
    for module in stage.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = _allocated(parameter, device)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def _allocated(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    own = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    new = torch.empty(own.shape, dtype=own.dtype, device=device)
    if isinstance(parameter, DTensor):
        place = parameter.device_mesh, parameter.placements
        shape, stride = parameter.shape, parameter.stride()
        new = DTensor.from_local(new, *place, run_check=False, shape=shape, stride=stride)
    return nn.Parameter(new, parameter.requires_grad)


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """torch prints the whole order beside an error, which is raised as well."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _without_first_messages() -> Iterator[None]:
    """torch's runtime asks its neighbours in its first step whether all know the sizes of messages; all of
    ours do (`make_stage`). Symptom without it (2.13): the answer, which never comes, is read.
    Test: `test_fake_ranks.py::test_torchs_runtime_asks_its_neighbours_first`.
    """
    owner: Any = schedules._PipelineSchedule
    asking = getattr(owner, "_warmup_p2p", None)
    if asking is None:  # 2.11 and 2.15 do not ask
        yield
        return

    def all_known(_: object, stages: list[Any], *__: object) -> None:
        from torch.distributed.pipelining._utils import InferenceMode

        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    owner._warmup_p2p = all_known
    try:
        yield
    finally:
        owner._warmup_p2p = asking
