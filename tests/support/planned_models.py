"""A user's own model with a tensor-parallel plan that is data, as a YAML file gives it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD, HEADS = 8, 4
DIM = HEAD * HEADS
PLAN = {
    "tokens": "vocab",
    "places": "split",
    "blocks.*.norms.*": "sequence",
    "blocks.*.qkv": {"packed_colwise": [DIM, DIM, DIM], "head": HEAD},
    "blocks.*.scales.*": "replicate_sum",
    "blocks.*.out": "rowwise",
    "blocks.*.gate_up": {"packed_colwise": 2},
    "blocks.*.down": "rowwise",
    "last": "sequence",
    "logits": "vocab",
}


class Block(nn.Module):
    """Fused q, k, v and gate, up, biases, and norms of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.scales = nn.ModuleList([nn.RMSNorm(HEAD, eps=1e-6), nn.RMSNorm(HEAD, eps=1e-6)])
        self.gate_up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(self.scales[0](q), self.scales[1](k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Own(nn.Module):
    """Token ids [B, T] -> logits [B, T, V]."""

    def __init__(self, vocab_size: int, max_seq_len: int, depth: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, DIM), nn.Embedding(max_seq_len, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.last, self.logits = nn.LayerNorm(DIM), nn.Linear(DIM, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.last(x))
