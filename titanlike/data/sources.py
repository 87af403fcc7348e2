"""The interface of all data: map-style sources of samples. What your own data returns: `Data`.

A source has `len(source)` samples; `source[i]` is dict(inputs=[T], targets=[T]), int64 tensors of
`seq_len` T, where targets[t] is the token after inputs[t]. With `data.documents=true` there is also
document_ids=[T], int64, which changes where a document begins.

Your own source may return other inputs and targets (IGNORE where there is no loss), and more fields
with tensors of any shape: stacked to [B, ...], each is an argument of the model's forward. All
samples have the same keys, dtypes and shapes; see `VariableLength` for different lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from titanlike.data.token_file import open_tokens

Batch = dict[str, torch.Tensor]  # of fields, the rows of a tensor are samples
IGNORE = -100  # a target without a loss, as in torch's cross_entropy


class Source(Protocol):
    """Samples by index; any sample can be read at any time, in any process."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Pad:
    """The padding of a field: `value`, at the end of its first `dims` dimensions."""

    value: float = 0
    dims: int = 1  # 2 for a mask [T, T]


@dataclass
class VariableLength:
    """Samples of different lengths T <= seq_len; T is the first dimension of `inputs`.

    Each dp rank's batch is padded to its longest sample, rounded up to a multiple of `bucket` (but
    never above seq_len). The pipeline is set up once for each length; the latest 32 are cached.
    Fields that are not in `padding` have the same shape in all samples. A model whose attention is
    not causal attends to the padding unless the samples have a mask (True, padded with 0).

    lengths: of the training samples, if known: then the samples of a step have similar lengths. The
    order still depends on the seed and the step alone.
    """

    bucket: int = 64
    padding: dict[str, Pad] = field(
        default_factory=lambda: {"inputs": Pad(), "targets": Pad(IGNORE)}
    )
    lengths: Sequence[int] | None = None


@dataclass
class Data:
    """Training and validation data; your own function (`data.name=package.function`) returns one.

    boundary: the id of the token that begins a document, if any; ends: further ids that end what a
    model writes (of an answer); encode, decode: text to ids and back,
    if that is possible;
    variable: for samples of different lengths; tokenizer: a text that identifies it, if any;
    fingerprint: a text that identifies the data for a resume, in place of samples that are read;
    progress: numbers for the record of a step, by the number of steps whose batches were read.
    """

    train: Source
    validation: Source
    vocab_size: int
    description: str
    boundary: int | None = None
    ends: frozenset[int] = frozenset()
    decode: Callable[[Sequence[int]], str] | None = None
    encode: Callable[[str], list[int]] | None = None
    variable: VariableLength | None = None
    tokenizer: str | None = None
    fingerprint: str | None = None
    progress: Callable[[int], dict[str, float]] | None = None


class PackedSource:
    """Tokens start..stop of a memory-mapped file, cut into sequences without gap or overlap.

    Sequence i reads tokens [i * seq_len, i * seq_len + seq_len]: the last is a target only, and the
    first input of the next sequence. A remainder shorter than a sequence is not used.

    boundary: the token that begins a document; if given, samples have document_ids, the number of
    boundaries up to each token. Targets do not change: the target of a document's last token is the
    next document's boundary, from which the model learns to end a document.
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
        self._path, self._start, self._stop, self._seq_len = path, start, stop, seq_len
        self._vocab_size, self._boundary = vocab_size, boundary
        self._length = max(0, (stop - start - 1) // seq_len)
        self._tokens = open_tokens(path, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned loader process maps the file again: pickling the map would copy its content.
        return type(self), self._arguments

    def __len__(self) -> int:
        return self._length

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self._stop - self._start

    def read(self, start: int, number: int) -> np.ndarray:
        """So many tokens from `start`, without the map: a page fault may read megabytes ahead."""
        mapped = self._tokens.base
        assert isinstance(mapped, np.memmap) and mapped.filename is not None
        offset = mapped.offset + (self._start + start) * mapped.itemsize
        return np.fromfile(mapped.filename, mapped.dtype, number, offset=offset)

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


class PackedFiles:
    """The sequences of several token files, one file after the other."""

    def __init__(self, sources: Sequence[PackedSource]) -> None:
        self._sources = list(sources)
        self._ends = np.cumsum([len(source) for source in sources])  # in sequences
        self._token_ends = np.cumsum([source.count for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._sources else 0

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        at = int(np.searchsorted(self._ends, i, side="right"))
        return self._sources[at][i - (int(self._ends[at - 1]) if at else 0)]

    @property
    def count(self) -> int:
        """Number of tokens."""
        return int(self._token_ends[-1]) if self._sources else 0

    def read(self, start: int, number: int) -> np.ndarray:
        """So many tokens from `start`, of as many files as have them."""
        parts = []
        number = min(number, self.count - start)
        while number > 0:
            at = int(np.searchsorted(self._token_ends, start, side="right"))
            begin = start - (int(self._token_ends[at - 1]) if at else 0)
            parts.append(
                self._sources[at].read(begin, min(number, self._sources[at].count - begin))
            )
            start, number = start + len(parts[-1]), number - len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


ENDLESS = 1 << 40  # samples


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
