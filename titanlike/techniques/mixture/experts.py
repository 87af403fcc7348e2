"""Routed experts: routing, sorting tokens by expert, and the experts themselves.

The contract of a module of experts, for expert parallelism and token counts:

    experts(tokens, counts) -> results

tokens [S, D] are sorted by expert, counts [E] (int64, sum S) are the tokens of each expert, results
[S, D] are in the order of the tokens. Dimension 0 of all its parameters is the expert, [E, ...];
its class has the attribute `sorted_by_expert = True`, it has `num_experts` (E) and `top_k` (K). No
token is dropped. An attribute `independent_rows` is set to True with numerics=exact: a row's bits
must then not depend on the other rows. A function `without_padding(counts, chosen)` is set where
padding is to be left out of what is counted: `through_experts` passes counts through it. An
attribute `product` is set by precision=float8, to use instead of `expert_linear`.

Shapes: N tokens, D hidden_size, E experts, K experts per token, S = N * K, F moe_intermediate_size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from titanlike.core.models.llama import swiglu

EXPERT_LINEAR = "titanlike.expert_linear"  # the operator's name
_REGISTER = 64  # elements; a multiple of the length of a CPU's vector registers
_ALIGNED = 16  # bytes; grouped_mm needs row strides that are multiples of it


class Experts(nn.Module):
    """Several SwiGLU networks (arXiv 2002.05202) with stacked weights."""

    sorted_by_expert = True
    independent_rows = False
    product: Any = None

    def __init__(self, experts: int, top_k: int, hidden_size: int, width: int):
        super().__init__()
        self.num_experts, self.top_k = experts, top_k
        self.gate_proj = nn.Parameter(torch.empty(experts, width, hidden_size))
        self.up_proj = nn.Parameter(torch.empty(experts, width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden_size, width))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:  # [S, D], [E] -> [S, D]
        linear = self.product or expert_linear
        gate = linear(tokens, self.gate_proj, counts)  # [S, F]
        up = linear(tokens, self.up_proj, counts)
        return linear(self._activated(gate, up), self.down_proj, counts)

    activation = staticmethod(swiglu)

    def _activated(self, gate: Tensor, up: Tensor) -> Tensor:
        missing = -gate.numel() % _REGISTER
        if not (self.independent_rows and missing):
            return self.activation(gate, up)
        # torch's CPU kernels round the last elements of a tensor, which do not fill a vector
        # register, differently
        gate_, up_ = (F.pad(x.flatten(), (0, missing)) for x in (gate, up))
        return self.activation(gate_, up_)[: gate.numel()].view(gate.shape)


def through_experts(
    experts: Any,
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    beside: Callable[[], Tensor] | None = None,
) -> Tensor:
    """The weighted sum of each token's experts: x [N, D], weights [N, K], chosen [N, K] int64 ->
    [N, D] in the dtype of x.

    experts: a module as above. Expert parallelism may set `takes_unsorted` on it: then it receives
    unsorted tokens [N, D], also the sorting order and the weights [N, K], and does the rest.
    beside: computes another summand [..., D] without experts; a module with `computes_beside`
    receives it, calls it while tokens travel, and returns its result after its own.
    """

    def computed(*args: Tensor) -> tuple[Tensor, Tensor | None]:
        if beside is None:
            return experts(*args), None
        if getattr(experts, "computes_beside", False):
            return experts(*args, beside=beside)
        return experts(*args), beside()

    flat = chosen.flatten()
    counts = torch.zeros(experts.num_experts, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    if (without_padding := getattr(experts, "without_padding", None)) is not None:
        counts = without_padding(counts, chosen)
    order = flat.argsort(stable=True)  # position in the sorted tokens -> position in [N * K]
    if getattr(experts, "takes_unsorted", False):
        y, added = computed(x, counts, order, weights.to(x.dtype))
        return y if added is None else y + added.flatten(0, -2)
    place = torch.empty_like(order)  # the inverse
    place.scatter_(0, order, torch.arange(len(order), device=x.device))
    sorted_rows = _Sorted.apply(x, order, place, chosen.shape[1])
    results, added = computed(sorted_rows, counts)  # [S, D]
    results = _Sorted.apply(results, place, order, 1).unflatten(0, chosen.shape)  # [N, K, D]
    y = (weights.to(x.dtype).unsqueeze(1) @ results).squeeze(1)
    return y if added is None else y + added.flatten(0, -2)


class _Sorted(torch.autograd.Function):
    """Repeat each row `copies` times, in an order: [N, D] -> [N * copies, D]; place: its inverse.

    Equals indexing, whose backward sums rows in a nondeterministic order on GPUs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.copies = copies
        return x.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (place,) = ctx.saved_tensors
        rows = gradient.index_select(0, place)
        if ctx.copies > 1:
            rows = rows.unflatten(0, (-1, ctx.copies)).sum(1)
        return rows, None, None, None


