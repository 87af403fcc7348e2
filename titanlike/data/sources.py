"""The interface of all data: map-style sources of samples. What your own data returns: `Data`.

A source has `len(source)` samples; `source[i]` is dict(inputs=[T], targets=[T]), int64 tensors of
`seq_len` T, where targets[t] is the token after inputs[t]. With `data.documents=true` there is also
document_ids=[T], int64, which changes where a document begins.

Your own source may return other inputs and targets (IGNORE where there is no loss), and more fields
with tensors of any shape: stacked to [B, ...], each is an argument of the model's forward. All
samples have the same keys, dtypes and shapes; see `VariableLength` for different lengths.
"""

from __future__ import annotations

import contextlib
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from titanlike.config.schema import Config
from titanlike.data.registry import DataError
from titanlike.data.tokenizer import Tokenizer
from titanlike.data.tokens import Parts, TokenFile, open_tokens, too_short

Batch = dict[str, torch.Tensor]  # of fields, the rows of a tensor are samples
IGNORE = -100  # a target without a loss, as in torch's cross_entropy
ENDLESS = 1 << 40  # samples

FORMAT = 1  # fingerprints of other formats are not compared
_WHOLE = 1 << 24  # tokens that are hashed whole
_BLOCKS, _BLOCK = 256, 1 << 12  # of more tokens: so many blocks of so many tokens
_SAMPLES = 32  # of another source: so many samples


class Source(Protocol):
    """Samples by index; any sample can be read at any time, in any process.

    The sources of some kinds also have `collate(samples)`, which makes a batch, and
    `batch_sampler(config, dp_rank, step)`, an order of their own.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]: ...


def stack(samples: list[Batch]) -> Batch:
    """Samples of equal shapes as a batch [B, ...]."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


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


# --- packed tokens ------------------------------------------------------------------------------


def packed_data(
    config: Config,
    parts: Parts,
    vocab_size: int,
    boundary: int | None,
    tokenizer: Tokenizer | None,
    what: str,
) -> Data:
    """Files of tokens as data. what: the data in words. Raises DataError for a part that is shorter
    than a sequence."""
    for error in too_short(parts, config.seq_len):
        raise error
    data: Any = config.data
    sources, separated = {}, boundary if data.documents else None
    for part, files in parts.items():
        sources[part] = PackedSource(files, config.seq_len, vocab_size, separated)
        if not len(sources[part]):
            reason = f"no file of the {part} part has as many as seq_len + 1 tokens"
            raise DataError("data.path", data.path, reason, "Give larger files")
    train, validation = sources["train"], sources["validation"]
    what += f": {train.count:,} tokens for training, {validation.count:,} for validation"
    return Data(
        train,
        validation,
        vocab_size=vocab_size,
        description=what + documents_note(config),
        boundary=boundary,
        decode=None if tokenizer is None else tokenizer.decode,
        encode=None if tokenizer is None else tokenizer.encode,
        tokenizer=None if tokenizer is None else tokenizer.fingerprint,
    )


def documents_note(config: Config) -> str:
    """The end of a description."""
    return ", attention within documents" if getattr(config.data, "documents", False) else ""


