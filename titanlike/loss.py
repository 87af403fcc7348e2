"""The loss of a microbatch: summed over its terms, scaled so that all microbatches add up.

A mean of means is wrong as soon as microbatches hold unequal numbers of valid tokens. So every
microbatch gives the SUM of its terms times `scale`, which holds the step's normalizer; the same
number comes out whatever the layout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlike.config import schema
from titanlike.data.sources import IGNORE


class Loss:
    """`loss(output, targets)` is a scalar: the sum of a microbatch's terms, times `scale`."""

    def __init__(self) -> None:
        self.scale = torch.tensor(1.0)

    def __call__(self, output: Any, targets: Tensor) -> Tensor:
        return self.total(output, targets) * self.scale

    def total(self, output: Any, targets: Tensor) -> Tensor:
        """The sum of the terms, an fp32 scalar."""
        raise NotImplementedError

    def count(self, targets: Tensor) -> Tensor:
        """How many terms there are: the loss that is reported is their mean."""
        raise NotImplementedError


class CrossEntropy(Loss):
    """Cross entropy in nats of logits [B, T, V] (computed in fp32) with targets [B, T]."""

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            output.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum"
        )

    def count(self, targets: Tensor) -> Tensor:
        return (targets != IGNORE).sum()


def build_loss(config: schema.CrossEntropy) -> Loss:
    return CrossEntropy()
