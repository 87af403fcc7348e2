"""A linear layer that multiplies in float8, with the casts and kernels of torchao.

Each product of two matrices takes operands that are scaled so that they fill the range of float8:

    forward          x [N, I] @ w^T [I, O]
    input gradient   g [N, O] @ w [O, I]
    weight gradient  g^T [O, N] @ x [N, I]

What is divided over ranks is scaled by the largest element of all parts, so that a rank's part is
rounded as it is in the whole. So is a scale of a row whose elements are divided. Tokens that are
divided are not: ranks of cp, and of tp between sharded layers, scale by their own, as microbatches
do.

Shapes: N tokens, I and O features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchao.float8.config import (
    CastConfig,
    Float8LinearConfig,
    ScalingGranularity,
    ScalingType,
)
from torchao.float8.float8_ops import addmm_float8_unwrapped
from torchao.float8.float8_utils import amax_to_scale, pad_tensor_for_matmul, to_fp8_saturated

from titanlike.distributed.collectives import GroupInfo, largest
from titanlike.distributed.placement import DIVIDED, adds_bias_later
from titanlike.torch_private.autograd import shaped

MULTIPLE = 16  # of both sides of a matrix, for the kernels of float8


Divided = tuple[GroupInfo | None, GroupInfo | None]  # over whom dim 0 and dim 1 of a matrix are


class Float8Linear(nn.Linear):
    """What `convert` makes of a torch.nn.Linear in place: weights, hooks and attributes stay."""

    in_float8 = True
    config: Float8LinearConfig

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # as F.linear has it
            input = input.to(torch.get_autocast_dtype(kind))
        bias = None if adds_bias_later(self) else self.bias
        divided = vars(self).get(DIVIDED, (None, None))
        output = _Product.apply(input, self.weight, self.config, divided)
        return output if bias is None else output + bias.to(output.dtype)


def convert(layer: nn.Module, config: Float8LinearConfig) -> None:
    layer.__class__ = Float8Linear
    vars(layer)["config"] = config


class Operand(NamedTuple):
    data: Tensor  # float8; as it was, without a scale
    scale: Tensor | None  # by which all, or each row or column was multiplied

    def t(self) -> Operand:
        scale = self.scale
        return Operand(self.data.t(), scale if scale is None else scale.t())


def cast(
    x: Tensor,
    kind: CastConfig,
    config: Float8LinearConfig,
    dim: int,
    divided: Divided,
    known: Tensor | None = None,
) -> Operand:
    """A matrix as an operand; dim: which the product sums over. known: the scale, where it is."""
    if kind.scaling_type is ScalingType.DISABLED:
        return Operand(x, None)
    if known is None:
        if _of_tensor(kind):
            amax = largest(x.detach().abs().amax(), divided[0] or divided[1])
        else:
            amax = largest(x.detach().abs().amax(dim, keepdim=True), divided[dim])
        known = amax_to_scale(amax, kind.target_dtype, config.round_scales_to_power_of_2)
    return Operand(to_fp8_saturated(x.float() * known, kind.target_dtype), known)


def _of_tensor(kind: CastConfig) -> bool:
    """Whether all elements have one scale: that of another product with the same matrix."""
    tensorwise = kind.scaling_granularity is ScalingGranularity.TENSORWISE
    return tensorwise and kind.scaling_type is not ScalingType.DISABLED


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, config: Float8LinearConfig, divided: Divided
    ) -> Tensor:
        x = cast(_rows(input), config.cast_config_input, config, 1, (None, divided[1]))
        w = cast(weight, config.cast_config_weight, config, 1, divided)
        result = _multiply(x, w.t(), input.dtype, config, "output")
        ctx.save_for_backward(input, weight, x.scale, w.scale)
        ctx.config, ctx.divided = config, divided
        # no view: what a custom function returns could not be changed in place then
        return shaped(result, (*input.shape[:-1], result.shape[-1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input, weight, x_scale, w_scale = ctx.saved_tensors
        config, divided = ctx.config, ctx.divided
        of_input = of_weight = None
        dtype, gradient = gradient.dtype, _rows(gradient)
        g = cast(gradient, config.cast_config_grad_output, config, 1, (None, divided[0]))
        if ctx.needs_input_grad[0]:
            kind = config.cast_config_weight_for_grad_input
            known = w_scale if _of_tensor(config.cast_config_weight) else None
            w = cast(weight, kind, config, 0, divided, known)
            of_input = _multiply(g, w, dtype, config, "grad_input").view(input.shape)
        if ctx.needs_input_grad[1]:
            kind = config.cast_config_input_for_grad_weight
            known = x_scale if _of_tensor(kind) else None
            x = cast(_rows(input), kind, config, 0, (None, divided[1]), known)
            kind = config.cast_config_grad_output_for_grad_weight
            known = g.scale if _of_tensor(kind) else None
            g = g if known is not None else cast(gradient, kind, config, 0, (None, None))
            of_weight = _multiply(g.t(), x, dtype, config, "grad_weight")
        return of_input, of_weight, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _multiply(
    a: Operand, b: Operand, dtype: torch.dtype, config: Float8LinearConfig, which: str
) -> Tensor:
    if a.scale is None or b.scale is None:
        return torch.mm(a.data, b.data)
    if config.emulate:
        return torch.mm(a.data.float() / a.scale, b.data.float() / b.scale).to(dtype)
    rows, columns = a.data.shape[0], b.data.shape[1]
    left, right, a_scale, b_scale = a.data, b.data, a.scale, b.scale
    if a_scale.dim() != b_scale.dim():  # kernels take scales of one kind
        a_scale, b_scale = a_scale.expand(rows, 1), b_scale.expand(1, columns)
    if left.shape[1] % MULTIPLE:  # tokens, or a rank's part of features
        left, right = pad_tensor_for_matmul(left, 1), pad_tensor_for_matmul(right, 0)
    if columns % MULTIPLE:
        right = pad_tensor_for_matmul(right, 1)
        b_scale = pad_tensor_for_matmul(b_scale, 1) if b_scale.dim() else b_scale
    fast = getattr(config, f"gemm_config_{which}").use_fast_accum
    # kernels take rows of the first, columns of the second
    result = addmm_float8_unwrapped(
        left.contiguous(), a_scale, right.t().contiguous().t(), b_scale, dtype, use_fast_accum=fast
    )
    return result[:, :columns]
