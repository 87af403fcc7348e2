"""The matrices of routed experts in float8: grouped products of rows with a scale each.

Each product takes the recipe of torchao's grouped products, whatever `precision.recipe` is for
linear layers: operands in e4m3, a scale that is a power of 2 for each row that is summed over, of
tokens and of each expert's matrices; in weight gradients for each feature of an expert's tokens.
So what a token gives depends on no other token, wherever its experts are.

Shapes: N rows, E experts, I inputs, O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchao.float8.config import e4m3_dtype
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

from titanlike.parallel.float8_linear import MULTIPLE

Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]


def product(weights: bool, kernels: bool) -> Multiply:
    """What multiplies as `models/experts.py::expert_linear`, but operands in float8.

    weights: also those of weight gradients; kernels: those of a GPU, or operands are rounded to
    float8 and multiplied in fp32. One object for all experts: blocks share a graph.
    """
    if kernels and weights:
        return _by_kernels
    return partial(_Product.apply, weights, kernels)


def _by_kernels(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Kernels take the rows of an expert in multiples of 16: others are zeros."""
    if rows.is_meta:
        return _Product.apply(True, False, rows, weight, counts)
    # with kernels of triton
    from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

    # none of an expert would leave its weight gradient as the memory was
    sizes = ((counts + MULTIPLE - 1) // MULTIPLE).clamp(min=1) * MULTIPLE
    moved = (sizes - counts).cumsum(0) - (sizes - counts)  # by so many rows
    place = torch.arange(len(rows), device=rows.device)
    place += moved[_experts(rows, counts)]
    most = -(-len(rows) // MULTIPLE) * MULTIPLE + MULTIPLE * len(counts)
    padded = rows.new_zeros(most, rows.shape[1]).index_copy(0, place, rows)
    ends = sizes.cumsum(0, dtype=torch.int32)
    result = _to_fp8_rowwise_then_scaled_grouped_mm(
        padded, weight.mT, ends, rows.dtype, pad_token_groups_for_grouped_mm=False
    )
    return result.index_select(0, place)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: bool, kernels: bool, rows: Tensor, weight: Tensor, counts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        ctx.weights, ctx.product = weights, _by_kernels if kernels else _emulated
        return ctx.product(rows, weight, counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weight, counts = ctx.saved_tensors
        of_rows = of_weight = None
        if ctx.needs_input_grad[2]:
            of_rows = ctx.product(gradient, weight.mT.contiguous(), counts)
        if ctx.needs_input_grad[3]:
            if ctx.weights:
                gradient, rows = (_by_expert(x, counts) for x in (gradient, rows))
            like = gradient.new_empty(weight.shape)
            of_weight = torch.ops.titanlike.expert_linear_weight(gradient, rows, counts, like)
            of_weight = of_weight.to(weight.dtype)
        return None, None, of_rows, of_weight, None


def _emulated(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    rounded = _rounded(weight, weight.abs().amax(2, keepdim=True))
    rows8 = _rounded(rows, rows.abs().amax(1, keepdim=True))
    return torch.ops.titanlike.expert_linear(rows8, rounded, counts).to(rows.dtype)


def _rounded(x: Tensor, largest: Tensor) -> Tensor:
    """In fp32."""
    scale = amax_to_scale(largest, e4m3_dtype, round_scales_to_power_of_2=True)
    return to_fp8_saturated(x.float() * scale, e4m3_dtype).float() / scale


def _by_expert(x: Tensor, counts: Tensor) -> Tensor:
    """Rounded with a scale for each column of the rows of one expert."""
    expert = _experts(x, counts)
    largest = x.new_zeros(len(counts), x.shape[1])
    largest = largest.scatter_reduce(0, expert.unsqueeze(1).expand_as(x), x.abs(), "amax")
    return _rounded(x, largest[expert])


def _experts(rows: Tensor, counts: Tensor) -> Tensor:
    """The expert of each row."""
    places = torch.arange(len(rows), device=rows.device)
    return torch.bucketize(places, counts.cumsum(0), right=True)
