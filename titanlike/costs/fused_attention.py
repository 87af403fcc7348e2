"""Attention on meta as fused kernels compute it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FusedAttention(TorchFunctionMode):
    """Replaces scaled_dot_product_attention, which on meta saves all probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0  # of its results, with a logsumexp for each query

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention:
            return function(*args, **kwargs)
        given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
        mask = given.get("attn_mask")
        result = _Attention.apply(given["query"], given["key"], given["value"], mask)
        self.nbytes += result.nbytes + 4 * (result.numel() // result.shape[-1])
        causal = bool(kwargs.get("is_causal", args[5] if len(args) > 5 else False))
        self.called(given["query"], given["key"], given["value"], result, causal)
        return result

    def called(self, q: Tensor, k: Tensor, v: Tensor, result: Tensor, causal: bool) -> None:
        """For those who count what it computes."""


class _Attention(torch.autograd.Function):
    """Saves what fused attention saves: its arguments, its result, a logsumexp for each query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        result = q.new_empty(*q.shape[:-1], v.shape[-1])
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, mask, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors[:3]
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None
