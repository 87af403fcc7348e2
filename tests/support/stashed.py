"""Blocks that pass tensors to one another by other ways than arguments (stash and pop)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from support.forwards import DIM, Blocks


class Stash(nn.Module):
    """Stores what `find` makes of its input under "skip"."""

    def __init__(self, shared: Any, find: Any = lambda x: x) -> None:
        super().__init__()
        self.linear, self.shared, self.find = nn.Linear(DIM, DIM), shared, find

    def forward(self, x: Tensor) -> Tensor:
        self.shared["skip"] = self.find(x)
        return x + self.linear(x).tanh()


class Pop(Stash):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * self.shared.pop("skip")


def of_blocks(first: nn.Module, last: nn.Module) -> Blocks:
    return Blocks(first, nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), last)


def inputs_in_a_dict() -> Blocks:
    shared: dict[str, Tensor] = {}
    return of_blocks(Stash(shared), Pop(shared))


def inner_values_in_a_dict() -> Blocks:
    shared: dict[str, Tensor] = {}
    return of_blocks(Stash(shared, lambda x: 2 * x), Pop(shared))


def values_without_gradient() -> Blocks:
    shared: dict[str, Tensor] = {}
    return of_blocks(Stash(shared, lambda x: x.detach() > 0), Pop(shared))


class AttributeReader(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.linear, self.others = nn.Linear(DIM, DIM), [other]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.others[0].last


def attribute_of_a_hook() -> Blocks:
    first = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
    first[0].register_forward_hook(lambda module, _, out: setattr(first, "last", out))
    return of_blocks(first, AttributeReader(first))


class PopOnly(Pop):
    """The stored tensor is all that it returns."""

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.pop("skip")


def returned_at_once() -> Blocks:
    shared: dict[str, Tensor] = {}
    return of_blocks(Stash(shared, torch.tanh), PopOnly(shared))


class StoredByTheForward(Blocks):
    def __init__(self) -> None:
        self.shared: dict[str, Tensor] = {}
        super().__init__(*(nn.Linear(DIM, DIM) for _ in range(3)), Pop(self.shared))

    def forward(self, ids: Tensor) -> Tensor:
        self.shared["skip"] = torch.ones(ids.size(1), 1, device=ids.device).cumsum(0)
        return super().forward(ids)


class InnerOutput(Blocks):
    """The forward reads a tensor of inside a block."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(4)))
        self.seen: list[Tensor] = []
        self.blocks[0][0].register_forward_hook(lambda m, a, out: self.seen.append(out))

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return x + self.seen.pop().mean()


# --- what a stage can do
# ----------------------------------------------------------------------------


class WithinABlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared: dict[str, Tensor] = {}
        self.first, self.second = Stash(shared, torch.tanh), Pop(shared)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def within_blocks() -> Blocks:
    return Blocks(*(WithinABlock() for _ in range(4)))


class KeptByAHook(Blocks):
    """The forward itself reads a block's output."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}
        self.blocks[0].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.seen["first"] = output

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.out(x + self.seen.pop("first"))


class Positions(nn.Module):
    """A table of the sequence's length, made on first use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((DIM,), 0.1), persistent=False)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            at = torch.arange(x.size(1), device=x.device)[:, None]
            self.table = (at * self.scale).cos().to(x).type_as(x) + torch.ones_like(x[0])
        return self.table


class Positioned(nn.Module):
    def __init__(self, positions: Positions) -> None:
        super().__init__()
        self.linear, self.positions = nn.Linear(DIM, DIM), positions

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x * self.positions(x)).tanh()


def table_of_all_blocks() -> Blocks:
    positions = Positions()
    return Blocks(*(Positioned(positions) for _ in range(4)))
