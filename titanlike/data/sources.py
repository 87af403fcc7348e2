"""Sequences by number: what every kind of data becomes.

A source has `len(source)` sequences; `source[i]` is dict(inputs=[T], targets=[T]), int64 tensors of
`seq_len` T, where targets[t] is the token after inputs[t]. With `data.documents=true` there is also
document_ids=[T], int64, which changes where a document begins.

A source of your own may give other inputs and targets (IGNORE where there is no loss), and more keys
with tensors of any shape: stacked to [B, ...] each is an argument of the model's forward. All samples
have the same keys, dtypes and shapes; see `VariableLength` for those that differ in length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from titanlike.data.token_file import open_tokens

IGNORE = -100  # a target that has no loss (torch's cross_entropy has the same default)


class Source(Protocol):
    """A sequence of samples, any of which can be read at any time, in any process."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Pad:
    """How the end of a field is filled: with `value`, its first `dims` dimensions."""

    value: float = 0
    dims: int = 1  # 2 of a mask [T, T]


@dataclass
class VariableLength:
    """Samples that differ in length T, the first dimension of their inputs, and T <= seq_len.

    Each dp rank's batch is padded to its longest sample, rounded up to a multiple of `bucket` (but
    never over seq_len). The pipeline prepares itself once for each length, and keeps the latest 32.
    Fields that are not in `padding` have one shape in all samples. Without a mask, padding at the
    end is seen by a model whose attention is not causal: give one (true, padded with 0).

    lengths: of the training samples, where they are known: then the batches of a step are of
    similar samples. The order still depends on the seed and the step alone.
    """

    bucket: int = 64
    padding: dict[str, Pad] = field(
        default_factory=lambda: {"inputs": Pad(), "targets": Pad(IGNORE)}
    )
    lengths: Sequence[int] | None = None


@dataclass
class Data:
    """What a run is trained on. A function of your own (`data.name=package.function`) returns one.

    `boundary` is the id of the token that begins a document (null: there is none), `decode` makes
    text of ids (null: there is no text). `variable`: see there (null: samples have one shape).
    """

    train: Source
    validation: Source
    vocab_size: int
    description: str
    boundary: int | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    variable: VariableLength | None = None


class PackedSource:
    """Tokens start..stop of a memory-mapped file, cut into sequences without gap or overlap.

    Sequence i reads tokens [i * seq_len, i * seq_len + seq_len]: the last one is a target only, and
    the next sequence's first input. A rest shorter than a sequence is not used.

    boundary: the token that begins a document; with it, samples have document_ids: how many of them
    there are up to each token. Targets are the same with and without: the target of a document's
    last token is the next one's boundary, by which the model learns to end, and nothing of the next
    document can be seen there.
    """

    def __init__(
        self,
        path: Path,
        dtype: str,
        start: int,
        stop: int,
        seq_len: int,
        vocab_size: int,
        boundary: int | None = None,
    ) -> None:
        self._arguments = (path, dtype, start, stop, seq_len, vocab_size, boundary)
        self._path, self._start, self._seq_len = path, start, seq_len
        self._vocab_size, self._boundary = vocab_size, boundary
        self._length = max(0, (stop - start - 1) // seq_len)
        self._tokens = open_tokens(path, dtype)

    def __reduce__(self) -> tuple:
        # A spawned loader process maps the file again; pickling the map would copy it whole.
        return type(self), self._arguments

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        start = self._start + i * self._seq_len
        tokens = self._tokens[start : start + self._seq_len + 1].astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= self._vocab_size)][0]
            raise ValueError(
                f"{self._path}: token id {bad} near position {start} is outside of the "
                f"vocabulary of {self._vocab_size}. Set data.vocab_size to more than the largest "
                "id in the file, and check data.dtype"
            )
        ids = torch.from_numpy(tokens)
        sample = {"inputs": ids[:-1], "targets": ids[1:]}
        if self._boundary is not None:
            sample["document_ids"] = (sample["inputs"] == self._boundary).cumsum(0)
        return sample


class SyntheticSource:
    """Uniform random tokens that depend on (seed, stream, i) alone; in effect endless."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int, stream: int) -> None:
        self._vocab_size, self._seq_len = vocab_size, seq_len
        self._seed, self._stream = seed & ((1 << 64) - 1), stream

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        # Philox is counter based: a key has 2^256 numbers, the stream is the counter's top word.
        bits = np.random.Philox(key=self._seed << 64 | i, counter=self._stream << 192)
        tokens = np.random.Generator(bits).integers(self._vocab_size, size=self._seq_len + 1)
        ids = torch.from_numpy(tokens)
        return {"inputs": ids[:-1], "targets": ids[1:]}
