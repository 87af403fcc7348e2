"""Models of a user's own, some of which mix tokens in another way than by attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# of a block: what it computes beside attention and layers that take each token by itself
MIXERS = {
    "convolution": lambda block, x: block.more(x.transpose(1, 2)).transpose(1, 2),
    "lstm": lambda block, x: block.more(x)[0],
    "cumsum": lambda block, x: x.cumsum(1) * 0.01,
    "shift": lambda block, x: F.pad(x[:, :-1], (0, 0, 1, 0)),
    "mean": lambda block, x: x.mean(1, keepdim=True),
    "first": lambda block, x: x[:, :1],
    "flip": lambda block, x: x.flip(1),
    # of a table of just as many rows, of which all are taken where the sequence is whole
    "rows of a table": lambda block, x: x * block.more.weight[None, : x.shape[1]],
    "positions": lambda block, x: (
        x
        * block.more(torch.arange(x.shape[1], device=x.device))
        * block.more.weight.sin()[torch.arange(x.shape[1], device=x.device)]
        * block.more.weight[None, : x.shape[1]].tanh()
        + block.sorts(x)
        + (0.01 * torch.ones(1, 1, device=x.device) * x[:, :, :1] if block.training else 0)
    ),
    "rotated": lambda block, x: rotated(x),
    # as many features as a rank of two has of 16 tokens
    "eight features": lambda block, x: rotated(x[:, :, :8]).repeat(1, 1, x.shape[2] // 8),
    "recomputed by itself": lambda block, x: checkpoint(rotated, x, use_reentrant=False),
    "a table that grows": lambda block, x: x * block.grown(x)[: x.shape[1]],
    "a list of positions": lambda block, x: torch.tensor(
        [0.1 * number for number in range(x.shape[1])], device=x.device
    )[None, :, None],
    "chance of a sequence": lambda block, x: x * x.new_empty(len(x), 1, 1).bernoulli_(),
}


def rotated(x: Tensor) -> Tensor:
    """By angles of their own positions, as rotary embeddings do."""
    half = x.shape[-1] // 2
    speeds = 10 ** -(torch.arange(0, half, device=x.device) / half)
    angles = torch.arange(0, x.shape[1], device=x.device, dtype=torch.float32)[:, None] * speeds
    a, b = x[..., :half], x[..., half:]
    sin, cos = angles.sin(), angles.cos()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Sorts(nn.Linear):
    """Sorts the tokens that are here, and puts them back: their numbers are no positions."""

    token_wise = True

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        order = rows.detach().sum(1).argsort()
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=x.device)
        return F.linear(rows[order], self.weight, self.bias)[place].view_as(x)


class Block(nn.Module):
    def __init__(self, dim: int, kind: str) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim)
        self.out, self.ffn = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.kind = kind
        if kind == "convolution":
            self.more = nn.Conv1d(dim, dim, 3, padding=1)
        elif kind in ("rows of a table", "positions"):
            self.more = nn.Embedding(16 if kind == "rows of a table" else 40, dim)
            self.sorts = Sorts(dim, dim) if kind == "positions" else None
        elif kind == "bias of pairs":
            self.more = nn.Linear(dim, 4)
        elif kind == "lstm":
            self.more = nn.LSTM(dim, dim, batch_first=True)

    def grown(self, x: Tensor) -> Tensor:
        """A table that is made again where it is too short."""
        if not hasattr(self, "table") or len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1], device=x.device)[:, None].cos()
        return self.table

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = (
            part.view(batch, tokens, 4, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        if self.kind == "by hand":
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
            y = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        else:
            causal = bias is None and self.kind != "encoder"
            if self.kind == "bias of pairs":
                of_query = self.more(x).transpose(1, 2).unsqueeze(-1)  # [B, 4, T, 1]
                bias, causal = of_query * of_query.mT, False
            if self.kind == "a mask that is cut":
                whole = torch.ones(16, 16, dtype=torch.bool, device=x.device).tril()
                bias, causal = whole[..., : k.shape[2], : k.shape[2]], False
            if self.kind == "a mask that is made":
                bias, causal = x.new_ones(()) * torch.ones(tokens, tokens).tril().log(), False
            if self.kind == "distances":
                at = torch.arange(tokens, device=x.device)
                bias = (at - at[:, None]).float().masked_fill(at > at[:, None], float("-inf"))
                causal = False
            y = F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, dim))
        if self.kind in MIXERS:
            x = x + MIXERS[self.kind](self, x)
        return x + self.ffn(F.gelu(x))


class Own(nn.Module):
    """positions: none, weights (a parameter), embedding, or bias (relative ones, of attention)."""

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int = 32,
        layers: int = 2,
        kind: str = "",
        positions: str = "none",
        result: str = "tokens",
    ) -> None:
        super().__init__()
        self.kind, self.positions, self.result = kind, positions, result
        self.embedding = nn.Embedding(vocab_size, dim)
        if positions in ("weights", "embedding"):
            table = nn.Embedding(64, dim)
            self.table = table if positions == "embedding" else table.weight
        elif positions == "bias":
            self.bias = nn.Embedding(64, 4)
        self.layers = nn.ModuleList(Block(dim, kind) for _ in range(layers))
        self.between = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        batch, tokens = ids.shape
        at = torch.arange(tokens, device=ids.device)
        x, bias = self.embedding(ids), None
        if self.positions == "weights":
            x = x + self.table[:tokens]
        elif self.positions == "embedding":
            x = x + self.table(at)
        elif self.positions == "bias":
            bias = self.bias((at[:, None] - at).clamp(0, 63)).permute(2, 0, 1)[None]
            bias = bias.masked_fill(at > at[:, None], float("-inf"))
        for block in self.layers:
            x = block(x, bias)
        # between units, with the length written into a call
        q = self.between(x).view(batch, tokens, 4, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        x = x + y.transpose(1, 2).reshape(batch, tokens, -1)
        if self.kind == "loop":
            state, states = torch.zeros_like(x[:, 0]), []
            for number in range(tokens):
                state = 0.5 * state + x[:, number]
                states.append(state)
            x = torch.stack(states, 1)
        if self.result == "mean":
            return self.head(x.mean(1))
        return self.head(x)
