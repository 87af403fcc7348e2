"""A model of the user's own that computes something else on another rank."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn


class Ranked(nn.Module):
    """An embedding, a layer that odd ranks scale, and a head."""

    def __init__(self, vocab_size: int, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Scaled(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Scaled(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, x: Tensor) -> Tensor:
        odd = dist.is_initialized() and dist.get_rank() % 2
        return x + super().forward(x) * (2.0 if odd else 1.0)
