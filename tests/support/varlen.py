"""torch's varlen attention, which needs a GPU, computed on the CPU document by document."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import flex_attention, varlen

from titanlike.core.models import document_attention, documents


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """[B * T, H, E], [B * T, K, E] twice -> [B * T, H, E]; it trusts its arguments."""
    assert cu_seq_q is cu_seq_k and cu_seq_q.dtype == torch.int32 and window_size[1] == 0
    assert enable_gqa or query.size(1) == key.size(1)
    lengths = cu_seq_q.diff().tolist()
    assert min(lengths) >= 0 and max(lengths) <= max_q == max_k and sum(lengths) == len(query)
    results = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        at = torch.arange(len(q))
        allowed = at[:, None] >= at
        if window_size[0] >= 0:
            allowed &= at[:, None] - at <= window_size[0]
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        scores = torch.einsum("qhe,khe->hqk", q, k) * (scale or q.size(-1) ** -0.5)
        shares = scores.masked_fill(~allowed, -math.inf).softmax(dim=-1)
        results.append(torch.einsum("hqk,khe->qhe", shares, v))
    return torch.cat(results)


@contextmanager
def as_on_a_gpu(*, kernel: bool = True) -> Iterator[None]:
    """Within it, models take documents by offsets; `kernel`: varlen attention takes fp32, too."""
    with (
        mock.patch.object(documents, "takes_documents", lambda ids: True),
        mock.patch.object(document_attention, "takes_offsets", lambda q, v: kernel),
        mock.patch.object(document_attention, "takes_blocks", lambda q, v: True),
        mock.patch.object(varlen, "varlen_attn", varlen_attn),
        mock.patch.object(documents, "TILE", 4),
        mock.patch.object(document_attention, "TILE", 4),
    ):
        yield


@contextmanager
def uncompiled_flex() -> Iterator[None]:
    """Within it flex attention runs uncompiled, which torch computes on the CPU, and refuses to
    differentiate."""
    with (
        mock.patch.object(flex_attention, "_validate_device", lambda *_: None),
        mock.patch.object(document_attention, "_compiled", lambda function: function),
    ):
        yield
