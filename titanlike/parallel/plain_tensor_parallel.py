"""Tensor parallelism of a Llama by hand with torch's own styles, as torchtitan does it."""

from __future__ import annotations

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
    loss_parallel,  # around forward and backward: the loss is computed of divided logits
    parallelize_module,
)

__all__ = ["divide_by_hand", "loss_parallel"]


def divide_by_hand(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide a Llama on meta over the ranks of a mesh axis, activations along the sequence."""
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1)
            ),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    blocks: Any = model.get_submodule("model.layers")
    for block in blocks:
        plan: dict[str, ParallelStyle] = {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": _gathered(3),
            "mlp": _gathered(1),
            "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
        for name in ("q_proj", "k_proj", "v_proj"):
            plan[f"self_attn.{name}"] = ColwiseParallel()
        for name in ("gate_proj", "up_proj"):
            plan[f"mlp.{name}"] = ColwiseParallel()
        parallelize_module(block, mesh, plan)


def _gathered(arguments: int) -> PrepareModuleInput:
    """The first of so many arguments comes in parts of the sequence."""
    rest = (None,) * (arguments - 1)
    return PrepareModuleInput(
        input_layouts=(Shard(1), *rest), desired_input_layouts=(Replicate(), *rest)
    )