class AddLoss(torch.autograd.Function):
    """Identity whose backward adds a loss (a scalar) to the model's.

    So a loss within a block reaches its gradients in every pipeline stage without being sent.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dtype, device = ctx.like
        return gradient, torch.ones((), dtype=dtype, device=device)


# --- a linear layer with a matrix per expert ------------------------------------------------------
#
# A custom operator: its kernel is chosen at run time, by device and sizes, and neither a compiled
# block nor a forward on meta needs the number of rows per expert. FLOPs and saved bytes are those
# of all rows together.
#
# Shapes: N rows, E experts, I inputs, O outputs of a matrix.


def expert_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply each expert's rows with its matrix. rows [N, I], sorted by expert; weight [E, O, I];
    counts [E] int64, rows per expert -> [N, O] in the dtype of rows and weight."""
    return torch.ops.titanlike.expert_linear(rows, weight, counts)


@torch.library.custom_op("titanlike::expert_linear", mutates_args=())
def _linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    if runs_grouped(rows, weight):
        return F.grouped_mm(_in_a_row(rows), weight.mT, offs=_ends(counts))
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
    """gradient [N, O], rows [N, I] -> [E, O, I]; zeros for an expert without rows."""
    if runs_grouped(rows, weight):
        transposed = _in_a_row(gradient).t()
        result = F.grouped_mm(transposed, _in_a_row(rows), offs=_ends(counts))
        if not _writes_all(rows):
            result.masked_fill_((counts == 0)[:, None, None], 0)
        return result
    out = torch.empty_like(weight, memory_format=torch.contiguous_format)
    sizes = counts.tolist()
    for part, row, into in zip(gradient.split(sizes), rows.split(sizes), out, strict=True):
        torch.mm(part.t(), row, out=into)
    return out


@_weight_gradient.register_fake
def _(gradient: Tensor, rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def runs_grouped(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped matmul supports these: it needs aligned rows, and at least one.

    In bf16 on Hopper and later it does not read counts on the host; its fallback elsewhere does.
    """
    bytes_of_rows = [size * rows.element_size() for size in weight.shape[1:]]
    return len(rows) > 0 and not any(size % _ALIGNED for size in bytes_of_rows)


def _writes_all(rows: Tensor) -> bool:
    """Whether the grouped matmul of these writes zeros for experts without rows, too: the CPU's,
    and in bf16 that of NVIDIA's 9.x and 10.x."""
    if not rows.is_cuda:
        return rows.device.type == "cpu"
    major, _ = torch.cuda.get_device_capability(rows.device)
    return rows.dtype == torch.bfloat16 and not torch.version.hip and major in (9, 10)


def _in_a_row(x: Tensor) -> Tensor:
    """Contiguous, even for a single row, which torch calls contiguous with any stride."""
    return x.contiguous().view(-1).view(x.shape)


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> Any:
    rows, weight, counts = ctx.saved_tensors
    row_gradient = weight_gradient = None
    if ctx.needs_input_grad[0]:
        row_gradient = torch.ops.titanlike.expert_linear(gradient, weight.mT, counts)
    if ctx.needs_input_grad[1]:
        weight_gradient = torch.ops.titanlike.expert_linear_weight(gradient, rows, counts, weight)
    return row_gradient, weight_gradient, None


_linear.register_autograd(_backward, setup_context=_setup)


@register_flop_formula(torch.ops.titanlike.expert_linear)
def _linear_flops(rows: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.titanlike.expert_linear_weight)
def _weight_flops(gradient: Any, rows: Any, *_: Any, **__: Any) -> int:
    return 2 * rows[0] * gradient[1] * rows[1]
