"""A linear layer with a matrix for each expert: rows that are sorted by expert, times their own matrix.

An operator of our own: how it computes is decided where it runs, by what the device and the sizes
allow, and neither a compiled block nor a forward on meta tensors has to know how many rows an expert
gets. FLOPs and saved bytes are those of all rows together, however they are shared.

Shapes: N rows, E experts, I inputs, O outputs of a matrix.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

EXPERT_LINEAR = "titanlike.expert_linear"  # the operator's name
_ALIGNED = 16  # bytes between rows, of which grouped_mm wants a multiple


def expert_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """rows [N, I], those of expert 0 first; weight [E, O, I]; counts [E] int64, of sum N, how many
    rows each has -> [N, O] in the dtype of the rows, which is that of the weight."""
    return torch.ops.titanlike.expert_linear(rows, weight, counts)


@torch.library.custom_op("titanlike::expert_linear", mutates_args=())
def _linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    if runs_grouped(rows, weight):
        return F.grouped_mm(rows.contiguous(), weight.mT, offs=_ends(counts))
    out = rows.new_empty(len(rows), weight.shape[1])
    sizes = counts.tolist()
    for part, matrix, into in zip(rows.split(sizes), weight, out.split(sizes), strict=True):
        torch.mm(part, matrix.t(), out=into)
    return out


@_linear.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@torch.library.custom_op("titanlike::expert_linear_weight", mutates_args=())
def _weight_gradient(gradient: Tensor, rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    """gradient [N, O], rows [N, I] -> [E, O, I]; an expert without rows has zeros."""
    if runs_grouped(rows, weight):
        transposed = gradient.contiguous().t()
        found = F.grouped_mm(transposed, rows.contiguous(), offs=_ends(counts))
        if found.device.type != "cpu":  # a kernel may leave out what has no rows
            found.masked_fill_((counts == 0)[:, None, None], 0)
        return found
    out = torch.empty_like(weight, memory_format=torch.contiguous_format)
    sizes = counts.tolist()
    for part, row, into in zip(gradient.split(sizes), rows.split(sizes), out, strict=True):
        torch.mm(part.t(), row, out=into)
    return out


@_weight_gradient.register_fake
def _(gradient: Tensor, rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def runs_grouped(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product takes these: it wants aligned rows, and at least one.

    On Hopper and later it waits for no counts in bf16; its fallback elsewhere reads them."""
    bytes_of_rows = [size * rows.element_size() for size in weight.shape[1:]]
    return len(rows) > 0 and not any(size % _ALIGNED for size in bytes_of_rows)


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> Any:
    rows, weight, counts = ctx.saved_tensors
    of_rows = of_weight = None
    if ctx.needs_input_grad[0]:
        of_rows = torch.ops.titanlike.expert_linear(gradient, weight.mT, counts)
    if ctx.needs_input_grad[1]:
        of_weight = torch.ops.titanlike.expert_linear_weight(gradient, rows, counts, weight)
    return of_rows, of_weight, None


_linear.register_autograd(_backward, setup_context=_setup)


@register_flop_formula(torch.ops.titanlike.expert_linear)
def _linear_flops(rows: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.titanlike.expert_linear_weight)
def _weight_flops(gradient: Any, rows: Any, *_: Any, **__: Any) -> int:
    return 2 * rows[0] * gradient[1] * rows[1]
