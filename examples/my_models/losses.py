"""A custom loss: returns unreduced losses, whose mean titanlike computes."""

import torch
import torch.nn.functional as F
from torch import Tensor


def focal(logits: Tensor, targets: Tensor, gamma: float = 2.0) -> Tensor:
    """Focal loss (arXiv 1708.02002): logits [B, T, V], targets [B, T] -> losses [B * T]."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (1 - torch.exp(-losses)) ** gamma * losses


def valid(targets: Tensor) -> Tensor:
    """The number of valid targets, by which the sum of losses is divided."""
    return (targets >= 0).sum()


focal.count = valid