class PackedSource:
    """Token files cut into sequences without gap or overlap; none goes over the end of a file.

    Sequence i of a file reads its tokens [i * seq_len, i * seq_len + seq_len]: the last is a target
    only, and the first input of the next sequence. A remainder shorter than a sequence is not used.

    boundary: the token that begins a document; if given, samples have document_ids, the number of
    boundaries up to each token. Targets do not change: the target of a document's last token is the
    next document's boundary, from which the model learns to end a document.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        seq_len: int,
        vocab_size: int,
        boundary: int | None = None,
    ) -> None:
        self._arguments = files, seq_len, vocab_size, boundary
        self._files, self._seq_len = files, seq_len
        self._vocab_size, self._boundary = vocab_size, boundary
        self._tokens = [open_tokens(file.path, file.dtype) for file in files]
        # ends of the files, in sequences and in tokens
        self._ends = [*accumulate(max(0, (file.count - 1) // seq_len) for file in files)]
        self._token_ends = [*accumulate(file.count for file in files)]

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned loader process maps the files again: pickling the maps would copy their content.
        return type(self), self._arguments

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self._token_ends[-1]

    def read(self, start: int, number: int) -> np.ndarray:
        """So many tokens from `start`, if there are, without the maps: a page fault may read
        megabytes ahead."""
        pieces, stop = [np.empty(0, np.int64)], min(start + number, self.count)
        while start < stop:
            at = bisect_right(self._token_ends, start)
            file, mapped = self._files[at], self._tokens[at].base
            assert isinstance(mapped, np.memmap) and mapped.filename is not None
            place = file.start + start - (self._token_ends[at] - file.count)
            count = min(stop, self._token_ends[at]) - start
            offset = mapped.offset + place * mapped.itemsize
            piece = np.fromfile(mapped.filename, mapped.dtype, count, offset=offset)
            pieces.append(piece.astype(np.int64))
            start += count
        return np.concatenate(pieces)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        at = bisect_right(self._ends, i)
        file = self._files[at]
        start = file.start + (i - (self._ends[at - 1] if at else 0)) * self._seq_len
        tokens = self._tokens[at][start : start + self._seq_len + 1].astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= self._vocab_size)][0]
            raise ValueError(
                f"{file.path}: token id {bad} near position {start} is outside of the "
                f"vocabulary of {self._vocab_size}. Set data.vocab_size to more than the largest "
                "id in the file, and check data.dtype"
            )
        ids = torch.from_numpy(tokens)
        sample = {"inputs": ids[:-1], "targets": ids[1:]}
        if self._boundary is not None:
            sample["document_ids"] = (sample["inputs"] == self._boundary).cumsum(0)
        return sample


# --- fingerprints -------------------------------------------------------------------------------
#
# What identifies a run's data in its checkpoints: hashes of their content. Tokens and samples are
# hashed whole where there are few, else in blocks that are spread evenly over all of them: a change
# between the blocks is not seen, another length always is. The hashes do not depend on the layout,
# the path, the time of a file, the type of its integers, or the machine.


def data_fingerprint(data: Data, config: Config) -> dict[str, Any]:
    """Texts by what they are of: the training part, the validation part, tokenizer, documents."""
    if data.fingerprint is not None:
        return {"format": FORMAT, "fingerprint": data.fingerprint}
    documents = getattr(config.data, "documents", False)
    return {
        "format": FORMAT,
        "training": source_fingerprint(data.train),
        "validation": source_fingerprint(data.validation),
        "tokenizer": data.tokenizer,
        "documents": f"separated at {data.boundary}" if documents else "not separated",
    }


def fingerprint_changes(saved: dict[str, Any], now: dict[str, Any]) -> list[str] | None:
    """What differs between two fingerprints; None where they cannot be compared."""
    if saved.get("format") != FORMAT:
        return None
    keys = [key for key in (*now, *saved) if saved.get(key) != now.get(key)]
    return [f"{key}: {now.get(key)}, was {saved.get(key)}" for key in dict.fromkeys(keys)]


def source_fingerprint(source: Source) -> str:
    """A text that identifies the content of one source."""
    if isinstance(source, PackedSource):
        return f"{source.count:,} tokens, {_numbers_hash(source.count, source.read)}"
    with _random_state_kept():
        text = f"{len(source):,} samples, {_samples_hash(source)}"
    if (lengths := getattr(source, "lengths", None)) is not None:
        lengths = np.asarray(lengths)
        text += f", lengths {_numbers_hash(len(lengths), lambda a, n: lengths[a : a + n])}"
    if (variable := getattr(source, "variable", None)) is not None:
        text += f", {variable.bucket}, {sorted(variable.padding.items())}"
    return text


def _numbers_hash(count: int, read: Callable[[int, int], np.ndarray]) -> str:
    """Of integers [count], as little-endian int64. read: (start, number) to these of them."""
    hasher = xxhash.xxh3_64()
    if count <= _WHOLE:
        starts, size = range(0, count, _BLOCKS * _BLOCK), _BLOCKS * _BLOCK
    else:
        starts, size = _spread(count - _BLOCK + 1, _BLOCKS), _BLOCK
    for start in starts:
        block = read(start, min(size, count - start))
        hasher.update(np.ascontiguousarray(block, dtype="<i8").data)
    return hasher.hexdigest()


def _samples_hash(source: Source) -> str:
    """Of the fields of some samples; of their forms alone if a sample is not the same twice."""
    indices = _spread(len(source), _SAMPLES)
    hashes = [_sample_hash(source, i) for i in indices]
    if hashes[0] == _sample_hash(source, indices[0]):
        return xxhash.xxh3_64_hexdigest(" ".join(hashes).encode())
    form = _sample_hash(source, indices[0], values=False)
    return f"{form} (of random samples: their values are not compared)"


def _sample_hash(source: Source, i: int, values: bool = True) -> str:
    hasher = xxhash.xxh3_64()
    try:
        sample = source[i]
    except Exception as error:  # training may never read it
        return type(error).__name__
    for name, value in sorted(sample.items()):
        hasher.update(f"{name} {value.dtype} {list(value.shape) if values else ''}".encode())
        if values:
            flat = value.detach().cpu().contiguous().flatten()
            hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _spread(size: int, most: int) -> Sequence[int]:
    """All of 0..size-1, or `most` of them, evenly spread, the first and the last included."""
    if size <= most:
        return range(size)
    return [i * (size - 1) // (most - 1) for i in range(most)]


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """A user's samples may draw random numbers, which would change those of training."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])
