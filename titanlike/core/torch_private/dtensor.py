"""DTensor: the local shard and its slices; collectives that torch.compile traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, without importing that class, which takes a tenth of the CPU time
    until the first step."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """The local shard: operations on plain tensors take a fifth of the host time of DTensors'."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """The slices of the full tensor that this rank holds, one per dimension."""
    if not is_dtensor(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def traced_collective(operation: str, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """A collective without gradient, in the functional form that torch.compile traces and inductor
    can overlap: all_reduce (sum), largest (all-reduce of maxima), all_gather or reduce_scatter
    (along `dim`), all_to_all.

    The pass for asynchronous tensor parallelism recognizes no other form. Test:
    test_functional_collectives.py ::test_torchs_pass_recognizes_what_a_divided_layer_exchanges
    """
    import torch.distributed._functional_collectives as functional

    if operation in ("all_reduce", "largest"):
        result = functional.all_reduce(x, "sum" if operation == "all_reduce" else "max", group)
    elif operation == "all_gather":
        # along dim 0, then moved: with another dim torch 2.11 breaks the graph
        result = functional.all_gather_tensor(x.contiguous(), 0, group)
        return torch.cat(functional.wait_tensor(result).chunk(group.size()), dim)
    elif operation == "all_to_all":
        result = functional.all_to_all_single(x.contiguous(), None, None, group)
    else:
        result = functional.reduce_scatter_tensor(x.contiguous(), "sum", dim, group)
    return functional.wait_tensor(result)
