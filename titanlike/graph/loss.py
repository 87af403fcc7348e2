"""A loss of a model's output: what a recorded model is trained by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class OutputError(ValueError):
    """A model's output, or the targets, that a loss cannot take."""


class Loss:
    """`loss(output, targets)` is a scalar: the sum of a microbatch's terms, times `scale`; where no
    gradients are taken, of what is evaluated.

    output: what the model's forward returns. targets: of the batch, [B, ...].
    """

    chunk: int | None = None  # tokens whose logits are in memory at a time; None = all
    # of chunks: whether the backward of a microbatch comes before the forward of the next, and
    # whether what is computed of their logits is compiled
    backward_follows, compiled = True, False
    # called with each output and its targets, where these are whole or in chunks
    watch: Callable[[Any, Tensor], object] | None = None

    def __init__(self) -> None:
        self.scale = torch.tensor(1.0)

    def __call__(self, output: Any, targets: Tensor) -> Tensor:
        if self.watch is not None:
            self.watch(output, targets)
        return self.total_now()(output, targets) * self.scale

    def each(self, output: Any, targets: Tensor) -> Tensor:
        """The terms one by one, those of a sequence together. Raises OutputError."""
        raise NotImplementedError

    def total(self, output: Any, targets: Tensor) -> Tensor:
        """The sum of the terms that is trained, an fp32 scalar. Raises OutputError."""
        return self.each(output, targets).float().sum()

    def total_and_gradient(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """`total` and its gradient with respect to a tensor, of the tensor's dtype."""
        leaf = output.detach().requires_grad_()
        with torch.enable_grad():
            total = self.total(leaf, targets)
        return total.detach(), torch.autograd.grad(total, leaf)[0]

    def evaluated(self, output: Any, targets: Tensor) -> Tensor:
        """The same without what is added in training alone."""
        return self.total(output, targets)

    def predictions(self, x: Any, targets: Tensor) -> list[tuple[Any, Tensor, float]]:
        """(part of x [..., features], its targets, weight) of each token that is predicted."""
        return [(x, targets, 1.0)]

    def total_now(self) -> Callable[[Any, Tensor], Tensor]:
        """`total`, or `evaluated` where no gradients are taken."""
        return self.total if torch.is_grad_enabled() else self.evaluated

    def count(self, targets: Tensor) -> Tensor | None:
        """How many terms there are: the loss that is reported is their mean.

        None if it does not follow from the targets alone: then it is `terms`.
        """
        raise NotImplementedError

    def terms(self, output: Any, targets: Tensor) -> int:
        """How many terms are summed, from shapes alone: both are on meta."""
        with torch.device("meta"):
            return self.each(output, targets).numel()

    def why_not_of_sequences(self, output: Any, targets: Tensor, rows: int) -> str:
        """Why terms are not those of each of `rows` sequences; "" = they are. Both are on meta."""
        return ""

    def measure(self, output: Any, targets: Tensor) -> tuple[Tensor, float]:
        """(sum, count) of a whole batch at once."""
        count = self.count(targets)
        if count is not None:
            return self.total_now()(output, targets), float(count)
        losses = self.each(output, targets)
        return losses.float().sum(), float(losses.numel())
