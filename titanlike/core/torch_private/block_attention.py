"""Attention with log-sum-exp outputs, for attention over blocks of keys, and its gradient; and
causal attention of a sequence's last queries.

scaled_dot_product_attention does not return the log-sum-exp, which combining blocks needs. Test:
test_block_attention.py::test_attention_gives_no_sums
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten


class Block(NamedTuple):
    """Attention of queries [B, H, t, E] to keys and values [B, K, s, E], of each H / K heads."""

    result: Tensor  # [B, H, t, E]
    sums: Tensor  # fp32 [B, H, t]: log-sum-exp of the scores


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Block:
    """Attention of one block of keys; causal: query i attends to keys 0 to i."""
    if q.device.type == "cpu":
        return Block(
            *_aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        )
    if _takes_flash(q):
        result, sums, *_ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
        return Block(result, sums)
    k, v = (_of_each_head(x, q) for x in (k, v))
    result, sums, *_ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return Block(result, sums[..., : q.shape[2]])  # the kernel rounds it up to a multiple of 32


def backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    whole: Block,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; `whole` is the attention of the queries to all their keys."""
    result, sums = whole
    # GPU kernels ignore strides: without this, gradients are silently wrong
    sums = sums.contiguous()
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, result, sums, 0.0, causal, scale=scale
        )
    none = torch.empty((), dtype=torch.int64, device=q.device)  # no dropout
    if _takes_flash(q):
        lengths: list[Any] = [None, None, q.shape[2], k.shape[2]]
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        return _aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, result, sums, *lengths, 0.0, causal, seed, none, scale=scale
        )
    padding = -q.shape[2] % 32
    sums = torch.nn.functional.pad(sums, (0, padding), value=float("inf")) if padding else sums
    output_mask = [True, True, True, False]
    keys, values = (_of_each_head(x, q) for x in (k, v))
    dq, *both, _ = _aten._scaled_dot_product_efficient_attention_backward(
        *(gradient, q, keys, values, None, result, sums, none, none, 0.0, output_mask, causal),
        scale=scale,
    )
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).float().sum(2) for x in both)
    return dq, dk, dv


def _of_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values for each query head, for a kernel without grouped queries."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) if x.shape[1] < q.shape[1] else x


def causal_lower_right(
    q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Causal attention of the last t of T tokens: q [B, H, t, E], k and v [B, K, T, E] -> [B, H, t,
    E].

    torch.compile cannot trace torch's bias for it (`causal_lower_right`): "Calling subclass default
    constructor with more than tensor argument". Flash's operator aligns queries with the last keys.
    Test: test_block_attention.py::test_torchs_bias_breaks_the_graph
    """
    if _aligns_last(q, v):
        return _aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, True, False, scale=scale
        )[0]
    mask = None  # on meta, as flash's kernel on GPUs takes none
    if not q.is_meta:
        positions = torch.arange(k.shape[2], device=q.device)
        mask = positions[-q.shape[2] :, None] >= positions
    if q.is_cuda and enable_gqa:  # the kernel with a mask has no grouped queries
        k, v = (_of_each_head(x, q) for x in (k, v))
        enable_gqa = False
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa
    )


def _aligns_last(q: Tensor, v: Tensor) -> bool:
    width = q.shape[-1]
    fits = width == v.shape[-1] and width % 8 == 0 and width <= 256
    return q.is_cuda and _takes_flash(q) and fits


def _takes_flash(q: Tensor) -> bool:
    return q.is_meta or q.dtype in (torch.bfloat16, torch.float16)
