"""Custom data and a custom model, by import path."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.core.data.sources import IGNORE, Data
from titanlike.core.data.synthetic import SyntheticSource


class Uneven:
    """Random tokens with unequal numbers of targets: sequence i has i % 13 + 1."""

    def __init__(self, source: SyntheticSource, seq_len: int):
        self.source, self.seq_len = source, seq_len

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = dict(self.source[index])
        targets = sample["targets"].clone()
        targets[1 + index % 13 :] = IGNORE
        return sample | {"targets": targets}


def uneven(vocab_size: int, seq_len: int) -> Data:
    parts = (Uneven(SyntheticSource(vocab_size, seq_len, 0, part), seq_len) for part in (0, 1))
    train, validation = parts
    return Data(train, validation, vocab_size, "uneven random tokens")


class LeftOut(Uneven):
    """Targets that all do not count."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = dict(self.source[index])
        return sample | {"targets": torch.full_like(sample["targets"], IGNORE)}


def left_out(vocab_size: int, seq_len: int, train: bool, validation: bool) -> Data:
    """Random tokens; train, validation: whether their targets count."""
    sources = [SyntheticSource(vocab_size, seq_len, 0, part) for part in (0, 1)]
    parts = [
        s if c else LeftOut(s, seq_len) for s, c in zip(sources, (train, validation), strict=True)
    ]
    return Data(*parts, vocab_size, "random tokens, some left out")


class Masked(Uneven):
    """Samples that say which of their tokens are no padding."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = dict(self.source[index])
        return sample | {"mask": torch.ones_like(sample["inputs"], dtype=torch.bool)}


def masked(seq_len: int) -> Data:
    parts = (Masked(SyntheticSource(64, seq_len, 0, part), seq_len) for part in (0, 1))
    return Data(*parts, 64, "random tokens with a mask")


class Dropping(nn.Module):
    """Linear blocks with dropout."""

    def __init__(self, *, vocab_size: int, dim: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleDict({str(i): nn.Linear(dim, dim) for i in range(layers)})
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = x + F.dropout(torch.tanh(layer(x)), 0.3, self.training)
        return x if self.head is None else self.head(x)

    def initial(self, name: str) -> tuple[float, float]:
        return 0.0, 0.1
