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

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

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


# --- cross entropy of logits whose vocabulary is divided -----------------------------------------
#
# No rank has all logits of a token: the largest, the sum of exponentials and the target's logit are
# exchanged, three numbers a token (arXiv 1909.08053, section 3).


@dataclass(frozen=True)
class DividedVocabulary:
    size: int  # of the whole
    ranks: TensorRanks

    def cross_entropy(self, logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
        """Losses in nats [N], 0 where the target is `ignore`, NaN where it is not in the vocabulary;
        the same on every rank.

        logits: fp32 [N, this rank's part of the vocabulary]; targets: [N].
        """
        return _CrossEntropy.apply(logits, targets, self, ignore)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocabulary: DividedVocabulary, ignore: int
    ) -> Tensor:
        ranks = vocabulary.ranks
        held = ranks.part(vocabulary.size)
        alone = ranks.group is None or logits.is_meta  # where costs are counted
        assert alone or logits.shape[-1] == held.stop - held.start, "logits of this rank's part"
        largest = logits.amax(-1)
        if not alone:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=ranks.group)
        shares = logits - largest.unsqueeze(-1)
        counted = targets != ignore
        inside = counted & (targets >= held.start) & (targets < held.stop)
        rows = (targets - held.start).masked_fill(~inside, 0).unsqueeze(-1)
        own = shares.gather(-1, rows).squeeze(-1).masked_fill(~inside, 0)  # of the target, or 0
        unknown = counted & ((targets < 0) | (targets >= vocabulary.size))
        own.masked_fill_(unknown, math.nan)
        shares.exp_()
        sums = torch.stack([shares.sum(-1), own])
        if not alone:
            dist.all_reduce(sums, group=ranks.group)
        total, of_target = sums
        shares.div_(total.unsqueeze(-1))
        ctx.save_for_backward(shares, rows, inside, counted)
        return (total.log() - of_target).masked_fill(~counted, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        shares, rows, inside, counted = ctx.saved_tensors
        gradient = (gradient * counted).unsqueeze(-1)
        result = shares * gradient
        result.scatter_add_(-1, rows, -gradient * inside.unsqueeze(-1))
        return result, None, None, None
