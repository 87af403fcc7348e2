"""Causal attention of all models, and the torch kernels that compute it.

| where, what | kernel |
|---|---|
| CPU | scaled_dot_product_attention; documents as a mask |
| GPU, no mask | the first of cuDNN, flash, efficient, math that supports the arguments |
| GPU, a user's mask | the same, except flash |
| GPU, documents, bf16 or fp16 | varlen attention: flash with document offsets |
| GPU, documents, fp32 | flex attention with a block mask, compiled |
| GPU, documents, otherwise (dropout, fp64, narrow heads) | as a mask |
| GPU, documents, with sinks | flex attention, whose log-sum-exp gives the sinks' share |
| sinks, otherwise | an additional key, whose scores are the sinks, in a mask |

Shapes: B batch, T tokens, H query heads, K key/value heads, E head dim, N documents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlike.core.models.documents import Documents, Mask

# Fastest first. Flash here is FlashAttention 2, which cuDNN beats on Hopper and later.
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax(q k^T * scale) v: q [B, H, T, E], k and v [B, K, T, E] -> [B, H, T, E].

    K divides H: each key/value head is shared by H / K consecutive query heads. mask: None = causal
    over the whole sequence; `Documents`; or bool [B or 1, 1, T, T] (query, key; True = attends),
    which is used as given, and may cover only some queries. scale: None = E ** -0.5. sinks: [H],
    one more score in each head's softmax, without a value (arXiv 2309.17453); the mask is then
    `Documents`, or this rank has all tokens.
    """
    if isinstance(mask, Documents) and q.is_meta:
        # document lengths are unknown here, so count the FLOPs of full sequences
        window, bound = mask.window, None
        if window is not None and window < k.size(2) and mask.attend is None:
            k, v = k[:, :, :window], v[:, :, :window]  # as many keys as each query attends to
            bound = torch.empty(q.size(2), window, dtype=torch.bool, device="meta")
        y = undivided_attention(q, k, v, bound, scale, dropout, F.scaled_dot_product_attention)
        return y if sinks is None else y * sinks.sigmoid().to(y.dtype).view(-1, 1, 1)
    if isinstance(mask, Documents) and mask.attend is not None:
        return mask.attend(q, k, v, mask, scale, dropout, sinks)
    whole = F.scaled_dot_product_attention
    return undivided_attention(q, k, v, mask, scale, dropout, whole, sinks)


def undivided_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    dropout: float,
    function: Callable[..., Any] = torch.ops.aten.scaled_dot_product_attention,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `attention` on a rank that has all tokens; `function` is an operator that no dispatch
    mode replaces."""
    if isinstance(mask, Documents):
        from titanlike.core.models import document_attention as kernels

        if not dropout and sinks is None and kernels.takes_offsets(q, v):
            return kernels.by_offsets(q, k, v, mask, scale)
        if not dropout and kernels.takes_blocks(q, v):
            return kernels.by_blocks(q, k, v, mask, scale, sinks)
        mask = kernels.document_mask(mask, q.size(0), q.size(2))
    width = v.size(-1)
    if sinks is not None:
        scale = q.size(-1) ** -0.5 if scale is None else scale
        q, k, v, mask = with_sinks(q, k, v, mask, sinks / scale)
    half = q.dtype in (torch.bfloat16, torch.float16)
    # the efficient kernel, which takes masks and fp32, takes no grouped queries
    if q.is_cuda and (mask is not None or not half):
        groups = q.size(1) // k.size(1)
        k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
    y = by_priority(
        function,
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.size(1) != k.size(1),
    )
    return y if sinks is None else y[..., :width]


def with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add a first key that every query attends to, whose score is its head's entry of `sinks` [H]
    and whose value is zero. Heads become 8 features wider, as kernels require."""
    if mask is None:
        mask = q.new_ones(q.size(2), k.size(2), dtype=torch.bool).tril(k.size(2) - q.size(2))
    column = sinks.to(q.dtype).view(-1, 1, 1).expand(*q.shape[:3], 1)
    q = F.pad(torch.cat([q, column], -1), (0, 7))
    k, v = (F.pad(x, (0, 8, 1, 0)) for x in (k, v))
    first = torch.zeros_like(k[0, 0])
    first[0, -8] = 1
    return q, k + first, v, F.pad(mask, (1, 0), value=True)


def by_priority(function: Callable[..., Any], q: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call `function(q, *args, **kwargs)` such that GPUs try the kernels of `BACKENDS` in that
    order."""
    if not q.is_cuda:
        return function(q, *args, **kwargs)
    with sdpa_kernel(BACKENDS, set_priority=True):
        return function(q, *args, **kwargs)
