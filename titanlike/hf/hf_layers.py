"""Attention and mixtures of experts in transformers' models.

Attention receives document offsets, and GPUs try kernels in titanlike's order; transformers' `sdpa`
computes everything else, so results equal transformers'.

Experts follow the contract of `experts.py`: transformers calls a module of experts with each
token's choice and weights, in token order. Here the module sorts the tokens, calls itself with
sorted tokens and counts, and sums the results: the same results, and expert parallelism and token
counts have one interface for all families. Parameters keep their names. Experts of other forms
(biases, transposed matrices) stay unchanged.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from titanlike.core.models.attention import attention, by_priority
from titanlike.core.models.documents import Documents, Mask
from titanlike.techniques.mixture.experts import expert_linear, through_experts

NAME = "titanlike"  # registered as a transformers attention function, like sdpa and eager


def takes_documents(kind: Any) -> bool:
    """Return whether a transformers class passes its mask to the attention function without
    inspecting it.

    Classes that support flex attention do, whose mask is not a tensor either.
    """
    return bool(kind._supports_attention_backend and kind._supports_flex_attn)


def register() -> None:
    """Register `_attention` with transformers as `NAME`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention [B, H, T, E] and [B, K, T, E] twice -> [B, T, H, E], without probabilities."""
    if isinstance(attention_mask, Documents):
        # [B, H, T, E]
        result = attention(query, key, value, attention_mask, scale=scaling, dropout=dropout)
        return result.transpose(1, 2).contiguous(), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def sdpa(query: Tensor) -> tuple[Tensor, None]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **others
        )

    return by_priority(sdpa, query)


class SortedExperts(nn.Module):
    """A mixin: the first base class of the experts, before transformers' own class."""

    sorted_by_expert = True
    independent_rows = True  # the activation reads half of each row, so kernels compute row by row
    product: Any = None
    num_experts: int
    top_k: int
    _apply_gate: Any
    gate_up_proj: Tensor
    down_proj: Tensor

    def __call__(self, tokens: Tensor, *given: Tensor) -> Any:
        """given: transformers' choice and weights [N, K]; or the contract's counts [E] and more."""
        if len(given) == 2 and given[0].dim() == 2:
            chosen, weights = given
            return through_experts(self, tokens, weights, chosen)
        return super().__call__(tokens, *given)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        linear = self.product or expert_linear
        hidden = self._apply_gate(linear(tokens, self.gate_up_proj, counts))
        return linear(hidden, self.down_proj, counts)


def sort_tokens(model: nn.Module, top_k: int) -> None:
    """Add the mixin `SortedExperts` to a model's experts. top_k: experts per token."""
    module: Any
    experts: Any
    for module in list(model.modules()):
        for experts in module.children():
            if not _fits(experts):
                continue
            kind: Any = type(experts)
            experts.__class__ = _sorted_class(kind)
            experts.top_k = top_k
            module.token_wise = True  # computes each token by itself


def _fits(experts: Any) -> bool:
    if not hasattr(experts, "is_concatenated"):  # set by transformers' decorator for experts
        return False
    plain = not (experts.has_bias or experts.is_transposed or experts.has_post_expert_norm)
    return plain and experts.has_gate and experts.is_concatenated


@functools.cache  # blocks of one class are compiled once
def _sorted_class(kind: type) -> type:
    return type(kind.__name__, (SortedExperts, kind), {"__module__": kind.__module__})
