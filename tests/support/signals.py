"""Time series, which are no text: a model that enlarges them again, and data of three forms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


class Unet(nn.Module):
    """[B, 1, 64] -> [B, 1, 64]: two scales, joined by a skip connection."""

    def __init__(self, *, width: int = 8):
        super().__init__()
        self.down = nn.Conv1d(1, width, 5, padding=2)
        self.deep = nn.Conv1d(width, width, 5, stride=2, padding=2)
        self.up = nn.ConvTranspose1d(width, width, 4, stride=2, padding=1)
        self.out = nn.Conv1d(2 * width, 1, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        fine = torch.relu(self.down(x))
        coarse = torch.relu(self.up(torch.relu(self.deep(fine))))
        return self.out(torch.cat([fine, coarse], 1))


def waves(count: int, seed: int) -> TensorDataset:
    """(noisy, clean) waves."""
    generator = torch.Generator().manual_seed(seed)
    phase = 2 * math.pi * torch.rand(count, 1, 1, generator=generator)
    clean = torch.sin(torch.linspace(0, 12, 64) + phase)
    return TensorDataset(clean + 0.3 * torch.randn(count, 1, 64, generator=generator), clean)


def one(count: int = 70, seed: int = 0) -> Dataset[Any]:
    return waves(count, seed)


def both() -> tuple[Dataset[Any], Dataset[Any]]:
    return waves(64, 0), waves(11, 1)


def near(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The share of points that are within 0.5."""
    return ((output - targets).abs() < 0.5).sum(), torch.tensor(targets.numel())
