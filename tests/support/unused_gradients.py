"""Models whose later stages use a tensor without needing its gradient.

Token ids [B, T] below 64 -> logits [B, T, 64].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from support.forwards import DIM, VOCAB, Blocks


class _Residual(Blocks):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__(*(nn.Linear(DIM, DIM) for _ in range(blocks)))

    def step(self, block: int, x: Tensor) -> Tensor:
        return x + self.blocks[block](x).tanh()


class Detached(_Residual):
    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.tokens(ids)
        for block in range(4):
            x = self.step(block, x) + first.detach()
        return self.out(x)


class Compared(_Residual):
    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.tokens(ids)
        for block in range(4):
            x = self.step(block, x) * (1 + (first > 0).to(torch.int8))
        return self.out(x)


class NormOfTheFirst(_Residual):
    """The first value passes by every stage, and the last uses it under no_grad."""

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.tokens(ids)
        for block in range(4):
            x = self.step(block, x)
        with torch.no_grad():
            scale = first.norm(dim=-1, keepdim=True)
        return self.out(x / (1 + scale))


class OnlyDetached(_Residual):
    """`side` has no way to the loss but a detached one: it has no gradient and does not move."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(DIM, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        side = self.side(x)
        for block in range(4):
            x = self.step(block, x)
        return self.out(x + side.detach())


class ExtraOutputs(_Residual):
    """Returns tensors that the loss ignores; `side` makes one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(DIM, DIM)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x = self.tokens(ids)
        hidden = [self.side(x)]
        for block in range(4):
            x = self.step(block, x)
            hidden.append(x)
        return {"logits": self.out(x), "hidden": hidden}


class _Perhaps(nn.Module):
    """Whether there is a gradient of `first` depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        x = x + self.linear(x).tanh()
        return x + first if first.isnan().any() else x


class ByValue(Blocks):
    def __init__(self) -> None:
        super().__init__(*(_Perhaps() for _ in range(4)))

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, first)
        return self.out(x)


class TableOfWeights(_Residual):
    """A stage in the middle sends a tensor that no received one has part in."""

    def __init__(self) -> None:
        super().__init__(6)
        self.blocks[3] = nn.Embedding(VOCAB, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in range(3):
            x = self.step(block, x)
        table = self.blocks[3](torch.arange(ids.shape[1], device=ids.device))
        x = self.step(4, x)
        return self.out(self.step(5, x * table))
