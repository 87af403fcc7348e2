"""GPT-2: learned positions, LayerNorm, multi-head attention, GELU (Radford et al. 2019).

Parameters and sizes have the names of transformers' GPT2LMHeadModel, whose files have the matrices
of blocks transposed.

Shapes: B batch, T tokens, D n_embd, H heads, E = D // H head dim, V vocab_size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.core.models.attention import attention
from titanlike.core.models.documents import Mask, attention_inputs
from titanlike.core.models.llama import initial_normal

if TYPE_CHECKING:
    from titanlike.core.models.cache import KeyValueCache


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, n_embd: int, n_head: int):
        super().__init__()
        self.head_dim = n_embd // n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x: Tensor, mask: Mask, cache: KeyValueCache | None = None) -> Tensor:
        q, k, v = (  # [B, T, D] -> [B, T, 3 * D] -> 3 x [B, T, H, E] -> 3 x [B, H, T, E]
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        if cache is not None:
            k, v = cache.extend(self, k, v)  # [B, H, S, E]
        y = attention(q, k, v, mask)
        return self.c_proj(y.transpose(1, 2).flatten(-2))  # [B, H, T, E] -> [B, T, D]


class MLP(nn.Module):
    """[B, T, D] -> [B, T, 4 * D] -> [B, T, D]."""

    def __init__(self, n_embd: int):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)
        self.c_proj = nn.Linear(4 * n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """A pre-norm transformer block: [B, T, D] -> [B, T, D]."""

    def __init__(self, n_embd: int, n_head: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = Attention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = MLP(n_embd)

    def forward(self, x: Tensor, mask: Mask, cache: KeyValueCache | None = None) -> Tensor:
        cached = () if cache is None else (cache,)
        x = x + self.attn(self.ln_1(x), mask, *cached)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Token ids and positions [B, T] -> the last block's normed output [B, T, D]."""

    def __init__(self, vocab_size: int, n_positions: int, n_embd: int, n_head: int, n_layer: int):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(n_positions, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)

    def forward(
        self, ids: Tensor, positions: Tensor, mask: Any, cache: KeyValueCache | None = None
    ) -> Tensor:
        x = self.wte(ids) + self.wpe(positions)  # [B, T] -> [B, T, D]
        cached = () if cache is None else (cache,)  # a user's blocks may not take a cache
        for block in self.h:
            x = block(x, mask, *cached)
        return self.ln_f(x)


class Gpt2(nn.Module):
    """Token ids [B, T] -> logits [B, T, V].

    n_positions: the longest sequence. tie_word_embeddings: the head uses the token embedding's
    weight, as published.
    Raises ValueError where sizes do not fit each other.
    """

    may_be_zero = ()  # sizes that may be 0

    def __init__(
        self,
        *,
        vocab_size: int,
        n_positions: int = 1024,
        n_embd: int = 768,
        n_layer: int = 12,
        n_head: int = 12,
        tie_word_embeddings: bool = True,
    ):
        if n_embd % n_head:
            fit = -(-n_embd // n_head) * n_head
            raise ValueError(
                f"n_head={n_head}: does not divide n_embd={n_embd}; write model.n_embd={fit}"
            )
        super().__init__()
        self.depth, self.max_seq_len, self.head_dim = n_layer, n_positions, n_embd // n_head
        self.transformer = Transformer(vocab_size, n_positions, n_embd, n_head, n_layer)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        if tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(
        self,
        ids: Tensor,
        *,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """document_ids, positions, mask: see `attention_inputs` in `documents.py`; cache: of
        previous tokens, which then supplies positions and mask."""
        positions, mask = attention_inputs(ids, document_ids, positions, mask, True, cache)
        return self.lm_head(self.transformer(ids, positions, mask, cache))  # [B, T, D] -> [B, T, V]

    def tp_plan(self) -> dict[str, Any]:
        """The tensor-parallel plan, see `techniques/tp/plan.py`."""
        block = "transformer.h.*"
        return {
            "transformer.wte": "vocab",
            "transformer.wpe": "split",
            f"{block}.ln_1": "sequence",
            f"{block}.attn": "gather",
            f"{block}.attn.c_attn": {"packed_colwise": 3, "head": self.head_dim},
            f"{block}.attn.c_proj": "rowwise",
            f"{block}.ln_2": "sequence",
            f"{block}.mlp.c_fc": "colwise",
            f"{block}.mlp.c_proj": "rowwise",
            "transformer.ln_f": "sequence",
            "lm_head": "vocab",
        }

    def initial(self, name: str) -> tuple[float, float]:
        """As `CausalLM.initial`, from which it is (section 2.3 of the paper)."""
        return initial_normal(name, self.depth)

    def flops_per_token(self, tokens: int) -> float:
        """FLOPs of forward and backward per token, see `CausalLM.flops_per_token`."""
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * matrices + 12 * self.depth * self.lm_head.in_features * tokens
