"""A linear layer that multiplies in float8, with torchao's casts and kernels.

Each matmul's operands are scaled to fill the range of float8:

    forward          x [N, I] @ w^T [I, O]
    input gradient   g [N, O] @ w [O, I]
    weight gradient  g^T [O, N] @ x [N, I]

Sharded operands are scaled by the maximum over all shards, so that a shard is rounded as in the
full matrix: features sharded by tp, tokens by cp; also a row's scale if its elements are sharded.
Other tokens, of dp and of tp between sharded layers, have separate scales, as microbatches have.

Shapes: N tokens, I and O features.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType
from torchao.float8.float8_ops import addmm_float8_unwrapped
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    ScaledMMConfig,
)
from torchao.float8.float8_utils import amax_to_scale, pad_tensor_for_matmul, to_fp8_saturated

from titanlike.core.distributed.collectives import GroupInfo, largest
from titanlike.core.distributed.placement import DIVIDED, adds_bias_later
from titanlike.core.torch_private.autograd import shaped
from titanlike.core.torch_private.dtensor import local
from titanlike.core.torch_private.fsdp import gather_other

MULTIPLE = 16  # float8 kernels need both sides of a matrix to be multiples of it


Divided = tuple[GroupInfo | None, GroupInfo | None]  # ranks that shard dim 0 and dim 1 of a matrix


class Operand(NamedTuple):
    data: Tensor  # float8; uncast without a scale
    scale: Tensor | None  # multiplied all elements, or each row or column

    def t(self) -> Operand:
        scale = self.scale
        return Operand(self.data.t(), scale if scale is None else scale.t())


class Float8Linear(nn.Linear):
    """A torch.nn.Linear after `convert`, in place: weights, hooks and attributes stay."""

    in_float8 = True
    config: Float8LinearConfig
    # the weight as operands of forward and input gradient, or one for both; () = cast in each
    casts: tuple[Operand, ...] = ()
    shard: Operand  # this rank's part of the weight as cast for a step, if FSDP gathers it
    tokens: GroupInfo | None = None  # cp's ranks, which shard the rows of activations

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # as in F.linear
            input = input.to(torch.get_autocast_dtype(kind))
        bias = None if adds_bias_later(self) else self.bias
        scaling = scaling_of(self)
        casts: list[Any] = [*chain(*self.casts)]
        if torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad):
            output = _Product.apply(input, self.weight, scaling, *casts)
        else:
            # torch.compile leaves the context out of a custom function that needs no gradient and
            # has two variable arguments. Symptom: blocks are not compiled in validation. Test:
            # `test_compile_fences.py::test_torch_leaves_out_the_context_of_two_variable_arguments`
            rows, *_ = scaling.results(_rows(input), self.weight, casts)
            output = rows.reshape(*input.shape[:-1], -1)
        return output if bias is None else output + bias.to(output.dtype)

    def gather_in_float8(self) -> bool:
        """Let FSDP gather the shards that `cast_weights` has cast; False = it gathers bf16."""
        weight: Any = self.weight
        mesh, kind = weight.device_mesh, self.config.cast_config_weight
        if not _of_tensor(kind) or weight.shape[0] % mesh.size(mesh.ndim - 1):
            return False

        def receive(gathered: Tensor) -> Tensor:
            data, scale = gathered.view(kind.target_dtype), self.shard.scale
            self.casts = (Operand(data, scale),)
            settings = LinearMMConfig(*[ScaledMMConfig(emulate=self.config.emulate)] * 3)
            return Float8TrainingTensor(
                data, scale, torch.bfloat16, settings, gemm_input_role=GemmInputRole.WEIGHT
            )

        gather_other(weight, lambda: (self.shard.data.view(torch.uint8),), receive)
        return True

    def drop_casts(self) -> None:
        """Free the casts of `cast_weights`."""
        if vars(self).pop("shard", None) is None:
            self.casts = ()


def convert(layer: nn.Module, config: Float8LinearConfig) -> None:
    layer.__class__ = Float8Linear
    vars(layer)["config"] = config


def largest_of(x: Tensor, kind: CastConfig, dim: int) -> Tensor:
    """The maximum that determines a scale: of all elements, or along `dim`."""
    x = x.detach().abs()
    return x.amax() if _of_tensor(kind) else x.amax(dim, keepdim=True)


def cast(
    x: Tensor,
    kind: CastConfig,
    config: Float8LinearConfig,
    dim: int,
    divided: Divided,
    known: Tensor | None = None,
) -> Operand:
    """Cast a matrix to an operand; dim: the summed dimension; known: its scale, if known."""
    if kind.scaling_type is ScalingType.DISABLED:
        return Operand(x, None)
    if hasattr(config, "cast_blocks"):
        return Operand(*config.cast_blocks(x, dim))
    if known is None:
        amax = largest_of(x, kind, dim)
        for ranks in _among(kind, dim, divided):
            amax = largest(amax, ranks)
        known = scale_of(amax, kind, config)
    return Operand(to_fp8_saturated(x.float() * known, kind.target_dtype), known)


def scale_of(amax: Tensor, kind: CastConfig, config: Float8LinearConfig) -> Tensor:
    return amax_to_scale(amax, kind.target_dtype, config.round_scales_to_power_of_2)


def _among(kind: CastConfig, dim: int, divided: Divided) -> list[GroupInfo]:
    """The ranks with shards of the elements that share a scale."""
    return [ranks for ranks in (divided if _of_tensor(kind) else divided[dim : dim + 1]) if ranks]


def _of_tensor(kind: CastConfig) -> bool:
    """Whether all elements share one scale, also used for another matmul with the same matrix."""
    tensorwise = kind.scaling_granularity is ScalingGranularity.TENSORWISE
    return tensorwise and kind.scaling_type is not ScalingType.DISABLED


class Scaling(NamedTuple):
    """How the operands of a layer's matmuls are cast."""

    config: Float8LinearConfig
    divided: Divided  # the weight
    tokens: GroupInfo | None

    def cast_shard(self, x: Tensor, ranks: GroupInfo) -> Operand:
        """Cast this rank's tokens [..., T, I] with the scale of all ranks' tokens; see
        `shared_scaling`."""
        return cast(x, self.config.cast_config_input, self.config, 1, (self.tokens, ranks))

    def results(
        self, rows: Tensor, weight: Tensor, casts: Sequence[Tensor], x: Operand | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute a layer's results; also the scales of its input and of its weight.

        casts: the tensors of `Float8Linear.casts`; x: the rows, if they are cast already.
        """
        config, divided, tokens = self
        if x is None:
            x = cast(rows, config.cast_config_input, config, 1, (tokens, divided[1]))
        kind = config.cast_config_weight
        w = Operand(*casts[:2]) if casts else cast(weight, kind, config, 1, divided)
        return _multiply(x, w.t(), rows.dtype, config, "output"), x.scale, w.scale

    def input_gradient(
        self,
        gradient: Tensor,
        weight: Tensor,
        casts: Sequence[Tensor],
        w_scale: Tensor | None = None,
    ) -> tuple[Tensor, Operand]:
        """Compute the gradient of a layer's input; also the cast gradient of its results.

        w_scale: that of `results`, if the weight is cast here.
        """
        config, g = self.config, self.cast_gradient(gradient)
        known = w_scale if _of_tensor(config.cast_config_weight) else None
        kind = config.cast_config_weight_for_grad_input
        w = Operand(*casts[-2:]) if casts else cast(weight, kind, config, 0, self.divided, known)
        return _multiply(g, w, gradient.dtype, config, "grad_input"), g

    def cast_gradient(self, gradient: Tensor) -> Operand:
        ranks = self.tokens, self.divided[0]
        return cast(gradient, self.config.cast_config_grad_output, self.config, 1, ranks)

    def cast_input(self, rows: Tensor, x_scale: Tensor | None = None) -> Operand:
        """Cast a layer's input for `weight_gradient`; x_scale: that of `results`."""
        kind = self.config.cast_config_input_for_grad_weight
        known = x_scale if _of_tensor(kind) else None
        return cast(rows, kind, self.config, 0, (self.tokens, self.divided[1]), known)

    def weight_gradient(self, gradient: Tensor, g: Operand, x: Operand) -> Tensor:
        """g: the gradient as `cast_gradient` cast it; x: of `cast_input`."""
        kind = self.config.cast_config_grad_output_for_grad_weight
        if not _of_tensor(kind):
            g = cast(gradient, kind, self.config, 0, (self.tokens, None))
        return _multiply(g.t(), x, gradient.dtype, self.config, "grad_weight")


def scaling_of(layer: Any) -> Scaling:
    return Scaling(layer.config, vars(layer).get(DIVIDED, (None, None)), layer.tokens)


def shared_scaling(layers: Sequence[Any]) -> Scaling | None:
    """How these layers cast their input, if one cast serves all of their matmuls."""
    first, *others = map(scaling_of, layers)
    config, (_, divided), tokens = first
    kind, also = config.cast_config_input, config.cast_config_input_for_grad_weight
    one = _of_tensor(kind) and kind == also and divided is None
    alike = all((o.config, o.divided[1], o.tokens) == (config, None, tokens) for o in others)
    return first if one and alike else None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, scaling: Scaling, *casts: Tensor
    ) -> Tensor:
        result, x_scale, w_scale = scaling.results(_rows(input), weight, casts)
        ctx.save_for_backward(input, x_scale, *(casts[-2:] or (weight, w_scale)))
        ctx.scaling, ctx.given = scaling, len(casts)
        # not a view: a custom function's view cannot be changed in place
        return shaped(result, (*input.shape[:-1], result.shape[-1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input, x_scale, *weight = ctx.saved_tensors
        scaling, casts = ctx.scaling, weight if ctx.given else ()
        gradient, of_input, of_weight = _rows(gradient), None, None
        if ctx.needs_input_grad[0]:
            of_rows, g = scaling.input_gradient(gradient, weight[0], casts, weight[1])
            of_input = of_rows.view(input.shape)
        else:
            g = scaling.cast_gradient(gradient)
        if ctx.needs_input_grad[1]:
            x = scaling.cast_input(_rows(input), x_scale)
            of_weight = scaling.weight_gradient(gradient, g, x)
        return of_input, of_weight, None, *(None for _ in range(ctx.given))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _multiply(
    a: Operand, b: Operand, dtype: torch.dtype, config: Float8LinearConfig, which: str
) -> Tensor:
    if a.scale is None or b.scale is None:
        return torch.mm(a.data, b.data)
    if hasattr(config, "multiply_blocks"):
        return config.multiply_blocks((a.data, a.scale), (b.data, b.scale), dtype)
    if config.emulate:
        return torch.mm(a.data.float() / a.scale, b.data.float() / b.scale).to(dtype)
    rows, columns = a.data.shape[0], b.data.shape[1]
    left, right, a_scale, b_scale = a.data, b.data, a.scale, b.scale
    if a_scale.dim() != b_scale.dim():  # kernels need equal granularities
        a_scale, b_scale = a_scale.expand(rows, 1), b_scale.expand(1, columns)
    if left.shape[1] % MULTIPLE:  # tokens, or a shard of features
        left, right = pad_tensor_for_matmul(left, 1), pad_tensor_for_matmul(right, 0)
    if columns % MULTIPLE:
        right = pad_tensor_for_matmul(right, 1)
        b_scale = pad_tensor_for_matmul(b_scale, 1) if b_scale.dim() else b_scale
    fast = getattr(config, f"gemm_config_{which}").use_fast_accum
    # kernels need a row-major first and a column-major second operand
    result = addmm_float8_unwrapped(
        left.contiguous(), a_scale, right.t().contiguous().t(), b_scale, dtype, use_fast_accum=fast
    )
    return result[:, :columns]


# --- weights, once a step --------------------------------------------------------------------------


@torch.no_grad()
def cast_weights(layers: Sequence[Float8Linear], shards: GroupInfo | None) -> None:
    """Cast this rank's part of each weight for a step, with the full weight's scales.

    shards: ranks over which FSDP shards them, for `gather_in_float8`; None = they are not sharded.
    """
    kinds: list[_Kind] = []
    for layer in layers:
        both = layer.config.cast_config_weight, layer.config.cast_config_weight_for_grad_input
        one = _of_tensor(both[0])
        kinds += [(layer, kind, 1 - i) for i, kind in enumerate(both[:1] if one else both)]
    in_blocks = hasattr(layers[0].config, "cast_blocks")
    scales = [None] * len(kinds) if in_blocks else _scales(kinds, shards)
    for layer in layers:
        layer.casts = ()
    for (layer, kind, dim), scale in zip(kinds, scales, strict=True):
        operand = cast(_in_bf16(layer), kind, layer.config, dim, (None, None), scale)
        if shards is not None:
            layer.shard = operand
        else:
            layer.casts = *layer.casts, operand


_Kind = tuple[Float8Linear, CastConfig, int]  # a cast of a weight, along a dimension


def _scales(kinds: Sequence[_Kind], shards: GroupInfo | None) -> list[Tensor]:
    amaxes = [largest_of(_in_bf16(layer), kind, dim) for layer, kind, dim in kinds]
    of_tp = [
        _among(kind, dim, vars(layer).get(DIVIDED, (None, None))) for layer, kind, dim in kinds
    ]
    if (ranks := next(chain(*of_tp), None)) is not None:
        mine = [i for i, among in enumerate(of_tp) if among]
        for i, amax in zip(mine, _together([amaxes[i] for i in mine], ranks), strict=True):
            amaxes[i] = amax
    amaxes = _together(amaxes, shards)
    return [
        scale_of(amax, kind, layer.config)
        for (layer, kind, _), amax in zip(kinds, amaxes, strict=True)
    ]


def _in_bf16(layer: Float8Linear) -> Tensor:
    return local(layer.weight).to(torch.bfloat16)


def _together(amaxes: Sequence[Tensor], ranks: GroupInfo | None) -> list[Tensor]:
    """The maxima over all ranks, in one all-reduce."""
    flat = largest(torch.cat([amax.flatten() for amax in amaxes]), ranks)
    parts = flat.split([amax.numel() for amax in amaxes])
    return [part.view_as(amax) for part, amax in zip(parts, amaxes, strict=True)]
