"""Comparisons of tensors with the reference: each rank's findings, and tolerances."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.core.distributed.placement import Part, local_of
from titanlike.core.torch_private.dtensor import local

LOSS_TOLERANCE = 1e-6  # relative, fp32
GRADIENT_TOLERANCE = 1e-6  # absolute at gradients of order one, fp32
RELATIVE_TOLERANCE = 1e-4  # norm of the difference over norm, so that small gradients count, too
# multiples of one process's rounding error: in bf16, or in fp32 if it grows (`explain`); Adam's
# updates, which have the size of the learning rate for any gradient, differ more
ROUNDING = {"update": 5.0, "gradient": 3.0, "state": 3.0, "buffer": 3.0, "loss": 3.0}
ROUNDING |= dict.fromkeys(("norm", "rate"), 3.0)
BF16_FLOOR = 2.0**-8  # bf16: half an ulp, relative
SIZE_TOLERANCE = 1e-2  # bf16: of a gradient's projection on the reference
NEGLIGIBLE = 1e-9  # absolute difference of gradients or updates, fp32
# Updates: norm of the difference over norm of the update, on elements whose gradient exceeds its
# rounding or is exactly zero. Adam divides a gradient by its size: if it is almost zero, its last
# bit decides the sign of the update.
UPDATE_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
# relative to the root mean square of a gradient
RELIABLE = {"fp32": 1e-3, "bf16": 1e-1, "float8": 0.5, "mxfp8": 0.5}

# fields of a Comparison that are summed, and those that are maximized, when a tensor's parts merge
_SUMS = {"elements", "squared", "scale", "along", "rounding_along"}
_SUMS |= {"along_base", "base_scale", "digits", "cut"}
_MAXIMA = {"largest", "difference"}


@dataclass(frozen=True)
class Comparison:
    """One rank's comparison of one tensor; comparisons of the same tensor are added."""

    kind: str
    name: str
    elements: int
    largest: float  # absolute value of the reference
    difference: float  # largest absolute difference; infinite if something is missing
    squared: float  # sum of squared differences
    scale: float  # sum of squares of the base of relative differences
    along: float  # sum of the differences times that base
    rounding: float | None  # as `squared`, of one process in bf16
    rounding_along: float  # as `along`
    along_moved: float = 0.0  # by which rounding alone moves `along`
    amplified: bool = False  # fp32: rounding alone explains the difference (see `explain`)
    tolerance: float | None = None  # relative, instead of the kind's
    along_base: float = 0.0  # as `along`, with the updated weights
    base_scale: float = 0.0
    digits: float = 0.0  # gradient elements with more digits than bf16 in the bf16 reference
    cut: float = 0.0  # those of them without these digits here

    def __add__(self, other: Comparison) -> Comparison:
        both = {name: (getattr(self, name), getattr(other, name)) for name in _SUMS | _MAXIMA}
        values = {name: sum(pair) if name in _SUMS else max(pair) for name, pair in both.items()}
        if self.rounding is not None and other.rounding is not None:
            values["rounding"] = self.rounding + other.rounding
        return replace(self, **({"rounding": None} | values))

    @property
    def full_name(self) -> str:
        """Such as "gradient of layers.0.weight", "loss of step 1"."""
        return self.name if self.kind in self.name.split() else f"{self.kind} of {self.name}"

    @property
    def relative(self) -> float:
        """Norm of the difference over norm of the reference."""
        if self.squared == 0:
            return 0.0
        return math.sqrt(self.squared / self.scale) if self.scale else math.inf

    @property
    def factor(self) -> float:
        """The factor to the reference, if the tensor is a multiple of it."""
        return 1 + self.along / self.scale if self.scale else math.inf

    @property
    def decayed(self) -> bool:
        """Whether the difference is a multiple of the weights."""
        return self.along_base * self.along_base > 0.9 * self.base_scale * self.squared > 0

    @property
    def summed_in_bf16(self) -> bool:
        """Whether a gradient lacks the digits of an fp32 sum over microbatches and ranks. A sum of
        two often has no more digits than bf16, but not in nearly all elements."""
        return self.digits >= 8 and self.cut > 0.9 * self.digits

    @property
    def agrees(self) -> bool:
        if self.amplified:
            return True
        if self.kind == "initial":
            return self.difference == 0
        if self.tolerance is not None:
            negligible = self.tolerance > 0 and self.difference <= NEGLIGIBLE
            return self.relative <= self.tolerance or negligible
        if self.rounding is not None:
            least = UPDATE_TOLERANCE["bf16"] if self.kind == "update" else BF16_FLOOR
            rounding = ROUNDING[self.kind] * math.sqrt(self.rounding)
            allowed = max(rounding, least * math.sqrt(self.scale))
            close = math.sqrt(self.squared) <= allowed and not self.summed_in_bf16
            return close and self._has_the_right_size(self.rounding)
        if self.kind == "update":
            return self.relative <= UPDATE_TOLERANCE["fp32"] or self.difference <= NEGLIGIBLE
        if self.kind == "loss":
            return self.difference <= LOSS_TOLERANCE * max(1.0, self.largest)
        close = self.difference <= GRADIENT_TOLERANCE * max(1.0, self.largest)
        return close and (self.relative <= RELATIVE_TOLERANCE or self.difference <= NEGLIGIBLE)

    @property
    def verdict(self) -> str:
        """A word for the table: ok, DIFFERS, rounding; or that the difference is too small to be
        compared."""
        if not self.agrees:
            return "DIFFERS"
        relative = UPDATE_TOLERANCE["fp32"] if self.kind == "update" else RELATIVE_TOLERANCE
        if self.amplified:
            return "rounding"
        negligible = self.rounding is None and 0 < self.difference <= NEGLIGIBLE
        return f"below {NEGLIGIBLE:.0e}" if negligible and self.relative > relative else "ok"

    def explain(self, squared: float, along: float = 0.0) -> Comparison:
        """Set `amplified` if the difference is within ROUNDING; squared: the sum of squares by
        which rounding alone changes the reference; along: its part along the reference."""
        if self.agrees:
            return self
        if self.rounding is not None:
            rounding = (math.sqrt(self.rounding) + math.sqrt(squared)) ** 2
            more = replace(self, rounding=rounding, along_moved=along)
            return replace(self, amplified=more.agrees)
        allowed = ROUNDING[self.kind] * math.sqrt(squared)
        return replace(self, amplified=math.sqrt(self.squared) <= allowed < math.inf)

    def _has_the_right_size(self, rounding: float) -> bool:
        """Whether a gradient is as large as one process's in this precision: rounding errors point
        in all directions, so little of their norm is along the gradient; float8's shrinkage is in
        both."""
        if self.kind not in ("gradient", "state"):
            return True
        # standard deviation of the difference of two independent ones
        random = 6 * math.sqrt(2 * rounding * self.scale / self.elements)
        along = abs(self.along - self.rounding_along)
        moved = ROUNDING[self.kind] * self.along_moved
        return along <= max(random, SIZE_TOLERANCE * self.scale, moved)


