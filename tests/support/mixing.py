"""Models and a loss that mix the samples of a batch, or seem to: token ids [B, T] -> [B, T, 64]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.any_models import Block as Plain
from support.any_models import D, V


class Net(nn.Module):
    """Four blocks, of a class that this file names."""

    def __init__(self, *, block: str = "Plain", **arguments: float) -> None:
        super().__init__()
        self.read = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(globals()[block](**arguments) for _ in range(4))
        self.write = nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.read(ids)
        for block in self.blocks:
            x = block(x)
        return self.write(x)


class Centered(Plain):
    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.share * x.mean(0))


class CenteredInTraining(Centered):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else Plain.forward(self, x)


class Attention(nn.Module):
    """As in torch's tutorial of pipelines: [B, T, D] where batch_first=False wants [T, B, D]."""

    def __init__(self, batch_first: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(D, 2, 2 * D, dropout, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Shifted(Plain):
    """Each sample sees its neighbour in the batch: the order of samples counts."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * x.roll(1, 0))


class Capacity(Plain):
    """A token is left out where others, of any sample, have filled the expert."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        order = (flat[:, 0]).argsort(descending=True)[: len(flat) // 2]
        y = torch.zeros_like(flat)
        y[order] = super().forward(flat[order])
        return x + y.view_as(x)


class Normed(Plain):
    """The norm of the batch hardly changes with the company, but with the number of samples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.norm())


class BatchNormed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


class Dropping(Plain):
    """Dropout by a module and by a function, which nothing turns off in training."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x)) + F.dropout(x, 0.5, self.training)


class DroppingAndCentered(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Counting(Plain):
    """Another branch in every other training step; draws numbers of its own in each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.odd = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x) if self.calls % 2 else x + self.odd(x)


def balanced(output: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, and how unevenly the batch uses the vocabulary."""
    losses = F.cross_entropy(output.transpose(1, 2), targets, reduction="none")
    usage = output.softmax(-1).mean((0, 1))
    return losses + V * usage.square().sum()


def transposed(output: Tensor, targets: Tensor) -> Tensor:
    """The losses of each sequence in a column: nothing is mixed."""
    return F.cross_entropy(output.transpose(1, 2), targets, reduction="none").T


def by_batch_size(output: Tensor, targets: Tensor) -> Tensor:
    """Losses that are divided by the number of samples in the microbatch."""
    return F.cross_entropy(output.transpose(1, 2), targets, reduction="none") / len(output)
