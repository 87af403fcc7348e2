"""How tensor and expert parallelism shard parameters (`Placement`), attributes that they set on
modules, and the state that a rank trains for a stage.

What shards parameters (`tp/`, `expert_parallel.py`) records a `Placement` for each by name and
marks the modules. Optimizers, checkpoints, losses and proofs read these, whatever did the sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.core.torch_private.dtensor import local, local_slices
from titanlike.core.torch_private.operators import BatchNorm

Slices = tuple[slice, ...]
When = Literal["never", "sequence", "always"]


@dataclass(frozen=True)
class Part:
    """This rank's part of a parameter.

    It is the full parameter's slices `ranges` along `dim`, (start, stop) each, concatenated; there
    are several for fused weights such as q, k and v in one matrix.
    """

    shape: torch.Size  # of the full parameter
    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def local_shape(self) -> torch.Size:
        shape = list(self.shape)
        shape[self.dim] = sum(stop - start for start, stop in self.ranges)
        return torch.Size(shape)


@dataclass(frozen=True)
class Placement:
    """How a parameter is sharded over the ranks that share layers."""

    part: Part | None = None  # None = replicated
    copies: int = 1  # ranks that hold the same elements
    # when the gradients of these ranks are partial sums, and not equal: in batches whose
    # activations are sharded along the sequence, or in all
    partial: When = "never"


@dataclass(frozen=True)
class Blocks:
    """A tensor of which this rank holds some blocks, by their offsets in the full tensor."""

    held: Tensor  # this rank's part (a DTensor, or a local tensor)
    shape: torch.Size  # of the full tensor
    blocks: Mapping[tuple[int, ...], Tensor]  # views of `held`

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype


def blocks_of(tensor: Tensor | Blocks) -> Mapping[tuple[int, ...], Tensor]:
    """A tensor's blocks on this rank, by their offsets: a DTensor's shard, or all of it."""
    if isinstance(tensor, Blocks):
        return tensor.blocks
    return {tuple(piece.start for piece in local_slices(tensor)): local(tensor.detach())}


def pieces(tensor: Tensor, part: Part | None) -> Iterator[tuple[Slices, Slices]]:
    """Map this rank's elements of a parameter, or of a tensor like it, to the full one.

    tensor: a rank's part, or FSDP's DTensor of it; part: None where only FSDP shards it, if at all.
    Yields (slices of the local tensor, slices of the full one), one for each dimension.
    """
    held = local_slices(tensor)  # FSDP's shard of the rank's part
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
    """For each dimension, the indices in the full tensor that this rank holds: int64 vectors."""
    held = local_slices(tensor)
    ranges = [[piece] for piece in held]
    if part is not None:
        ranges[part.dim] = [whole for _, whole in _ranges(held[part.dim], part.ranges)]
    return [
        torch.cat([torch.arange(0), *(torch.arange(s.start, s.stop) for s in slices)])
        for slices in ranges
    ]


def _ranges(held: slice, ranges: tuple[tuple[int, int], ...]) -> Iterator[tuple[slice, slice]]:
    """Yield (local slice, slice of the full tensor); `held` indexes the concatenated ranges."""
    before = 0
    for start, stop in ranges:
        low, high = max(held.start, before), min(held.stop, before + stop - start)
        if low < high:
            local = slice(low - held.start, high - held.start)
            yield local, slice(start + low - before, start + high - before)
        before += stop - start


def local_of(tensor: Tensor, part: Part | None, whole: Tensor) -> Tensor:
    """Cut this rank's elements out of a full tensor, in the layout of `tensor`'s local one."""
    for dim, rows in enumerate(places(tensor, part)):
        if len(rows) < whole.shape[dim]:
            whole = whole.index_select(dim, rows.to(whole.device))
    return whole


# --- attributes set on modules --------------------------------------------------------------------

STYLE = "tp_style"  # the module's tensor-parallel style; core/graph/units.py reads it
GATHERS = "tp_gathers"  # number of ranks over which a module all-gathers its input
SHARES_GATHERED = "tp_shares_gathered"  # a linear layer's place among those of one all-gather
ONLY_LAYERS = "tp_only_layers"  # of a module that gathers: only those layers take what it gathers
BIAS_LATER = "tp_adds_bias_later"  # a linear layer whose bias is added after the reduction
# of a linear layer: the ranks among which tp divides dimension 0 and 1 of its weight, or None
DIVIDED = "tp_divided"
IN_BF16 = "computes_in_bf16"  # a layer in float8 within `in_bf16`
# of experts: what multiplies in place of `expert_linear`, see `techniques/mixture/experts.py`
PRODUCT = "product"
# of sharded experts, with numerics=exact: rank -> a context in which they compute its tokens
APART = "ep_rank_apart"


def style_of(module: nn.Module) -> str:
    """A module's tensor-parallel style; "" = not sharded."""
    return vars(module).get(STYLE, ("",))[0]


