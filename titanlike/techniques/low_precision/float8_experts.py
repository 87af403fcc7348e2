"""Routed experts in float8: grouped matmuls with a scale per row.

Each matmul uses the recipe of torchao's grouped matmuls, whatever `precision.recipe` is for linear
layers: e4m3 operands with a power-of-2 scale for each row along the summed dimension, of tokens and
of each expert's matrices; in weight gradients for each feature of an expert's tokens. So a token's
result depends on no other token, wherever its experts are.

Shapes: N rows, E experts, I inputs, O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8.config import e4m3_dtype
from torchao.float8.float8_training_tensor import Float8TrainingTensor, LinearMMConfig
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

from titanlike.core.torch_private.dtensor import is_dtensor, local
from titanlike.core.torch_private.fsdp import gather_other
from titanlike.core.torch_private.operators import scaled_grouped_mm
from titanlike.techniques.low_precision.float8_linear import MULTIPLE

Operand = tuple[Tensor, Tensor]  # e4m3 values, and the scale that multiplied each row


class Product:
    """The matmul of a module of experts, as `techniques/mixture/experts.py::expert_linear` but with float8
    operands."""

    def __init__(self, experts: nn.Module, weights: bool, kernels: bool) -> None:
        """weights: also for weight gradients; kernels: use a GPU's, else round operands to float8
        and multiply in fp32."""
        self.experts, self.weights, self.kernels = experts, weights, kernels
        # a parameter as cast by `cast_weights` or gathered by FSDP: [E, O, I] for the forward,
        # [E, I, O] for the input gradient, each followed by its scale
        self.casts: dict[str, tuple[Tensor, ...]] = {}
        self.shards: dict[str, tuple[Tensor, ...]] = {}  # FSDP gathers these

    def __call__(self, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        kernels = self.kernels and not rows.is_meta
        return _Product.apply(self.weights, kernels, rows, weight, counts, *self._casts(weight))

    def in_bf16(self, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """Multiply as `expert_linear`, in bf16."""
        if isinstance(weight, Float8TrainingTensor):
            weight = _rounded(*self._casts(weight)[:2]).to(rows.dtype)
        return torch.ops.titanlike.expert_linear(rows, weight, counts)

    def _casts(self, weight: Tensor) -> tuple[Tensor, ...]:
        for name, casts in self.casts.items():
            if getattr(self.experts, name) is weight:
                return casts
        return ()

    # --- weights, once a step

    def gather_casts(self) -> None:
        """Let FSDP gather the casts of the matrices if each of its ranks has full experts; others
        are gathered in bf16."""

        def gather(name: str, weight: nn.Parameter) -> None:
            def receive(*gathered: Tensor) -> Tensor:
                self.casts[name] = gathered
                # reading it as the weight gives NaN; a scalar from the CPU would wait for the GPU
                scale = gathered[0].new_full((), torch.nan, dtype=torch.float32)
                return Float8TrainingTensor(gathered[0], scale, torch.bfloat16, LinearMMConfig())

            gather_other(weight, lambda: self.shards[name], receive)
            self.shards[name] = ()

        for name, weight in self._matrices():
            if (ranks := _ranks(weight)) > 1 and weight.shape[0] % ranks == 0:
                gather(name, weight)

    @torch.no_grad()
    def cast_weights(self) -> None:
        """Cast this rank's part of each matrix for a step."""
        for name, weight in self._matrices():
            if name in self.shards or _ranks(weight) == 1:
                x = local(weight).to(torch.bfloat16)
                casts = *operand(x), *operand(x.mT.contiguous())
                (self.shards if name in self.shards else self.casts)[name] = casts

    def drop_casts(self) -> None:
        """Free the casts of `cast_weights`; FSDP frees gathered ones."""
        self.casts = {name: casts for name, casts in self.casts.items() if name in self.shards}
        self.shards = dict.fromkeys(self.shards, ())

    def _matrices(self) -> Iterator[tuple[str, nn.Parameter]]:
        named = self.experts.named_parameters(recurse=False)
        return ((name, parameter) for name, parameter in named if parameter.dim() == 3)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weights: bool,
        kernels: bool,
        rows: Tensor,
        weight: Tensor,
        counts: Tensor,
        *casts: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows, counts, *(casts[2:] or (weight,)))
        ctx.weights, ctx.kernels, ctx.given = weights, kernels, len(casts)
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        return _multiply(rows, casts[:2] or operand(weight), counts, kernels)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, counts, *later = ctx.saved_tensors
        of_rows = of_weight = None
        if ctx.needs_input_grad[2]:
            transposed = later if ctx.given else operand(later[0].mT.contiguous())
            of_rows = _multiply(gradient, transposed, counts, ctx.kernels)
        if ctx.needs_input_grad[3]:
            if ctx.weights and ctx.kernels:
                of_weight = _weight_gradient(gradient, rows, counts)
            else:
                if ctx.weights:
                    gradient, rows = (_by_expert(x, counts) for x in (gradient, rows))
                like = gradient.new_empty(ctx.shape)
                of_weight = torch.ops.titanlike.expert_linear_weight(gradient, rows, counts, like)
            of_weight = of_weight.to(ctx.dtype)
        return None, None, of_rows, of_weight, None, *(None for _ in range(ctx.given))


