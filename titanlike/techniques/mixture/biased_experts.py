"""GPT-OSS's experts: biases, and a clamped SwiGLU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.techniques.mixture.experts import Experts, expert_linear

ALPHA = 1.702  # sigmoid(ALPHA * x) * x is nearly GELU


class BiasedExperts(Experts):
    """Parameters have transformers' names; in the first matrix [E, 2 * F, D], gate and up are
    alternating rows."""

    def __init__(self, experts: int, top_k: int, hidden_size: int, width: int, limit: float):
        """limit: the gate is clamped from above, up from both sides."""
        nn.Module.__init__(self)
        self.num_experts, self.top_k, self.limit = experts, top_k, limit
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden_size))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * width))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden_size, width))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, hidden_size))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:  # [S, D], [E] -> [S, D]
        expert = torch.arange(counts.shape[0], device=counts.device)
        expert = expert.repeat_interleave(counts, output_size=tokens.shape[0])  # each row's expert
        linear = self.product or expert_linear
        both = linear(tokens, self.gate_up_proj, counts)  # [S, 2 * F]
        both = both + F.embedding(expert, self.gate_up_proj_bias).to(both.dtype)
        y = self._activated(both[..., ::2], both[..., 1::2])
        y = linear(y, self.down_proj, counts)
        return y + F.embedding(expert, self.down_proj_bias).to(y.dtype)

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        return _ClampedSwiGLU.apply(gate, up, self.limit)


class _ClampedSwiGLU(torch.autograd.Function):
    """(up + 1) * gate * sigmoid(ALPHA * gate) of clamped values; only `gate` and `up` are saved for
    the backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.limit = limit
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * (ALPHA * gate).sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        inside, within = gate <= ctx.limit, up.abs() <= ctx.limit
        gate, up = gate.clamp(max=ctx.limit), up.clamp(-ctx.limit, ctx.limit) + 1
        share = (ALPHA * gate).sigmoid()
        gate_gradient = gradient * up * share * (1 + ALPHA * gate * (1 - share))
        return gate_gradient * inside, gradient * gate * share * within, None
