"""What a run has to do with context parallelism: batches are padded, and targets are divided."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.distributed.transform import Transform
from titanlike.parallel.cp.attention import ContextAttention
from titanlike.parallel.cp.tokens import ContextRanks

IGNORED = -100  # a target that counts for no loss
_PADDING = {"targets": IGNORED, "document_ids": -1}  # else 0, or False


class ContextParallel(Transform):
    ranks: ContextRanks

    def __init__(self, ranks: ContextRanks, attention: ContextAttention, tp: int) -> None:
        """tp: tensor-parallel ranks, which divide the rank's tokens once more."""
        self.ranks, self.attention, self.tp = ranks, attention, tp

    def on_stage(self, index: int, stage: nn.Module, units: Sequence[str]) -> None:
        for name in units:
            self.attention.around(stage.get_submodule(name), name)

    def why_not_compiled(self, block: str) -> str:
        counts = self.attention.counts(block)
        return "it counts tokens, of which cp ranks have parts" if counts else ""

    def multiple(self) -> int:
        """What lengths are padded to a multiple of."""
        return lcm(self.ranks.multiple, self.ranks.size * self.tp)

    def batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's batch of one of whole sequences [B, T, ...]: padded, of the targets its tokens.

        The other fields stay whole: see `graph/token_parts.py`.
        """
        batch = self.padded(batch)
        return {**batch, "targets": self.targets(batch["targets"])}

    def padded(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        tokens = batch["inputs"].shape[1]
        missing = -tokens % self.multiple()
        if not missing:
            return batch
        padded = {}
        for name, x in batch.items():
            dims = token_dims_of(name, x.shape[1:], tokens)
            padded[name] = _padded(x, dims, missing, _PADDING.get(name, 0))
        return padded

    def targets(self, targets: Tensor) -> Tensor:
        return self.ranks.take(targets, 1)


def token_dims_of(name: str, shape: Sequence[int], tokens: int) -> list[int]:
    """Dimensions of tokens of a field of the batch, whose first dimension is left out: the first, and
    of masks and biases the others of that size, too."""
    of_pairs = any(word in name for word in ("mask", "bias"))
    every = [dim for dim, size in enumerate(shape) if size == tokens]
    return every if of_pairs else [dim for dim in every if dim == 0]


def _padded(x: Tensor, dims: Sequence[int], missing: int, value: int) -> Tensor:
    for dim in dims:
        x = F.pad(x, [0, 0] * (x.dim() - 2 - dim) + [0, missing], value=value)
    return x
