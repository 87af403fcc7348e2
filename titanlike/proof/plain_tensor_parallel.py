"""Tensor parallelism of a Llama by hand with torch's own styles, as torchtitan does it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def divide_by_hand(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide a Llama on meta over the ranks of a mesh axis, activations along the sequence."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    layers: Any = model.layers
    for block in layers:
        plan: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "ffn_norm": SequenceParallel(),
            "attention": _gathered(3),
            "ffn": _gathered(1),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        for name in ("attention.wq", "attention.wk", "attention.wv", "ffn.gate", "ffn.up"):
            plan[name] = ColwiseParallel()
        parallelize_module(block, mesh, plan)


def _gathered(arguments: int) -> PrepareModuleInput:
    """The first of so many arguments comes in parts of the sequence."""
    rest = (None,) * (arguments - 1)
    return PrepareModuleInput(
        input_layouts=(Shard(1), *rest), desired_input_layouts=(Replicate(), *rest)
    )


def loss_context(divided: bool) -> Callable[[], AbstractContextManager[object]]:
    """Around forward and backward: the loss is computed of divided logits."""
    return loss_parallel if divided else nullcontext
