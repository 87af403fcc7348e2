"""The loss of a microbatch: summed over tokens, scaled so that all microbatches of all ranks add up.

A mean of means is wrong as soon as microbatches hold unequal numbers of valid tokens. So every
microbatch gives the SUM of its token losses times `scale`, which holds the step's normalizer; the
same number comes out whatever the layout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlike.data.sources import IGNORE


class CrossEntropy:
    """Cross entropy in nats of logits [B, T, V] (computed in fp32) with targets [B, T]."""

    def __init__(self) -> None:
        self.scale = torch.tensor(1.0)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        return total * self.scale


def valid_tokens(targets: Tensor) -> Tensor:
    """How many targets count."""
    return (targets != IGNORE).sum()
