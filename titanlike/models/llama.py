"""Llama: RMSNorm, rotary embedding, grouped-query attention, SwiGLU (arXiv 2302.13971, 2407.21783).

Legend of shapes: B batch, T tokens, D dim, H query heads, K key/value heads, E = D // H head dim,
F ffn_dim, V vocab_size.

The model knows nothing of parallelism. Its children in the order of their registration are the
chain that runs (embedding, layers.0 ... layers.N-1, norm, head); a part that is absent (None, or
missing from `layers`) is simply not run, so that any run of the chain is a model, too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.models.sizes import not_positive


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_table(tokens: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """cos and sin of position x frequency (arXiv 2104.09864): fp32 [2, T, E / 2].

    Computed in every forward: a buffer would be garbage after `to_empty`, and it costs next to
    nothing beside a block.
    """
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angle = torch.outer(torch.arange(tokens, device=device, dtype=torch.float32), theta**-exponent)
    return torch.stack([angle.cos(), angle.sin()])  # [2, T, E/2]


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the two halves of each head of x [B, H, T, E] in fp32, and return x's dtype."""
    cos, sin = table
    a, b = x.float().chunk(2, dim=-1)  # [B, H, T, E/2] each
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        self.head_dim = dim // heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = (  # [B, T, heads, E] -> [B, heads, T, E]
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(
            rotate(q, table), rotate(k, table), v, is_causal=True, enable_gqa=q.size(1) != k.size(1)
        )  # [B, H, T, E]
        return self.wo(y.transpose(1, 2).flatten(-2))  # [B, T, D]


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, ffn_dim: int, norm_eps: float):
        super().__init__()
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.attention = Attention(dim, heads, kv_heads)
        self.ffn_norm = RMSNorm(dim, norm_eps)
        self.ffn = FeedForward(dim, ffn_dim)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """Token ids [B, T] -> logits [B, T, V]; without `embedding` or `head`, hidden states [B, T, D].

    Raises ValueError, one argument a problem, when the sizes do not fit each other.
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
        if dim % (2 * heads):
            fit = -(-dim // (2 * heads)) * 2 * heads
            problems.append(
                f"heads={heads}: dim={dim} is no even number for each (the rotary embedding turns "
                f"pairs); write model.dim={fit}"
            )
        if heads % kv_heads:
            fit = max(k for k in range(1, kv_heads) if heads % k == 0)
            problems.append(
                f"kv_heads={kv_heads}: does not divide heads={heads}; write model.kv_heads={fit}"
            )
        if problems:
            raise ValueError(*problems)
        super().__init__()
        self.head_dim, self.rope_theta, self.depth = dim // heads, rope_theta, layers
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleDict(
            {str(i): Block(dim, heads, kv_heads, ffn_dim, norm_eps) for i in range(layers)}
        )
        self.norm = RMSNorm(dim, norm_eps)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)  # [B, T] -> [B, T, D]
        table = rotary_table(x.size(1), self.head_dim, self.rope_theta, x.device)
        for block in self.layers.values():
            x = block(x, table)
        if self.norm is not None:
            x = self.norm(x)
        if self.head is not None:
            x = self.head(x)  # [B, T, D] -> [B, T, V]
        return x

    def initial(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of the normal distribution a parameter starts from.

        The projections that write into the residual stream are scaled down by the square root of
        their number (Radford et al. 2019, section 2.3).
        """
        if "norm" in name:
            return 1.0, 0.0
        residual = name.endswith(("wo.weight", "down.weight"))
        return 0.0, 0.02 / (2 * self.depth) ** 0.5 if residual else 0.02

    def flops_per_token(self, tokens: int) -> float:
        """Floating-point operations of forward and backward, a token of sequences of `tokens`.

        6 a matrix parameter and 12 a pair of tokens and channel of attention, the convention of
        arXiv 2204.02311, appendix B (it does not subtract the causal half). To be asked of the whole
        model. Embedding look-ups are free.
        """
        matrices = sum(p.numel() for p in self.parameters() if p.dim() == 2)
        dim = self.norm.weight.numel()
        return 6 * (matrices - self.embedding.weight.numel()) + 12 * self.depth * dim * tokens
