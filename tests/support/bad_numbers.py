"""Batches that spoil a step: chosen samples hold a token that a model answers with NaN, or loudly.

data.name=support.bad_numbers.spoiled   data.poison=[...] data.loud=[...] (sample numbers)
model.name=support.bad_numbers.Touchy
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from support.data import Dropping
from titanlike.core.config.schema import Config
from titanlike.core.data.order import shuffled_index
from titanlike.core.data.sources import Data
from titanlike.core.data.synthetic import SyntheticSource

WORDS = 62  # ordinary tokens
POISON, LOUD = WORDS, WORDS + 1


class Spoiled:
    """Random tokens; some samples begin with POISON or LOUD, and at some the process is killed."""

    def __init__(
        self,
        source: SyntheticSource,
        poison: list[int] = (),
        loud: list[int] = (),
        deadly: list[int] = (),
        trap: str = "",
    ):
        self.source, self.deadly, self.trap = source, set(deadly), trap
        self.first = dict.fromkeys(poison, POISON) | dict.fromkeys(loud, LOUD)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index in self.deadly and Path(self.trap).exists():
            os._exit(1)
        sample = self.source[index]
        if index in self.first:
            inputs = sample["inputs"].clone()
            inputs[0] = self.first[index]
            sample = sample | {"inputs": inputs}
        return sample


def spoiled(seq_len: int, **spoils: object) -> Data:
    train, validation = (SyntheticSource(WORDS, seq_len, 0, part) for part in (0, 1))
    return Data(Spoiled(train, **spoils), validation, WORDS + 2, "spoiled random tokens")


def spoiled_stream(seq_len: int, reader: int, readers: int, seed: int, **spoils: object) -> Data:
    """The same samples in the same batches, of `readers` samples, as they are streamed."""
    data = spoiled(seq_len, **spoils)
    places = (shuffled_index(n * readers + reader, 1 << 40, seed) for n in count())
    return replace(data, train=map(data.train.__getitem__, places))


def sample_of(config: Config, step: int, row: int = 0) -> int:
    """The number of a sample in the batch that a run without rollbacks reads in a step."""
    return shuffled_index((step - 1) * config.batch_size + row, 1 << 40, config.seed)


class Touchy(Dropping):
    """Blocks with a residual. POISON becomes NaN, LOUD a large activation."""

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            tokens, x = x[..., None], self.embedding(x)
            x = torch.where(tokens == POISON, torch.nan, x)
            x = torch.where(tokens == LOUD, 1000.0, x)
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return x if self.head is None else self.head(x)
