"""GPT-2: learned positions, LayerNorm, multi-head attention, GELU (Radford et al. 2019).

Shapes: B batch, T tokens, D dim, H heads, E = D // H head dim, V vocab_size.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.models.attention import attention
from titanlike.models.cache import KeyValueCache
from titanlike.models.documents import Documents
from titanlike.models.packing import attention_inputs
from titanlike.models.sizes import not_positive


class Embedding(nn.Module):
    """Sum of token and position embedding: [B, T] -> [B, T, D]."""

    def __init__(self, vocab_size: int, max_seq_len: int, dim: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(max_seq_len, dim)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(positions)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(
        self, x: Tensor, mask: Tensor | Documents | None, cache: KeyValueCache | None = None
    ) -> Tensor:
        q, k, v = (  # [B, T, D] -> [B, T, 3 * D] -> 3 x [B, T, H, E] -> 3 x [B, H, T, E]
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        if cache is not None:
            k, v = cache.extend(self, k, v)  # [B, H, S, E]
        y = attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).flatten(-2))  # [B, H, T, E] -> [B, T, D]


class Block(nn.Module):
    """A pre-norm transformer block: [B, T, D] -> [B, T, D]."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.ffn_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(
        self, x: Tensor, mask: Tensor | Documents | None, cache: KeyValueCache | None = None
    ) -> Tensor:
        more = () if cache is None else (cache,)
        x = x + self.attention(self.attention_norm(x), mask, *more)
        hidden = F.gelu(self.up(self.ffn_norm(x)), approximate="tanh")  # [B, T, 4 * D]
        return x + self.down(hidden)


class Gpt2(nn.Module):
    """Token ids [B, T] -> logits [B, T, V].

    tied: the head uses the token embedding's weight, as published.
    Raises ValueError with one argument per problem where sizes do not fit each other.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int = 768,
        layers: int = 12,
        heads: int = 12,
        max_seq_len: int = 1024,
        tied: bool = True,
    ):
        problems = not_positive(
            vocab_size=vocab_size, dim=dim, layers=layers, heads=heads, max_seq_len=max_seq_len
        )
        if problems:
            raise ValueError(*problems)
        if dim % heads:
            fit = -(-dim // heads) * heads
            raise ValueError(f"heads={heads}: does not divide dim={dim}; write model.dim={fit}")
        super().__init__()
        self.depth, self.max_seq_len, self.head_dim = layers, max_seq_len, dim // heads
        self.embedding = Embedding(vocab_size, max_seq_len, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.tokens.weight

    def forward(
        self,
        ids: Tensor,
        *,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """document_ids, positions, mask: see `attention_inputs` in `packing.py`; cache: of the tokens
        before, which then gives positions and mask."""
        if cache is None:
            positions, mask = attention_inputs(ids, document_ids, positions, mask, True)
        else:
            positions, mask = cache.inputs(ids)
        x = self.embedding(ids, positions)  # [B, T] -> [B, T, D]
        more = () if cache is None else (cache,)  # blocks of a user's own know none
        for block in self.layers:
            x = block(x, mask, *more)
        return self.head(self.norm(x))  # [B, T, D] -> [B, T, V]

    def tp_plan(self) -> dict[str, Any]:
        """How tensor parallelism divides it, see `parallel/tp/plan.py`."""
        block = "layers.*"
        return {
            "embedding.tokens": "vocab",
            "embedding.positions": "split",
            f"{block}.attention_norm": "sequence",
            f"{block}.attention": "gather",
            f"{block}.attention.qkv": {"packed_colwise": 3, "head": self.head_dim},
            f"{block}.attention.out": "rowwise",
            f"{block}.ffn_norm": "sequence",
            f"{block}.up": "colwise",
            f"{block}.down": "rowwise",
            "norm": "sequence",
            "head": "vocab",
        }

    def initial(self, name: str) -> tuple[float, float]:
        """(mean, standard deviation) of the normal distribution of a parameter's initial values.

        Section 2.3 of the paper: 0.02, and residual projections scaled down by the square root of
        their number; biases are 0, norms 1.
        """
        if name.endswith("bias"):
            return 0.0, 0.0
        if "norm" in name:
            return 1.0, 0.0
        residual = name.endswith(("out.weight", "down.weight"))
        return 0.0, 0.02 / (2 * self.depth) ** 0.5 if residual else 0.02

    def flops_per_token(self, tokens: int) -> float:
        """FLOPs of forward and backward per token, see `Llama.flops_per_token`."""
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        dim = self.norm.weight.numel()
        return 6 * matrices + 12 * self.depth * dim * tokens
