"""Ordinary modules whose forwards use many features of torch and Python.

Token ids [B, T] below 64 -> logits [B, T, 64] (`Vit`: images -> 10 classes).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, DIM = 64, 16


class Blocks(nn.Module):
    """Embedding, blocks, head. blocks: none = four linear layers."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(blocks or [nn.Linear(DIM, DIM) for _ in range(4)])
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder with a mask computed in the forward and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Parameter(torch.randn(1, 64, DIM) * 0.02)
        layer = nn.TransformerEncoderLayer(DIM, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        x = self.tokens(ids) + self.positions[:, : ids.size(1)]
        return self.out(self.encoder(x, mask=mask, is_causal=True))


class Lstm(Blocks):
    """Blocks pass a state besides the output: three tensors between stages."""

    def __init__(self) -> None:
        super().__init__(*(nn.LSTM(DIM, DIM, batch_first=True) for _ in range(4)))

    def forward(self, ids: Tensor) -> Tensor:
        x, state = self.tokens(ids), None
        for block in self.blocks:
            x, state = block(x, state)
        return self.out(x)


class Experts(nn.Module):
    """Each token goes to one expert, which depends on values: fails on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 3)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).topk(1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen[:, 0] == number)[0]
            if not len(rows):
                continue
            out[rows] = expert(flat[rows]) * weight[rows]
        return x + out.view_as(x)


class Routed(Blocks):
    def __init__(self) -> None:
        super().__init__(*(Experts() for _ in range(4)))


class Checkpointed(Blocks):
    """Activation checkpointing in the forward, of blocks that work in place."""

    def __init__(self, reentrant: bool = False) -> None:
        parts = (nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(inplace=True)) for _ in range(4))
        super().__init__(*parts)
        self.reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x)


class InPlace(nn.Module):
    """No module lists; activations are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.first, self.relu = nn.Linear(DIM, DIM), nn.ReLU(inplace=True)
        self.second, self.again = nn.Linear(DIM, DIM), nn.ReLU(inplace=True)
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        y = self.relu(self.first(x))
        z = self.second(y)
        z += y
        z = self.again(z)
        return self.out(z)


class Rotating(Blocks):
    """A complex non-persistent buffer, and a mask filled by index."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(64)[:, None] * 0.1 ** torch.arange(DIM // 2)
        turns = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.size(1)
        mask = torch.zeros(tokens, tokens, device=ids.device)
        mask[torch.triu(torch.ones_like(mask, dtype=torch.bool), 1)] = float("-inf")
        x = self.tokens(ids)
        for block in self.blocks:
            y = torch.view_as_complex(block(x).unflatten(-1, (-1, 2)).contiguous())
            y = torch.view_as_real(y * self.turns[:tokens]).flatten(-2)
            x = x + mask.softmax(-1) @ y
        return self.out(x)


class OneBlock(nn.Module):
    """One block called repeatedly (ALBERT), and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM)
        self.middle, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for _ in range(3):
            x = x + self.block(x).tanh()
        return self.out(self.block(self.middle(x)))


class Filled(Blocks):
    """Item assignment in a mask and in copies of activations."""

    def forward(self, ids: Tensor) -> Tensor:
        mask = torch.zeros(*ids.shape, 1)
        mask[:, ::2] = 1.0
        x = self.tokens(ids)
        for block in self.blocks:
            y = x.clone()
            y[:, 0] = 0.0
            x = block(y) * mask + x
        return self.out(x)


class Normed(Blocks):
    """Weights computed in the forward (torch's parametrizations)."""

    def __init__(self) -> None:
        norm = nn.utils.parametrizations.weight_norm
        super().__init__(*(norm(nn.Linear(DIM, DIM)) for _ in range(3)))
        self.out = norm(nn.Linear(DIM, VOCAB))


class Dense(Blocks):
    """Every output is used by all later layers (DenseNet), the input as well."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(DIM * (i + 1), DIM) for i in range(5)))

    def forward(self, ids: Tensor) -> Tensor:
        found = [self.tokens(ids)]
        for block in self.blocks:
            found.append(block(torch.cat(found, -1)).relu())
        return self.out(sum(found)) + F.one_hot(ids, VOCAB)


class TwoTowers(Blocks):
    """The second tower begins with the token ids again: nothing of the first is used before out."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Embedding(VOCAB, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.tokens(ids)).tanh())
        y = self.blocks[3](self.blocks[2](self.other(ids)).tanh())
        return self.out(x * y)


class HelpedInTraining(Blocks):
    """Behind the second block the embedding is added in training alone, before the head always."""

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.tokens(ids)
        for at, block in enumerate(self.blocks):
            x = block(x).tanh()
            if self.training and at == 1:
                x = x + first
        return self.out(x + first)


class Flat(nn.Module):
    """Nine layers as nine attributes, without a list."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        for i in range(9):
            setattr(self, f"layer{i}", nn.Linear(DIM, DIM))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for i in range(9):
            x = torch.tanh(getattr(self, f"layer{i}")(x))
        return self.out(x)


class WithoutGradient(nn.Module):
    """Integers and tensors without a gradient are used in a later stage."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.first = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM)
        self.second, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.first(self.tokens(ids))
        with torch.no_grad():
            largest = y.argmax(-1)
            size = self.first(y).norm(dim=-1, keepdim=True)
        return self.out(self.second(y) / (1 + size)) + F.one_hot(largest, VOCAB)


class _Reverse(torch.autograd.Function):
    """The same forward, the opposite gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return -gradient


class Reversed(Blocks):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = _Reverse.apply(block(x))
        return self.out(x)


class Lazy(Blocks):
    """A mask that is created on first use and cached."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(ids.size(1), 1, device=ids.device).cumsum(0) / ids.size(1)
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + block(x) * self.mask
        return self.out(x)


class HalfAsleep(Reversed):
    """Two blocks with dropout, which its own train() leaves in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[:2]:
            block.dropout = nn.Dropout(0.5)
            block.register_forward_hook(lambda module, _, out: module.dropout(out))

    def train(self, mode: bool = True) -> HalfAsleep:
        super().train(mode)
        for block in self.blocks[:2]:
            block.eval()
        return self


class Shuffled(Blocks):
    """A buffer from numpy's generator, weights in bf16."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, DIM))
        self.register_buffer("order", torch.from_numpy(np.random.permutation(64)))
        self.to(torch.bfloat16)


class OtherInEvaluation(Blocks):
    """Sends two tensors from block to block in training, and one in evaluation."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(DIM, DIM) for _ in range(2)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        return self.out(second + x if self.training else second)


class Vit(nn.Module):
    """A vision transformer: patches, a class token, blocks in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, 4, 4)
        self.summary = nn.Parameter(torch.randn(1, 1, DIM))
        self.positions = nn.Parameter(torch.randn(1, 17, DIM))
        layers = (
            nn.TransformerEncoderLayer(DIM, 2, 32, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.blocks = nn.Sequential(*layers)
        self.out = nn.Linear(DIM, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.summary.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.out(self.blocks(x)[:, 0])
