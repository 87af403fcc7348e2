"""A digest of tensors: a number that is equal for equal bits, however the tensors are sharded.

It is the sum, modulo 2^64, of a hash of every element: of the tensor's name, dtype and shape, of
the element's index in the full tensor, and of its bits. So shards add up in any order; a replicated
element counts once. It detects faults, not forgeries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlike.core.data.order import splitmix64
from titanlike.core.distributed.placement import Blocks, blocks_of

_CHUNK = 2**20  # elements hashed at a time, using 40 MiB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(name: str, tensor: Tensor, shape: torch.Size, offsets: tuple[int, ...]) -> Tensor:
    """Return the sum of the hashes of a block of a tensor, int64. shape: of the full tensor;
    offsets: where the block begins in it."""
    device = tensor.device
    seed = hashlib.blake2b(f"{name}/{tensor.dtype}/{[*shape]}".encode(), digest_size=8).digest()
    start = int.from_bytes(seed, "little", signed=True)
    strides = [int(shape[dim + 1 :].numel()) for dim in range(len(shape))]
    total = torch.zeros((), dtype=torch.int64, device=device)
    for row, part in _row_blocks(tensor.detach()):
        # filled there: a scalar from the CPU would wait for the device
        place = torch.full((), start, dtype=torch.int64, device=device)
        for dim, (size, stride) in enumerate(zip(part.shape, strides, strict=True)):
            first = offsets[dim] + (row if dim == 0 else 0)
            along = (first + torch.arange(size, device=device)) * stride
            place = place.unsqueeze(-1) + along
        bits = part.contiguous().view(_INTEGERS[part.element_size()]).long()
        total += splitmix64(splitmix64(place) ^ bits).sum()
    return total


def _row_blocks(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, rows) of a tensor, in blocks of limited size."""
    if tensor.numel() <= _CHUNK:
        yield 0, tensor
        return
    step = max(1, _CHUNK // tensor[0].numel())
    for row in range(0, len(tensor), step):
        yield row, tensor[row : row + step]


def text_of(total: Tensor) -> str:
    """Format a digest as 16 hexadecimal digits."""
    return f"{int(total) % 2**64:016x}"


def digest(
    tensors: Mapping[str, Any], first: bool, device: torch.device, group: dist.ProcessGroup | None
) -> str:
    """Compute one digest over the tensors of all ranks: DTensors, `Blocks` of DTensors, and plain
    tensors. Collective.

    first: whether this rank is the one replica that counts plain (replicated) tensors.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for name, tensor in tensors.items():
        counts, held = first, tensor.held if isinstance(tensor, Blocks) else tensor
        if isinstance(held, DTensor):
            place = held.device_mesh.get_coordinate()
            assert place is not None, "every rank is in the mesh"
            pairs = zip(place, held.placements, strict=True)
            counts = not any(at for at, placement in pairs if placement.is_replicate())
        for offsets, block in blocks_of(tensor).items() if counts else ():
            total += digest_of(name, block, tensor.shape, offsets).to(device)
    if dist.is_initialized():
        dist.all_reduce(total, group=group)
    return text_of(total)