def gathered_parts(module: nn.Module) -> int:
    """The number of ranks over which a module all-gathers its input along the sequence; 1 = it does
    not."""
    ranks: Any = vars(module).get(GATHERS)
    return ranks.size if ranks is not None and ranks.sequence else 1


def adds_bias_later(module: nn.Module) -> bool:
    """Whether a linear layer's bias is added after the all-reduce, not in its forward."""
    return BIAS_LATER in vars(module)


def in_float8(module: nn.Module) -> bool:
    """Whether a module is a linear layer that multiplies in float8, by a mark of its class."""
    return getattr(type(module), "in_float8", False)


@contextmanager
def in_bf16(modules: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """A context in which the float8 modules among these compute in bf16; yields them."""
    modules = list(modules)
    layers: list[Any] = list(filter(in_float8, modules))
    products = {m: vars(m)[PRODUCT] for m in modules if PRODUCT in vars(m) and is_experts(m)}
    for experts, multiply in products.items():
        vars(experts)[PRODUCT] = multiply.in_bf16
    replaced = [vars(layer).pop("forward", None) for layer in layers]  # of blocks that are layers
    for layer, forward in zip(layers, replaced, strict=True):
        vars(layer)[IN_BF16] = True
        shares = forward if SHARES_GATHERED in vars(layer) else None  # see `tp/gathered.py`
        layer.forward = shares or forward_in_bf16.__get__(layer)
    try:
        yield [*layers, *products]
    finally:
        for experts, multiply in products.items():
            vars(experts)[PRODUCT] = multiply
        for layer, forward in zip(layers, replaced, strict=True):
            del layer.forward, vars(layer)[IN_BF16]
            if forward is not None:
                layer.forward = forward


def forward_in_bf16(layer: nn.Linear, input: Tensor) -> Tensor:
    weight: Any = layer.weight
    if hasattr(weight, "to_original_precision"):  # gathered by FSDP
        weight = weight.to_original_precision()
    return F.linear(input, weight, None if adds_bias_later(layer) else layer.bias)


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of routed experts, by name: see `techniques/mixture/experts.py` for what these are."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def is_experts(module: nn.Module) -> bool:
    return getattr(module, "sorted_by_expert", False)


def has_statistics(module: nn.Module) -> TypeGuard[BatchNorm]:
    """Whether a module is a batch norm that keeps running statistics."""
    return isinstance(module, BatchNorm) and module.running_mean is not None


def freeze_statistics(model: nn.Module) -> list[BatchNorm]:
    """Stop training forwards from updating running statistics; returns the batch norms affected.

    They still normalize by the batch's statistics in training, by the running ones in evaluation.
    """
    norms = [module for module in model.modules() if has_statistics(module)]
    for norm in norms:
        norm.track_running_stats = False
    return norms


@dataclass(frozen=True)
class StageState:
    """A stage with parameters or buffers on this rank, and the optimizers of its parameters."""

    stage: nn.Module
    optimizers: list[torch.optim.Optimizer]  # each for other parameters
    # parameter in the stage -> its name in the whole model, one for all copies of a tied one
    names: dict[str, str]
    owned: frozenset[str]  # names in the whole model; each parameter is owned by one stage
    # name in the whole model -> how a parameter is sharded by tp or ep; {} without these
    placements: Mapping[str, Placement] = field(default_factory=dict)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the stage's parameters with their names in the full model."""
        for name, parameter in self.stage.named_parameters():
            yield self.names[name], parameter

    def part(self, name: str) -> Part | None:
        """This rank's part of a parameter, by its name in the full model; None = all of it."""
        return self.placements[name].part if name in self.placements else None

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def owns(self, name: str) -> bool:
        """Whether this stage counts a parameter or buffer, by its name in the full model, in the
        gradient norm and in checkpoints. Only one stage counts a tied parameter."""
        return name in self.owned or name not in self.names.values()


def optimizer_state(
    optimizers: Iterable[torch.optim.Optimizer], parameter: nn.Parameter
) -> dict[str, Any]:
    """The state that one of these optimizers keeps for a parameter; {} before its first update."""
    return next(filter(None, (optimizer.state.get(parameter) for optimizer in optimizers)), {})
