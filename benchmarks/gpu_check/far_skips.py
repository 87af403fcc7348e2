"""A small U-shaped model for checks: the output of each block of the first half is added to the
input of its mirror image, so that in a pipeline values skip the stages in between."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FarSkips(nn.Module):
    """Its sizes have the names of the Llama models' sizes; those of heads are unused."""

    def __init__(self, vocab_size: int, hidden_size: int, num_hidden_layers: int, **_: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size) for _ in range(num_hidden_layers)
        )
        self.lm_head = nn.Linear(hidden_size, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        skips: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            half = len(self.layers) // 2
            x = x + torch.tanh(layer(x if number < half else x + skips.pop()))
            if number < half:
                skips.append(x)
        return self.lm_head(x)
