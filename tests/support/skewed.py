"""Text of few frequent and many rare words, as all languages have (the law of Zipf and
Mandelbrot), in pairs to learn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titanlike.data.sources import Data

WORDS = 256


class Zipf(Sequence):
    """Samples of words of which the n-th has a probability of 1 / (10 + n), up to a factor; every
    second one follows from the one before."""

    def __init__(self, seq_len: int, stream: int):
        self._length, self._stream = seq_len + 1, stream
        self._odds = 1 / (10 + torch.arange(1, WORDS + 1))

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(2 * sample + self._stream)
        ids = torch.multinomial(self._odds, self._length, replacement=True, generator=generator)
        ids[1::2] = (WORDS - 1 - ids[: len(ids[1::2]) * 2 : 2]) % WORDS
        return {"inputs": ids[:-1], "targets": ids[1:]}


def zipf(seq_len: int) -> Data:
    return Data(Zipf(seq_len, 0), Zipf(seq_len, 1), WORDS, "words by Zipf")
