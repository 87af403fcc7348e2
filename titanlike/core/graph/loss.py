"""The interface of a loss of a model's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class OutputError(ValueError):
    """A model's output, or the targets, do not fit the loss."""


class Loss:
    """`loss(output, targets)` is a scalar: the sum of a microbatch's terms, times `scale`. Without
    gradients, terms that exist only in training are omitted.

    output: what the model's forward returns; targets: the batch's, [B, ...].
    """

    chunk: int | None = None  # tokens whose logits are in memory at a time; None = all
    # with chunks: whether a microbatch's backward precedes the next forward, and whether the loss of
    # a chunk's logits is compiled
    backward_follows, compiled = True, False
    # called with each output and its targets: of a microbatch, or of a chunk
    watch: Callable[[Any, Tensor], object] | None = None

    def __init__(self) -> None:
        self.scale = torch.tensor(1.0)

    def __call__(self, output: Any, targets: Tensor) -> Tensor:
        if self.watch is not None:
            self.watch(output, targets)
        return self.total_now()(output, targets) * self.scale

    def each(self, output: Any, targets: Tensor) -> Tensor:
        """Compute the unreduced terms, those of a sequence contiguous. Raises OutputError."""
        raise NotImplementedError

    def total(self, output: Any, targets: Tensor) -> Tensor:
        """Compute the sum of the terms to train, an fp32 scalar. Raises OutputError."""
        return self.each(output, targets).float().sum()

    def total_and_gradient(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `total` and its gradient with respect to `output`, in its dtype."""
        leaf = output.detach().requires_grad_()
        with torch.enable_grad():
            total = self.total(leaf, targets)
        return total.detach(), torch.autograd.grad(total, leaf)[0]

    def evaluated(self, output: Any, targets: Tensor) -> Tensor:
        """Compute `total` without terms that exist only in training."""
        return self.total(output, targets)

    def predictions(self, x: Any, targets: Tensor) -> list[tuple[Any, Tensor, float]]:
        """Split x [..., features] into (part, targets, weight) for each predicted token offset."""
        return [(x, targets, 1.0)]

    def total_now(self) -> Callable[[Any, Tensor], Tensor]:
        """`total`, or `evaluated` if gradients are disabled."""
        return self.total if torch.is_grad_enabled() else self.evaluated

    def count(self, targets: Tensor) -> Tensor | None:
        """The number of terms, by which the reported loss is divided; None if the targets alone do
        not tell it (see `terms`)."""
        raise NotImplementedError

    def terms(self, output: Any, targets: Tensor) -> int:
        """The number of terms, from shapes; output and targets are on meta."""
        with torch.device("meta"):
            return self.each(output, targets).numel()

    def why_not_of_sequences(self, output: Any, targets: Tensor, rows: int) -> str:
        """Why the terms cannot be split by sequence (`rows` of them); "" = they can. Both on meta."""
        return ""

    def measure(self, output: Any, targets: Tensor) -> tuple[Tensor, float]:
        """(sum, count) of the terms of a batch."""
        count = self.count(targets)
        if count is not None:
            return self.total_now()(output, targets), float(count)
        losses = self.each(output, targets)
        return losses.float().sum(), float(losses.numel())
