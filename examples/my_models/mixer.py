"""A causal mixer: a learned lower triangular matrix mixes tokens, instead of attention.

Shapes: B sequences, T tokens (`length`), C channels (`width`), V token ids.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mix(nn.Module):
    """Each token becomes a weighted sum of itself and the tokens before it."""

    def __init__(self, length: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, length) / length**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tril(self.weight) @ x  # [T, T] @ [B, T, C] -> [B, T, C]


class Block(nn.Module):
    def __init__(self, length: int, width: int, expansion: int):
        super().__init__()
        self.before_mix, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = Mix(length)
        self.mlp = nn.Sequential(
            nn.Linear(width, expansion * width), nn.GELU(), nn.Linear(expansion * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.before_mix(x))
        return x + self.mlp(self.before_mlp(x))


class Trunk(nn.Module):
    def __init__(self, depth: int, length: int, width: int, expansion: int):
        super().__init__()
        self.blocks = nn.ModuleList(Block(length, width, expansion) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Mixer(nn.Module):
    """Token ids [B, T] -> logits [B, T, V]."""

    def __init__(
        self, vocab_size: int, length: int, width: int = 64, depth: int = 4, expansion: int = 2
    ):
        super().__init__()
        if depth < 1:
            raise ValueError(f"depth={depth}: at least one block; write model.depth=1")
        self.read = nn.Embedding(vocab_size, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.trunk = Trunk(depth, length, width, expansion)
        self.write = nn.Linear(width, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.read(ids) + self.place  # [B, T] -> [B, T, C]
        x = self.trunk(x)
        return self.write(F.layer_norm(x, x.shape[-1:]))  # [B, T, C] -> [B, T, V]
