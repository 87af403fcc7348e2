"""Tensor parallelism of a Llama with torch's own styles, as torchtitan does it."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,  # around forward and backward: the loss of sharded logits
    parallelize_module,
)

__all__ = ["divide_by_hand", "loss_parallel"]


def divide_by_hand(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a Llama on meta over a mesh axis, with sequence parallelism."""
    block = "model.layers.*"
    to_tokens, columns = RowwiseParallel(output_layouts=Shard(1)), ColwiseParallel()
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        f"{block}.*_layernorm": SequenceParallel(),
        f"{block}.self_attn": _gathered(3),
        f"{block}.self_attn.[qkv]_proj": columns,
        f"{block}.self_attn.o_proj": to_tokens,
        f"{block}.mlp": _gathered(1),
        f"{block}.mlp.gate_proj": columns,
        f"{block}.mlp.up_proj": columns,
        f"{block}.mlp.down_proj": to_tokens,
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, plan)


def _gathered(arguments: int) -> PrepareModuleInput:
    """The first argument is sharded along the sequence."""
    rest = (None,) * (arguments - 1)
    return PrepareModuleInput(
        input_layouts=(Shard(1), *rest), desired_input_layouts=(Replicate(), *rest)
    )
