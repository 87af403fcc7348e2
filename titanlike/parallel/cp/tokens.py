"""Which tokens of a sequence a context-parallel rank has.

With n ranks the sequence is cut into 2n chunks, and rank r has chunks r and 2n - 1 - r: of causal
attention, whose last queries see the most keys, each then computes the same share (arXiv 2407.21783,
section 3.3.2). Where heads are exchanged instead, each rank attends with whole sequences, and has
chunk r of n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from titanlike.distributed.collectives import Peers

Method = Literal["gather", "ulysses", "ring"]


@dataclass(eq=False)
class ContextRanks(Peers):
    """The context-parallel ranks that this one computes with."""

    method: Method = "gather"

    @property
    def balanced(self) -> bool:
        """Whether a rank has a chunk of the sequence's begin and one of its end."""
        return self.method != "ulysses"

    @property
    def multiple(self) -> int:
        """What the length of a sequence must be a multiple of."""
        return 2 * self.size if self.balanced else self.size

    def starts(self, tokens: int, rank: int | None = None) -> tuple[list[int], int]:
        """(where a rank's chunks begin, tokens of a chunk) of a sequence of so many tokens."""
        rank = self.rank if rank is None else rank
        chunk = tokens // self.multiple
        numbers = [rank, 2 * self.size - 1 - rank] if self.balanced else [rank]
        return [number * chunk for number in numbers], chunk

    def take(self, x: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a whole sequence along `dim`, in order."""
        starts, chunk = self.starts(x.shape[dim])
        parts = [x.narrow(dim, start, chunk) for start in starts]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()

    def in_order(self, gathered: Tensor, dim: int) -> Tensor:
        """A whole sequence, of all ranks' tokens one after the other along `dim`."""
        if not self.balanced:
            return gathered
        ranks = gathered.unflatten(dim, (self.size, 2, -1))
        first, second = ranks.select(dim + 1, 0), ranks.select(dim + 1, 1).flip(dim)
        return torch.cat([first, second], dim).flatten(dim, dim + 1)


def token_dims(shape: Sequence[int], shorter: Sequence[int]) -> list[int]:
    """Dimensions of tokens: those whose size differs where sequences are shorter."""
    return [dim for dim, (a, b) in enumerate(zip(shape, shorter, strict=True)) if a != b]
