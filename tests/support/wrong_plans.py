"""A user's model with a tensor-parallel plan, and models and plans that are wrong in one place
each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD, HEADS = 8, 4
DIM = HEAD * HEADS
PLAN: dict[str, Any] = {
    "tokens": "vocab",
    "blocks.*.norms.*": "sequence",
    "blocks.*.attention": "gather",
    "blocks.*.attention.[qkv]": {"colwise": HEAD},
    "blocks.*.attention.scale": "replicate_sum",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp.up": {"packed_colwise": 2},
    "blocks.*.mlp.down": "rowwise",
    "norm": "sequence",
    "logits": "vocab",
}
FUSED = {name: style for name, style in PLAN.items() if name != "blocks.*.attention.[qkv]"} | {
    "blocks.*.attention.qkv": {"packed_colwise": 3}
}


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.chance, self.dropout = dropout, nn.Dropout(dropout)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.scale, self.out = nn.RMSNorm(HEAD, eps=1e-6), nn.Linear(DIM, DIM)

    def project(self, x: Tensor) -> list[Tensor]:
        """[B, T, D] -> 3 x [B, H, T, E]"""
        return [w(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.q, self.k, self.v)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        y = F.scaled_dot_product_attention(self.scale(q), self.scale(k), v, is_causal=True)
        return self.dropout(self.out(y.transpose(1, 2).flatten(-2)))


class ByHeads(Attention):
    """A number of heads is written in: they become smaller."""

    def project(self, x: Tensor) -> list[Tensor]:
        return [w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.q, self.k, self.v)]


class Softmaxed(Attention):
    """Queries are normalized over all heads."""

    def project(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().project(x)
        return [q.softmax(1), k, v]


class Scaling(Attention):
    """Changes what was gathered for it in place."""

    def project(self, x: Tensor) -> list[Tensor]:
        return super().project(x.mul_(0.5))


class Beside(Attention):
    """Takes what was gathered for its layers itself, too, without a gradient; right."""

    def project(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().project(x)
        return [q, k, v * x.detach().abs().mean(-1)[:, None, :, None]]


class Ranked(Attention):
    """A bias for each head, counted from the first that there is."""

    def project(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().project(x)
        return [q + torch.arange(q.size(1), device=q.device)[:, None, None], k, v]


class Tiled(Attention):
    """Two heads of keys for four of queries: the first for the first and the third."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.k, self.v = (nn.Linear(DIM, DIM // 2) for _ in range(2))

    def project(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().project(x)
        return [q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)]


class Marked(Attention):
    """The first head counts twice: it is marked in a tensor of zeros."""

    def project(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().project(x)
        marks = torch.zeros_like(q)
        marks[:, 0] = 1
        return [q + q * marks, k, v]


class Signed(Attention):
    """Half of the heads are negated."""

    def project(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().project(x)
        half = q[:, : q.size(1) // 2, :1, :1] * 0
        return [q * torch.cat([torch.ones_like(half), -torch.ones_like(half)], 1), k, v]


class InPlace(Attention):
    """The scale is added to a part of a tensor."""

    def project(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().project(x)
        q = q.clone()
        q[..., :4] += self.scale.weight[:4]
        return [q, k, v]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(y.transpose(1, 2).flatten(-2)))


class Rotated(Attention):
    """Rotated as complex numbers, by a table that the first forward keeps; right."""

    table: Tensor | None = None

    def project(self, x: Tensor) -> list[Tensor]:
        if self.table is None:
            angles = torch.arange(x.size(1), device=x.device)[:, None] * torch.ones(
                HEAD // 2, device=x.device
            )
            self.table = torch.polar(torch.ones_like(angles), angles)
        q, k, v = super().project(x)
        turned = [torch.view_as_complex(y.unflatten(-1, (-1, 2))) * self.table for y in (q, k)]
        return [*(torch.view_as_real(y).flatten(-2) for y in turned), v]


class Looking(Attention):
    """It looks at values, which meta tensors have not."""

    def project(self, x: Tensor) -> list[Tensor]:
        return super().project(x if x.sum().item() < 1e9 else x / 2)


class Fused(Attention):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        del self.q, self.k, self.v

    def project(self, x: Tensor) -> list[Tensor]:
        parts = self.qkv(x).chunk(3, dim=-1)
        return [part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts]


class Viewed(Fused):
    def project(self, x: Tensor) -> list[Tensor]:
        heads = self.qkv(x).unflatten(-1, (3, -1, HEAD))  # [B, T, 3, H, E]
        return [part.transpose(1, 2) for part in heads.unbind(2)]


class Products(Attention):
    """Attention without torch's function for it; right."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        scores = self.scale(q) @ self.scale(k).mT / HEAD**0.5
        allowed = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        y = torch.einsum("bhts,bhse->bthe", F.dropout(weights, self.chance, self.training), v)
        return self.dropout(self.out(y.reshape(*x.shape[:2], -1)))


class Mixed(Attention):
    """It draws for its heads and for its result."""

    def project(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().project(x)
        return [q, k, F.dropout(v, self.chance, self.training)]

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.chance, self.training)


class Mlp(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.hidden, self.dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.dropout(self.down(self.hidden(F.silu(gate) * up)))


class Block(nn.Module):
    def __init__(self, attention: str, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        self.attention, self.mlp = globals()[attention](dropout), Mlp(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Token ids [B, T] -> logits [B, T, V].

    between: what the forward does between its blocks.
    """

    def __init__(
        self,
        attention: str = "Attention",
        between: str = "nothing",
        vocab_size: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, DIM)
        self.blocks = nn.ModuleList(Block(attention, dropout) for _ in range(2))
        self.norm, self.logits = nn.LayerNorm(DIM), nn.Linear(DIM, vocab_size)
        self.places = nn.Embedding(16, DIM) if between == "places" else None
        self.bias = nn.Parameter(torch.zeros(DIM)) if between == "bias" else None
        self.between, self.dropout = between, nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids))
        if self.places is not None:
            x = x + self.places(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = self.change(block(x), ids)
        return self.logits(self.norm(x))

    def change(self, x: Tensor, ids: Tensor) -> Tensor:
        batch, tokens = ids.shape
        if self.bias is not None:
            return x + self.bias
        if self.between == "dropout":
            return F.dropout(x, self.dropout.p, self.training)
        if self.between == "mean":
            return x - x.mean(1, keepdim=True)
        if self.between == "view":
            return x.view(batch, tokens, DIM) * 2
        if self.between == "folded":
            return x.reshape(batch * tokens, -1).sin().view(batch, tokens, -1)
        if self.between == "cumsum":
            return x + x.cumsum(1)
        if self.between == "last":
            return x + x[:, -1:]
        if self.between == "shifted":
            return x + x.roll(1, 1)
        if self.between == "counted":
            return x / x.size(1)
        if self.between == "positions":
            return x + torch.arange(x.size(1), device=x.device)[:, None]
        return x


class Planned(Model):
    """With a plan of its own, which leaves out the norms of queries and keys."""

    def tp_plan(self) -> dict[str, Any]:
        return {name: style for name, style in PLAN.items() if not name.endswith("scale")}
