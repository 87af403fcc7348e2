"""One rank without the others: pipelines that ask no other rank, and fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor


@contextlib.contextmanager
def without_peers() -> Iterator[None]:
    """A context in which torch's pipelines ask no other rank; at its end there is no process group,
    nor what torch keeps of it."""
    try:
        with contextlib.ExitStack() as stack:
            # torch prints the whole order when it raises an error
            stack.enter_context(patch.object(schedules.logger, "disabled", True))
            owner: Any = schedules._PipelineSchedule
            if hasattr(owner, "_warmup_p2p"):  # 2.13
                stack.enter_context(patch.object(owner, "_warmup_p2p", _first_messages_known))
            yield
    finally:
        if dist.is_initialized():
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
