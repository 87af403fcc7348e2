"""transformers' attention with documents by their offsets, and with a GPU's kernels in order.

transformers' `sdpa` computes everything else, so that its numbers are transformers' own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from titanlike.models.attention import attention, by_priority
from titanlike.models.documents import Documents

NAME = "titanlike"  # among transformers' attention functions, beside sdpa and eager


def takes_documents(kind: Any) -> bool:
    """Whether a class of transformers hands its mask to the attention function unseen.

    Those that may be given flex attention's mask, which is no tensor either, do.
    """
    return bool(kind._supports_attention_backend and kind._supports_flex_attn)


def register() -> None:
    """Let transformers know `_attention` as `NAME`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Documents | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """[B, H, T, E] and [B, K, T, E] twice -> [B, T, H, E], and no probabilities."""
    if isinstance(attention_mask, Documents):
        result = attention(
            query, key, value, attention_mask, scale=scaling, dropout=dropout
        )  # [B, H, T, E]
        return result.transpose(1, 2).contiguous(), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def sdpa(query: Tensor) -> tuple[Tensor, None]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **others
        )

    return by_priority(sdpa, query)
