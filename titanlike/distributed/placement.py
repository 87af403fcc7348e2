"""Where a parameter is among the ranks that divide a model's layers, what such a layer says of
itself, and what a rank trains of a stage.

What cuts parameters (`tp/`, `expert_parallel.py`) gives each a `Placement`, by its name, and puts
marks on the modules. Optimizers, checkpoints, losses and proofs read these, and need not know what
cut them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn

from titanlike.torch_private.dtensor import local_slices
from titanlike.torch_private.operators import BatchNorm

Slices = tuple[slice, ...]
When = Literal["never", "sequence", "always"]


@dataclass(frozen=True)
class Part:
    """This rank's part of a parameter.

    Along `dim` it is the whole's rows `ranges`, (start, stop) each, one after the other: several
    for packed weights such as q, k and v in one matrix.
    """

    shape: torch.Size  # of the whole parameter
    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def local_shape(self) -> torch.Size:
        shape = list(self.shape)
        shape[self.dim] = sum(stop - start for start, stop in self.ranges)
        return torch.Size(shape)


@dataclass(frozen=True)
class Placement:
    """The place of a parameter among the ranks that divide layers."""

    part: Part | None = None  # None = whole on each rank
    copies: int = 1  # ranks that hold the same elements
    # when the gradients of these ranks are parts of a sum, and not the same: in batches whose
    # activations are divided along the sequence, or in all
    partial: When = "never"


def pieces(tensor: Tensor, part: Part | None) -> Iterator[tuple[Slices, Slices]]:
    """Places of this rank's elements of a parameter, or of a tensor like it, in the whole.

    tensor: a rank's part, or FSDP's DTensor of it; part: None where the rank has, or FSDP shards,
    the whole. Gives (place in the local tensor, place in the whole one), a slice a dimension each.
    """
    held = local_slices(tensor)  # of the rank's part
    lengths = [piece.stop - piece.start for piece in held]
    if part is None:
        yield tuple(slice(0, length) for length in lengths), held
        return
    places: list[list[tuple[slice, slice]]] = [
        [(slice(0, length), piece)] for length, piece in zip(lengths, held, strict=True)
    ]
    places[part.dim] = [*_ranges(held[part.dim], part.ranges)]
    for combination in product(*places):
        yield tuple(local for local, _ in combination), tuple(whole for _, whole in combination)


def places(tensor: Tensor, part: Part | None) -> list[Tensor]:
    """Places, in each dimension of the whole, of what this rank holds: int64 vectors."""
    held = local_slices(tensor)
    ranges = [[piece] for piece in held]
    if part is not None:
        ranges[part.dim] = [whole for _, whole in _ranges(held[part.dim], part.ranges)]
    return [
        torch.cat([torch.arange(0), *(torch.arange(s.start, s.stop) for s in of_dim)])
        for of_dim in ranges
    ]


def _ranges(held: slice, ranges: tuple[tuple[int, int], ...]) -> Iterator[tuple[slice, slice]]:
    """The ranges within `held`, which counts along all of them."""
    before = 0
    for start, stop in ranges:
        low, high = max(held.start, before), min(held.stop, before + stop - start)
        if low < high:
            local = slice(low - held.start, high - held.start)
            yield local, slice(start + low - before, start + high - before)
        before += stop - start


def local_of(tensor: Tensor, part: Part | None, whole: Tensor) -> Tensor:
    """What this rank holds of a whole tensor, in the form of `tensor`'s local part."""
    for dim, rows in enumerate(places(tensor, part)):
        if len(rows) < whole.shape[dim]:
            whole = whole.index_select(dim, rows.to(whole.device))
    return whole


# --- what modules say of themselves --------------------------------------------------------------

STYLE = "tp_style"  # how a module is divided, and what that takes; graph/units.py knows it
GATHERS = "tp_gathers"  # of a module that gathers what it is given: the ranks
BIAS_LATER = "tp_adds_bias_later"  # of a linear layer
# of divided experts, with numerics=exact: rank -> a context in which they compute its tokens
APART = "ep_rank_apart"


def style_of(module: nn.Module) -> str:
    """How a module is divided; "" = not."""
    return vars(module).get(STYLE, ("",))[0]


def gathered_parts(module: nn.Module) -> int:
    """How many parts of the sequence a module gathers and computes with; 1 = the one it is
    given."""
    ranks: Any = vars(module).get(GATHERS)
    return ranks.size if ranks is not None and ranks.sequence else 1


def adds_bias_later(module: nn.Module) -> bool:
    """Whether a linear layer's bias is added behind a sum over ranks, and not in its forward."""
    return BIAS_LATER in vars(module)


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of routed experts, by name: see `models/experts.py` for what these are."""
    return {name: m for name, m in model.named_modules() if getattr(m, "sorted_by_expert", False)}


def has_statistics(module: nn.Module) -> TypeGuard[BatchNorm]:
    """Whether it is a batch norm that keeps running statistics."""
    return isinstance(module, BatchNorm) and module.running_mean is not None


def freeze_statistics(model: nn.Module) -> list[BatchNorm]:
    """Stop training forwards from updating running statistics; the batch norms that have some.

    They still normalize by the batch's statistics in training, by the running ones in evaluation.
    """
    norms = [module for module in model.modules() if has_statistics(module)]
    for norm in norms:
        norm.track_running_stats = False
    return norms


@dataclass(frozen=True)
class StageState:
    """What this rank trains of one stage that has parameters or buffers."""

    stage: nn.Module
    optimizers: list[torch.optim.Optimizer]  # of different parameters
    # parameter in the stage -> its name in the whole model, one for all copies of a tied one
    names: dict[str, str]
    owned: frozenset[str]  # names in the whole model; each parameter is owned by one stage
    # name in the whole model -> where a parameter is among tensor-parallel ranks; {} without any
    placements: Mapping[str, Placement] = field(default_factory=dict)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All of the stage's, by the name in the whole model."""
        for name, parameter in self.stage.named_parameters():
            yield self.names[name], parameter

    def part(self, name: str) -> Part | None:
        """Which part of a parameter, by its name in the whole model, this rank has; None = all."""
        return self.placements[name].part if name in self.placements else None

    def placed_parameters(self) -> Iterator[tuple[nn.Parameter, Placement]]:
        return ((parameter, self.placements[name]) for name, parameter in self.parameters())

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def optimizer_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What is remembered of a parameter: {} where it was never updated."""
        return optimizer_state(self.optimizers, parameter)

    def owns(self, name: str) -> bool:
        """Whether a parameter or buffer, by its name in the whole model, counts in this stage: in
        the gradient norm and in a checkpoint. A tied parameter counts in one stage alone."""
        return name in self.owned or name not in self.names.values()


def optimizer_state(
    optimizers: Iterable[torch.optim.Optimizer], parameter: nn.Parameter
) -> dict[str, Any]:
    """What the one of these optimizers that updates a parameter remembers of it; {} before that."""
    return next(filter(None, (optimizer.state.get(parameter) for optimizer in optimizers)), {})
