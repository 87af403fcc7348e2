"""Routed experts: which a token goes to, the tokens sorted by expert, and the experts themselves.

The contract of a module of experts, which expert parallelism and the count of tokens rely on:

    experts(tokens, counts) -> results

tokens [S, D] are sorted by expert, counts [E] (int64, of sum S) says how many each expert has, the
results [S, D] are in the order of the tokens. All of its parameters have the experts first, [E, ...];
its class has the attribute `sorted_by_expert = True`, it has `num_experts` (E) and `top_k` (K). No
token is dropped.

Shapes: N tokens, D hidden_size, E experts, K experts that a token goes to, S = N * K,
F moe_intermediate_size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.models.expert_linear import expert_linear


class Experts(nn.Module):
    """SwiGLU networks (arXiv 2002.05202) side by side."""

    sorted_by_expert = True

    def __init__(self, experts: int, top_k: int, hidden_size: int, width: int):
        super().__init__()
        self.num_experts, self.top_k = experts, top_k
        self.gate_proj = nn.Parameter(torch.empty(experts, width, hidden_size))
        self.up_proj = nn.Parameter(torch.empty(experts, width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden_size, width))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:  # [S, D], [E] -> [S, D]
        gate = expert_linear(tokens, self.gate_proj, counts)  # [S, F]
        up = expert_linear(tokens, self.up_proj, counts)
        return expert_linear(F.silu(gate) * up, self.down_proj, counts)


def through_experts(experts: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The weighted sum of what a token's experts give: x [N, D], weights [N, K], chosen [N, K] int64
    -> [N, D] in the dtype of x.

    experts: a module as above.
    """
    flat = chosen.flatten()
    counts = torch.zeros(experts.num_experts, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    order = flat.argsort(stable=True)  # place in the sorted tokens -> place in [N * K]
    place = torch.empty_like(order)  # the reverse
    place.scatter_(0, order, torch.arange(len(order), device=x.device))
    results = experts(_Sorted.apply(x, order, place), counts)  # [S, D]
    results = _Permuted.apply(results, place, order).unflatten(0, chosen.shape)  # [N, K, D]
    return (weights.to(x.dtype).unsqueeze(1) @ results).squeeze(1)


class _Sorted(torch.autograd.Function):
    """Each row K times, in an order: [N, D] -> [N * K, D].

    Plain indexing has the same values; its backward adds rows up in an order that GPUs do not repeat.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.rows = x.shape[0]
        return x.index_select(0, order // (order.shape[0] // x.shape[0]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (place,) = ctx.saved_tensors
        return gradient.index_select(0, place).unflatten(0, (ctx.rows, -1)).sum(1), None, None


class _Permuted(torch.autograd.Function):
    """Rows in another order, whose reverse is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, reverse: Tensor) -> Tensor:
        ctx.save_for_backward(reverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (reverse,) = ctx.saved_tensors
        return gradient.index_select(0, reverse), None, None


class AddLoss(torch.autograd.Function):
    """The same tensor; the backward adds a loss (a scalar) to that of the model.

    So a loss from inside a block reaches its gradients in every pipeline stage without being sent.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dtype, device = ctx.like
        return gradient, torch.ones((), dtype=dtype, device=device)