def operand(x: Tensor) -> Operand:
    return _cast(x, x.abs().amax(-1, keepdim=True))


def _cast(x: Tensor, largest: Tensor) -> Operand:
    scale = amax_to_scale(largest, e4m3_dtype, round_scales_to_power_of_2=True)
    return to_fp8_saturated(x.float() * scale, e4m3_dtype), scale


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    """The operand's values in fp32."""
    return x.float() / scale


def _multiply(rows: Tensor, weight: Any, counts: Tensor, kernels: bool) -> Tensor:
    """rows [N, I], weight operand [E, O, I] -> [N, O]."""
    if not kernels:
        of_rows, of_weight = _rounded(*operand(rows)), _rounded(*weight)
        return torch.ops.titanlike.expert_linear(of_rows, of_weight, counts).to(rows.dtype)
    from torchao.prototype.moe_training.kernels import triton_fp8_rowwise_2d_scale_and_cast as cast

    place, ends, most = _places(rows, counts)
    x, scale = cast(_padded(rows, place, most), e4m3_dtype, True)
    matrices, scales = weight
    scales = scale.squeeze(1), scales.squeeze(2)
    return scaled_grouped_mm(x, matrices.mT, scales, ends, rows.dtype).index_select(0, place)


def _weight_gradient(gradient: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    from torchao.prototype.moe_training.kernels import (
        triton_fp8_per_group_colwise_scales_dual as cast,
    )

    place, ends, most = _places(rows, counts)
    g, g_scale, x, x_scale = cast(
        _padded(gradient, place, most), _padded(rows, place, most), ends, e4m3_dtype, True
    )
    return scaled_grouped_mm(g.t(), x, (g_scale, x_scale), ends, rows.dtype)


def _places(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, int]:
    """Kernels take each expert's rows in multiples of 16, padded with zeros: the position of each
    row, the end of each expert's rows, an upper bound of their number."""
    # an expert without rows would leave its weight gradient uninitialized
    sizes = ((counts + MULTIPLE - 1) // MULTIPLE).clamp(min=1) * MULTIPLE
    moved = (sizes - counts).cumsum(0) - (sizes - counts)  # offset by padding
    place = torch.arange(len(rows), device=rows.device) + moved[_experts(rows, counts)]
    most = -(-len(rows) // MULTIPLE) * MULTIPLE + MULTIPLE * len(counts)
    return place, sizes.cumsum(0, dtype=torch.int32), most


def _padded(rows: Tensor, place: Tensor, most: int) -> Tensor:
    return rows.new_zeros(most, rows.shape[1]).index_copy_(0, place, rows)


def _by_expert(x: Tensor, counts: Tensor) -> Tensor:
    """Round, with a scale for each column of each expert's rows."""
    expert = _experts(x, counts)
    largest = x.new_zeros(len(counts), x.shape[1])
    largest = largest.scatter_reduce(0, expert.unsqueeze(1).expand_as(x), x.abs(), "amax")
    return _rounded(*_cast(x, largest[expert]))


def _experts(rows: Tensor, counts: Tensor) -> Tensor:
    """The expert of each row."""
    places = torch.arange(len(rows), device=rows.device)
    return torch.bucketize(places, counts.cumsum(0), right=True)


def _ranks(weight: Any) -> int:
    """The number of ranks over which FSDP shards a weight."""
    return weight.device_mesh.size(weight.device_mesh.ndim - 1) if is_dtensor(weight) else 1
