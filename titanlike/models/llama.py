"""Llama: RMSNorm, rotary embedding, grouped-query attention, SwiGLU (arXiv 2302.13971, 2407.21783).

Shapes: B batch, T tokens, D dim, H query heads, K key/value heads, E = D // H head dim, F ffn_dim,
V vocab_size. The model contains no parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.models.attention import attention
from titanlike.models.cache import KeyValueCache
from titanlike.models.documents import Documents
from titanlike.models.packing import attention_inputs
from titanlike.models.sizes import not_positive


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., D] -> [..., D]
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """cos and sin of position * frequency (arXiv 2104.09864): [..., T] -> fp32 [2, ..., T, E/2].

    Computed in every forward: its cost is negligible beside a block's.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angle = positions.float().unsqueeze(-1) * theta**-exponent  # [..., T, 1] * [E/2]
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the two halves of each head in fp32: x [B, H, T, E] -> the same shape and dtype."""
    cos, sin = table.unsqueeze(-3) if table.dim() == 4 else table  # [B, 1, T, E/2] or [T, E/2]
    a, b = x.float().chunk(2, dim=-1)  # [B, H, T, E/2] each
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention; K < H key/value heads are shared by groups of query heads."""

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int | None = None,
        qk_norm_eps: float | None = None,
    ):
        """head_dim: E, if not dim // heads; qk_norm_eps: of the norms of each head's query and key,
        None = there are none."""
        super().__init__()
        self.head_dim = head_dim or dim // heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.normed = qk_norm_eps is not None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(self.head_dim, qk_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, qk_norm_eps)

    def forward(
        self,
        x: Tensor,
        table: Tensor,
        mask: Tensor | Documents | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        q, k, v = (  # [B, T, D] -> [B, T, H or K, E] -> q [B, H, T, E]; k, v [B, K, T, E]
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, table), rotate(k, table)
        if cache is not None:
            k, v = cache.extend(self, k, v)  # [B, K, S, E]
        y = attention(q, k, v, mask)  # [B, H, T, E]
        return self.wo(y.transpose(1, 2).flatten(-2))  # [B, T, H, E] -> [B, T, H * E] -> [B, T, D]


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): [B, T, D] -> [B, T, F] -> [B, T, D]."""

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A pre-norm transformer block: [B, T, D] -> [B, T, D]."""

    def __init__(self, dim: int, attention: Attention, ffn_dim: int, norm_eps: float):
        super().__init__()
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.attention = attention
        self.ffn_norm = RMSNorm(dim, norm_eps)
        self.ffn = FeedForward(dim, ffn_dim)

    def forward(
        self,
        x: Tensor,
        table: Tensor,
        mask: Tensor | Documents | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        more = () if cache is None else (cache,)
        return self.network(x + self.attention(self.attention_norm(x), table, mask, *more))

    def network(self, x: Tensor) -> Tensor:
        """What follows the attention."""
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """Token ids [B, T] -> logits [B, T, V].

    tied: the head uses the embedding's weight.
    Raises ValueError with one argument per problem where sizes do not fit each other.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int = 128,
        layers: int = 4,
        heads: int = 4,
        kv_heads: int = 2,
        ffn_dim: int = 352,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-5,
        tied: bool = False,
    ):
        problems = not_positive(
            vocab_size=vocab_size,
            dim=dim,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            ffn_dim=ffn_dim,
            rope_theta=rope_theta,
            norm_eps=norm_eps,
        )
        if problems:
            raise ValueError(*problems)
        if problems := attention_problems(dim, heads, kv_heads):
            raise ValueError(*problems)
        super().__init__()
        self.head_dim, self.rope_theta, self.depth = dim // heads, rope_theta, layers
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(
            Block(dim, Attention(dim, heads, kv_heads), ffn_dim, norm_eps) for _ in range(layers)
        )
        self.norm = RMSNorm(dim, norm_eps)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

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
        table = rotary_table(positions, self.head_dim, self.rope_theta)  # [2, (B,) T, E/2]
        x = self.embedding(ids)  # [B, T] -> [B, T, D]
        more = () if cache is None else (cache,)  # blocks of a user's own know none
        for block in self.layers:
            x = block(x, table, mask, *more)
        return self.head(self.norm(x))  # [B, T, D] -> [B, T, V]

    def tp_plan(self) -> dict[str, Any]:
        """How tensor parallelism divides it, see `parallel/tp/plan.py`."""
        attention, ffn = "layers.*.attention", "layers.*.ffn"
        return {
            "embedding": "vocab",
            f"{attention}_norm": "sequence",
            attention: "gather",
            f"{attention}.wq": {"colwise": self.head_dim},
            f"{attention}.w[kv]": {"colwise_kv": self.head_dim},
            f"{attention}.wo": "rowwise",
            f"{ffn}_norm": "sequence",
            ffn: "gather",
            f"{ffn}.gate": "colwise",
            f"{ffn}.up": "colwise",
            f"{ffn}.down": "rowwise",
            "norm": "sequence",
            "head": "vocab",
        }

    def initial(self, name: str) -> tuple[float, float]:
        """(mean, standard deviation) of the normal distribution of a parameter's initial values.

        Projections that write into the residual stream are scaled down by the square root of their
        number (Radford et al. 2019, section 2.3).
        """
        if "norm" in name:
            return 1.0, 0.0
        residual = name.endswith(("wo.weight", "down.weight"))
        return 0.0, 0.02 / (2 * self.depth) ** 0.5 if residual else 0.02

    def flops_per_token(self, tokens: int) -> float:
        """FLOPs of forward and backward per token, in sequences of `tokens`; of the whole model.

        6 per matrix parameter, and 12 * dim per layer and attended token: the convention of arXiv
        2204.02311, appendix B, which does not subtract the causal half. Embedding lookups are free.
        """
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * matrices + 12 * self.depth * self.norm.weight.numel() * tokens


def attention_problems(
    dim: int, heads: int, kv_heads: int, head_dim: int | None = None
) -> list[str]:
    """Why such an attention cannot be, with sizes that can."""
    problems = []
    if head_dim is None and dim % (2 * heads):
        fit = -(-dim // (2 * heads)) * 2 * heads
        reason = "does not give each head an even size (the rotary embedding rotates pairs)"
        problems.append(f"heads={heads}: dim={dim} {reason}; write model.dim={fit}")
    if head_dim is not None and head_dim % 2:
        reason = "is odd, and the rotary embedding rotates pairs"
        problems.append(f"head_dim={head_dim}: {reason}; write model.head_dim={head_dim + 1}")
    if heads % kv_heads:
        fit = max(k for k in range(1, kv_heads) if heads % k == 0)
        reason = f"does not divide heads={heads}"
        problems.append(f"kv_heads={kv_heads}: {reason}; write model.kv_heads={fit}")
    return problems
