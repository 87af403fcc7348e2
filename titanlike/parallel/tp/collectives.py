"""What tensor-parallel ranks exchange: activations in the forward, their gradients in the backward.

Each exchange is a pair of operations, of which one is the other's gradient (arXiv 1909.08053, section
3; with the sequence divided, 2205.05198, section 4.2.2):

    forward         backward
    copy            all-reduce        whole activations enter a divided layer
    all-reduce      copy              partial sums leave it
    all-gather      reduce-scatter    parts of the sequence enter it
    reduce-scatter  all-gather        partial sums leave it, a part of the sequence to each rank
    all-gather      take              parts become whole where each rank computes the same
    take            all-gather        the reverse
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from titanlike.distributed.collectives import Peers, exchange


@dataclass(eq=False)
class TensorRanks(Peers):
    """The tensor-parallel ranks that this one computes with."""

    # Whether activations between divided layers are divided along the sequence. It may differ from
    # batch to batch: a length that `size` does not divide is not.
    sequence: bool = False

    def part(self, length: int) -> slice:
        """This rank's part of so many rows, dealt as torch.chunk does: the last may have fewer."""
        each = -(-length // self.size)
        start = min(self.rank * each, length)
        return slice(start, min(start + each, length))


def copy_in(x: Tensor, ranks: TensorRanks) -> Tensor:
    """Whole activations, which a divided layer computes with: gradients are summed."""
    return exchange(x, ranks, "copy", "all_reduce", 0)


def sum_out(x: Tensor, ranks: TensorRanks) -> Tensor:
    """The sum of all ranks' activations."""
    return exchange(x, ranks, "all_reduce", "copy", 0)


def gather_in(x: Tensor, ranks: TensorRanks, dim: int) -> Tensor:
    """All ranks' parts along `dim`, which a divided layer computes with: gradients are summed."""
    return exchange(x, ranks, "all_gather", "reduce_scatter", dim)


def scatter_out(x: Tensor, ranks: TensorRanks, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum of all ranks' activations."""
    return exchange(x, ranks, "reduce_scatter", "all_gather", dim)


def gather_whole(x: Tensor, ranks: TensorRanks, dim: int) -> Tensor:
    """All ranks' parts along `dim`, with which each rank computes the same."""
    return exchange(x, ranks, "all_gather", "take", dim)


def take_part(x: Tensor, ranks: TensorRanks, dim: int) -> Tensor:
    """This rank's part along `dim` of what each rank has as a whole."""
    return exchange(x, ranks, "take", "all_gather", dim)
