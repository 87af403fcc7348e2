"""Losses of a user's own, and models and data for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.core.data.sources import IGNORE, Data


class Curves:
    """inputs [T, 4] and targets [T, 2], floats that depend on the index alone."""

    def __init__(self, seq_len: int, seed: int):
        self.seq_len, self.seed = seq_len, seed

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(2 * index + self.seed)
        inputs = torch.randn(self.seq_len, 4, generator=generator)
        return {"inputs": inputs, "targets": torch.stack([inputs.sum(-1), inputs.prod(-1)], -1)}


def curves(seq_len: int) -> Data:
    return Data(Curves(seq_len, 0), Curves(seq_len, 1), 1, "curves")


@dataclass(frozen=True)
class Guess:
    value: Tensor
    spread: Tensor


class Regressor(nn.Module):
    """[B, T, 4] -> [B, T, 2]; returns: tensor, dict, dataclass or tuple."""

    def __init__(self, width: int = 16, depth: int = 4, returns: str = "tensor"):
        super().__init__()
        self.returns = returns
        self.enter = nn.Linear(4, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.leave = nn.Linear(width, 2)
        self.doubt = nn.Linear(width, 2) if returns in ("dataclass", "tuple") else None

    def forward(self, x: Tensor) -> object:
        x = self.enter(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        y = self.leave(x)
        if self.returns == "dataclass":
            return Guess(y, self.doubt(x))
        if self.returns == "tuple":
            return y, self.doubt(x)
        return {"logits": y, "hidden": x} if self.returns == "dict" else y


class Ended(nn.Module):
    """A decoder without attention whose logits are made in another way each."""

    def __init__(self, vocab_size: int, dim: int = 16, end: str = "cap"):
        super().__init__()
        self.end = end
        self.tokens = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(4))
        if end == "weight":
            self.out = nn.Parameter(torch.randn(vocab_size, dim) / dim)
        elif end == "inside":
            self.out = Out(dim, vocab_size)
        elif end not in ("tied", "embedding"):
            self.out = nn.Linear(dim, vocab_size)

    def forward(self, ids: Tensor) -> object:
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        if self.end == "embedding":
            return self.blocks[0](x).cumsum(-1)
        if self.end == "tied":
            return x @ self.tokens.weight.T
        if self.end == "weight":
            return F.linear(x, self.out)
        logits = self.out(x)
        if self.end == "cap":
            return {"logits": 3 * torch.tanh(logits.float() / 3), "hidden": x}
        if self.end == "mixed":
            return logits - logits.mean(1, keepdim=True).expand_as(logits)
        return logits.cumsum(1) if self.end == "summed" else logits


class Out(nn.Module):
    def __init__(self, dim: int, vocab_size: int):
        super().__init__()
        self.norm, self.project = nn.LayerNorm(dim), nn.Linear(dim, vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.norm(x))


# --- losses ------------------------------------------------------------------------------------


def huber(output: Tensor, targets: Tensor, delta: float = 1.0) -> Tensor:
    return F.huber_loss(output, targets, reduction="none", delta=delta)


def likelihood(guess: Guess, targets: Tensor) -> Tensor:
    return (guess.value - targets).square() * torch.exp(-guess.spread) + guess.spread


class Smoothed:
    """Label smoothing; positions that have no target do not count."""

    def __init__(self, amount: float):
        self.amount = amount

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits, targets = logits.flatten(0, 1), targets.flatten()
        return F.cross_entropy(
            logits, targets, reduction="none", ignore_index=IGNORE, label_smoothing=self.amount
        )

    def count(self, targets: Tensor) -> Tensor:
        return (targets != IGNORE).sum()


def mean(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).abs().mean()


def mean_of_one(output: Tensor, targets: Tensor) -> Tensor:
    return mean(output, targets).reshape(1)


def looking(output: Tensor, targets: Tensor) -> Tensor:
    return output if targets.sum().item() > 0 else -output


def pair(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return output, targets
