"""Models of which a step does not reach every parameter: token ids [B, T] -> [B, T, 64]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, D = 64, 8


class Experts(nn.Module):
    """The first token of a sequence chooses its expert; not all are chosen in a step."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        # of different sizes: messages of ranks that reach others differ in length, too
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, D + i), nn.Tanh(), nn.Linear(D + i, D)) for i in range(count)
        )

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = ids[:, 0] % len(self.experts) == number
            if rows.any():
                y[rows] = expert(x[rows])
        return x + y


class Alternating(nn.Module):
    """One branch in odd training steps, the other one in even ones."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.odd = nn.Linear(D, D)
        self.even = nn.Sequential(nn.Linear(D, D + 1), nn.Tanh(), nn.Linear(D + 1, D))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.calls += self.training
        return x + torch.tanh(self.odd(x) if self.calls % 2 else self.even(x))


class Dead(nn.Module):
    """Its layer has no influence; of its parameter the second half, a shard, has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.front = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        front = F.pad(self.front[: D // 2], (0, D // 2))
        return x + front * torch.tanh(x) + 0 * self.layer(x)


class Net(nn.Module):
    """Four blocks; shared: the first and the last are one, so they have tied weights."""

    def __init__(self, *, block: str = "Experts", shared: bool = False) -> None:
        super().__init__()
        self.read = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(globals()[block]() for _ in range(4))
        if shared:
            for first, last in zip(self.blocks[0].experts, self.blocks[3].experts, strict=True):
                last[0].weight = first[0].weight
        self.write = nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.read(ids)
        for at, block in enumerate(self.blocks):
            x = block(x, ids + 5 * at)  # other experts in each block
        return self.write(x)
