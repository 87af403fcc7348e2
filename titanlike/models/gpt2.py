"""GPT-2: learned positions, LayerNorm, multi-head attention, GELU (Radford et al. 2019).

Legend of shapes: B batch, T tokens, D dim, H heads, E = D // H head dim, V vocab_size.

As in `llama.py`, the children in the order of their registration are the chain that runs, and a
part that is absent is not run. Embedding and head are two matrices here, not one tied one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.models.sizes import not_positive


class Embedding(nn.Module):
    """Token plus position embedding: [B, T] -> [B, T, D]."""

    def __init__(self, vocab_size: int, max_seq_len: int, dim: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(max_seq_len, dim)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (  # [B, T, 3 D] -> three of [B, H, T, E]
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, E]
        return self.out(y.transpose(1, 2).flatten(-2))  # [B, T, D]


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.ffn_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """Token ids [B, T] -> logits [B, T, V]; without `embedding` or `head`, hidden states [B, T, D].

    Raises ValueError, one argument a problem, when the sizes do not fit each other.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int = 768,
        layers: int = 12,
        heads: int = 12,
        max_seq_len: int = 1024,
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
        self.depth, self.max_seq_len = layers, max_seq_len
        self.embedding = Embedding(vocab_size, max_seq_len, dim)
        self.layers = nn.ModuleDict({str(i): Block(dim, heads) for i in range(layers)})
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)  # [B, T] -> [B, T, D]
        for block in self.layers.values():
            x = block(x)
        if self.norm is not None:
            x = self.norm(x)
        if self.head is not None:
            x = self.head(x)  # [B, T, D] -> [B, T, V]
        return x

    def initial(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of the normal distribution a parameter starts from.

        Section 2.3 of the paper: 0.02, residual projections scaled down by the square root of
        their number; biases 0, norms 1.
        """
        if name.endswith("bias"):
            return 0.0, 0.0
        if "norm" in name:
            return 1.0, 0.0
        residual = name.endswith(("out.weight", "down.weight"))
        return 0.0, 0.02 / (2 * self.depth) ** 0.5 if residual else 0.02

    def flops_per_token(self, tokens: int) -> float:
        """Floating-point operations of forward and backward a token; see `llama.Llama`."""
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        dim = self.norm.weight.numel()
        return 6 * matrices + 12 * self.depth * dim * tokens
