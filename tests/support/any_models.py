"""Models without any pipeline code, of various structures: token ids [B, T] -> [B, T, 64]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

V, D = 64, 16


class Plain(nn.Module):
    """No module lists; modules are called in another order than registered."""

    def __init__(self) -> None:
        super().__init__()
        self.zeta = nn.Linear(D, V)
        self.beta = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
        self.alpha = nn.Linear(D, D)
        self.omega = nn.Embedding(V, D)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.omega(ids)
        x = x + self.alpha(x)
        return self.zeta(x * self.beta(x))


def sequential() -> nn.Sequential:
    middle = [nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Embedding(V, D), *middle, nn.Linear(D, V))


class Direct(nn.Module):
    """The top-level forward uses parameters and the input directly, early and late."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.read = nn.Embedding(V, D)
        self.steps = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.again = nn.Embedding(V, D)
        self.bias = nn.Parameter(torch.zeros(V))
        self.write = nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        start = self.read(ids) * self.scale
        x = self.steps[0](start)
        x = torch.tanh(self.steps[1](x)) + start  # used by two later stages
        x = torch.tanh(self.steps[2](x)) * start
        x = self.steps[3](x) + self.again(ids)  # the input again
        return {"logits": self.write(x) + self.bias, "hidden": x}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mlp(self.norm(x)))


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f"b{i}": Block() for i in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.trunk, self.write = nn.Embedding(V, D), Trunk(), nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        return self.write(self.trunk(self.read(ids)))


# --- models that are refused
# ------------------------------------------------------------------------


class Looking(Deep):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.read(ids)
        return self.write(self.trunk(x) if x.sum().item() > 0 else x)


class Unused(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(D, D)


class Unregistered(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(D)

    def forward(self, ids: Tensor) -> Tensor:
        return self.write(self.trunk(self.read(ids) * self.table))


class Misshapen(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.write = nn.Linear(D + 1, V)
