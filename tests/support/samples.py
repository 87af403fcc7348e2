"""Custom data: samples of different lengths, and with more fields than inputs and targets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from titanlike.core.data.sources import IGNORE, Data, Pad, VariableLength
from titanlike.core.data.synthetic import SyntheticSource

VOCAB, DIM = 64, 16


class Phrases:
    """Random tokens: sample i has 1 to seq_len of them, short ones more often."""

    def __init__(self, seq_len: int, part: int, size: int) -> None:
        self.source, self.seq_len, self.size = (
            SyntheticSource(VOCAB, seq_len, 1, part),
            seq_len,
            size,
        )

    def __len__(self) -> int:
        return self.size

    def length(self, i: int) -> int:
        return max(1, self.seq_len * (i * 29 % 53) ** 2 // 53**2)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if i >= self.size:
            raise IndexError(i)
        return {name: tensor[: self.length(i)] for name, tensor in self.source[i].items()}


def phrases(
    seq_len: int, bucket: int = 4, sort: bool = False, size: int = 500, variable: bool = True
) -> Data:
    train, validation = Phrases(seq_len, 0, size), Phrases(seq_len, 1, size)
    lengths = [train.length(i) for i in range(size)] if sort else None
    kind = VariableLength(bucket, lengths=lengths) if variable else None
    return Data(train, validation, VOCAB, "phrases", variable=kind)


class Masked(Phrases):
    """Also a mask [T], a bias of attention scores [T, T], a scale [], and an image [3, 2, 2]."""

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        sample = super().__getitem__(i)
        tokens = len(sample["inputs"])
        draw = torch.Generator().manual_seed(i)
        return sample | {
            "mask": torch.ones(tokens, dtype=torch.bool),
            "bias": torch.randn(tokens, tokens, generator=draw),
            "target": torch.rand((), generator=draw) + 0.5,
            "losses": torch.randn(3, 2, 2, generator=draw),
        }


def short_phrases() -> Data:
    """Does not take seq_len."""
    return phrases(16)


def masked(seq_len: int) -> Data:
    padding = {
        "inputs": Pad(),
        "targets": Pad(IGNORE),
        "mask": Pad(False),
        "bias": Pad(-9.0, dims=2),
    }
    parts = (Masked(seq_len, part, 500) for part in (0, 1))
    return Data(*parts, VOCAB, "masked phrases", variable=VariableLength(4, padding))


class Mixing(nn.Module):
    """Attention to all tokens, also later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        return x + torch.tanh(scores.softmax(-1) @ self.value(x))


class Conditioned(nn.Module):
    """Uses the mask in every block, the scale in the middle and at the end, the image at the
    start."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.image = nn.Embedding(VOCAB, DIM), nn.Linear(12, DIM)
        self.blocks = nn.ModuleList(Mixing() for _ in range(6))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(
        self, ids: Tensor, mask: Tensor, *, bias: Tensor, target: Tensor, losses: Tensor
    ) -> Tensor:
        scores = bias.masked_fill(~mask[:, None, :], -1e4)  # [B, T, T]
        x = self.tokens(ids) + self.image(losses.flatten(1))[:, None]
        for number, block in enumerate(self.blocks):
            x = block(x, scores)
            if number == 2:
                x = x * target[:, None, None]
        return self.out(x) * target[:, None, None]


# --- invalid samples, by name ------------------------------------------------------


class Odd(Phrases):
    """Valid samples of seq_len tokens, except number 3 (and 0 if `everywhere`)."""

    def __init__(self, seq_len: int, mistake: str, everywhere: bool) -> None:
        super().__init__(seq_len, 0, 40)
        self.mistake, self.wrong = mistake, (0, 3) if everywhere else (3,)

    def length(self, i: int) -> int:
        return self.seq_len

    def __getitem__(self, i: int) -> object:
        sample = super().__getitem__(i)
        if i not in self.wrong:
            return sample
        ids = sample["inputs"]
        match self.mistake:
            case "tuple":
                return ids, ids, ids
            case "no targets":
                return {"inputs": ids, "labels": ids}
            case "number":
                return sample | {"inputs": ids, "scale": 1.5}
            case "tasks":
                return {"inputs": ids, "targets": {"a": ids, "b": ids}}
            case "more":
                return sample | {"mask": ids}
            case "dtype":
                return sample | {"targets": ids.float()}
            case "shorter":
                return {name: value[:-1] for name, value in sample.items()}
            case "longer":
                longer = torch.cat([ids, ids])
                return {"inputs": longer, "targets": longer}
            case "apart":
                return sample | {"targets": ids[1:]}
        raise AssertionError(self.mistake)


def odd(seq_len: int, mistake: str, everywhere: bool = False, variable: bool = False) -> Data:
    source = Odd(seq_len, mistake, everywhere)
    data = Data(source, Phrases(seq_len, 1, 8), VOCAB, "odd")
    return replace(data, variable=VariableLength()) if variable else data


def badly_declared(seq_len: int, mistake: str) -> Data:
    changes = {
        "bucket": VariableLength(bucket=0),
        "padding": VariableLength(padding={"inputs": Pad(), "targets": -100}),
        "lengths": VariableLength(lengths=[1, 2, 3]),
        "inputs": VariableLength(padding={"targets": Pad(IGNORE)}),
        "nothing": VariableLength(padding={"inputs": Pad(), "weights": Pad()}),
    }
    return replace(phrases(seq_len), variable=changes[mistake])


def empty(seq_len: int) -> Data:
    return replace(phrases(seq_len), validation=Phrases(seq_len, 1, 0))


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from ()

    def __len__(self) -> int:
        return 40


def stream(seq_len: int) -> Data:
    return replace(phrases(seq_len), train=Stream())


class Narrow(Phrases):
    def __getitem__(self, i: int) -> dict[str, Tensor]:
        sample = super().__getitem__(i)
        return {"inputs": sample["inputs"], "targets": sample["targets"].int()}


def narrow(seq_len: int) -> Data:
    return replace(phrases(seq_len), train=Narrow(seq_len, 0, 40))
