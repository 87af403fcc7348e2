"""Random tokens (`data=synthetic`), generated on demand: for benchmarks."""

from __future__ import annotations

import numpy as np
import torch

from titanlike.core.config.groups.data import SyntheticData
from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import Vocabulary
from titanlike.core.data.sources import ENDLESS, Data

CHECKS = ()


def vocabulary(data: SyntheticData) -> Vocabulary:
    return Vocabulary(data.vocab_size)


def open_data(data: SyntheticData, config: Config) -> Data:
    train, validation = (
        SyntheticSource(data.vocab_size, config.seq_len, config.seed, stream) for stream in (0, 1)
    )
    return Data(train, validation, data.vocab_size, "random tokens, generated on demand")


class SyntheticSource:
    """Uniform random tokens that depend on (seed, stream, i) alone; practically endless."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int, stream: int) -> None:
        self._vocab_size, self._seq_len = vocab_size, seq_len
        self._seed, self._stream = seed & ((1 << 64) - 1), stream

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        # Philox is counter-based: 2^256 numbers per key; the stream is the counter's top word.
        bits = np.random.Philox(key=self._seed << 64 | i, counter=self._stream << 192)
        tokens = np.random.Generator(bits).integers(self._vocab_size, size=self._seq_len + 1)
        ids = torch.from_numpy(tokens)
        return {"inputs": ids[:-1], "targets": ids[1:]}
