"""DTensor: which part of the whole a rank holds."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """This rank's part. An operation on plain tensors takes the host a fifth of one on DTensors."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """This rank's part of the whole tensor, a slice a dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