def compare(
    kind: str,
    name: str,
    tensor: Tensor | None,
    reference: Tensor,
    in_bf16: Tensor | None = None,
    *,
    base: Tensor | None = None,
    mask: Tensor | None = None,
    part: Part | None = None,
    tolerance: float | None = None,
    of_sums: bool = True,
) -> Comparison:
    """Compare this rank's part of a tensor with the same part of the reference.

    base: differences are relative to reference - base (an update), not to the reference. in_bf16:
    the reference's tensor computed in bf16; mask: the elements to compare; part: the rank's part of
    a parameter; of_sums: whether a gradient is a sum over ranks in fp32.
    """
    if tensor is None:
        rounding = None if in_bf16 is None else 0.0
        return Comparison(
            kind,
            name,
            reference.numel(),
            largest=math.nan,
            difference=math.inf,
            squared=math.inf,
            scale=1.0,
            along=math.inf,
            rounding=rounding,
            rounding_along=0.0,
        )
    here = partial(local_of, tensor, part)
    values = local(tensor).detach().cpu().double()
    right = here(reference).double()
    start = here(base).double() if base is not None else None
    scale = right if start is None else right - start
    difference = values - right
    rounding = None if in_bf16 is None else here(in_bf16).double() - right
    digits = (
        _more_digits(here(in_bf16))
        if in_bf16 is not None and kind == "gradient" and of_sums
        else torch.zeros(0)
    )
    if mask is not None:
        difference = difference * here(mask)
        start = None if start is None else start * here(mask)
        rounding = None if rounding is None else rounding * here(mask)
    return Comparison(
        kind,
        name,
        values.numel(),
        right.abs().max().item() if right.numel() else 0.0,
        # infinite for a NaN, which no comparison would notice
        difference.abs().nan_to_num(math.inf).max().item() if values.numel() else 0.0,
        difference.square().sum().nan_to_num(math.inf).item(),
        scale.square().sum().item(),
        (difference * scale).sum().nan_to_num(math.inf).item(),
        None if rounding is None else rounding.square().sum().item(),
        0.0 if rounding is None else (rounding * scale).sum().item(),
        tolerance=tolerance,
        digits=digits.sum().item(),
        cut=(digits & ~_more_digits(values)).sum().item() if digits.numel() else 0.0,
        along_base=0.0 if start is None else (difference * start).sum().nan_to_num().item(),
        base_scale=0.0 if start is None else start.square().sum().item(),
    )


def _more_digits(tensor: Tensor) -> Tensor:
    return tensor != tensor.bfloat16().to(tensor.dtype)


def reliable(gradient: Tensor, precision: str) -> Tensor:
    """Where a gradient's sign is not rounding, or it is exactly zero."""
    size = gradient.abs()
    limit = max(RELIABLE[precision] * gradient.square().mean().sqrt().item(), NEGLIGIBLE)
    return (size > limit) | (size == 0)


def gathered(value: Any) -> list[Any]:
    """Each rank's value, by rank; saved by torch, as float8 tensors cannot be pickled."""
    torch.save(value, file := io.BytesIO())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, file.getvalue())
    return [torch.load(io.BytesIO(data), weights_only=False) for data in every]


def merge(ranks: list[list[Comparison]]) -> list[Comparison]:
    """All ranks' comparisons, merged by tensor."""
    merged: dict[tuple[str, str], Comparison] = {}
    for comparison in chain.from_iterable(ranks):
        key = (comparison.kind, comparison.name)
        merged[key] = merged[key] + comparison if key in merged else comparison
    return list(merged.values())
