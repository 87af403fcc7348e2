"""Initial weights from (seed, name) alone, whatever the layout and the device.

A parameter is cut into rows (its first dimension, which FSDP shards) and rows into pieces of a
fixed size; each piece has a random generator of its own, seeded with (seed, name, piece). So a rank
draws the pieces that its shard touches and no others.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlike.torch_private import local_slices

_PIECE = 2**18  # numbers in a piece: small beside a shard, large beside seeding a generator


def piece_seed(seed: int, name: str, piece: int) -> int:
    """A 63-bit seed that differs for every (seed, name, piece)."""
    digest = hashlib.blake2b(f"{seed}/{name}/{piece}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draw(shape: torch.Size, rows: slice, seed: int, name: str, mean: float, std: float) -> Tensor:
    """Rows `rows` of the fp32 tensor `name` of the given shape: normal(mean, std), on the CPU."""
    out = torch.empty(rows.stop - rows.start, *shape[1:])
    if std == 0 or out.numel() == 0:
        return out.fill_(mean)
    width = out[0].numel()
    step = max(1, _PIECE // width)
    for piece in range(rows.start // step, -(-rows.stop // step)):
        start, stop = piece * step, min((piece + 1) * step, shape[0])
        generator = torch.Generator().manual_seed(piece_seed(seed, name, piece))
        part = torch.empty(stop - start, *shape[1:]).normal_(mean, std, generator=generator)
        low, high = max(start, rows.start), min(stop, rows.stop)
        out[low - rows.start : high - rows.start] = part[low - start : high - start]
    return out


@torch.no_grad()
def initialize(stage: nn.Module, seed: int, device: torch.device) -> None:
    """Allocate a meta stage on `device` and fill its parameters; `stage.initial(name)` says how."""
    stage.to_empty(device=device)
    for name, parameter in stage.named_parameters():
        mean, std = stage.initial(name)
        rows, *others = local_slices(parameter)
        values = draw(parameter.shape, rows, seed, name, mean, std)[:, *others]
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.copy_(values)
