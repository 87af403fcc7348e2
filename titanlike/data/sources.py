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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash

from titanlike.config.errors import Problem
from titanlike.config.schema import Config

Batch = dict[str, torch.Tensor]  # of fields, the rows of a tensor are samples
IGNORE = -100  # a target without a loss, as in torch's cross_entropy
ENDLESS = 1 << 40  # samples


def no_targets(data: Any, of: str, fix: str) -> Problem:
    """What is said of a step, a validation or a proof without a target that counts. data: the
    section of the config, as in the functions below."""
    reason = f"no target of {of} counts: each is {IGNORE}, which a loss leaves out"
    return Problem("data", data.name, reason, fix)


FORMAT = 1  # fingerprints of other formats are not compared
_WHOLE = 1 << 24  # tokens that are hashed whole
_BLOCKS, _BLOCK = 256, 1 << 12  # of more tokens: so many blocks of so many tokens
_SAMPLES = 32  # of another source: so many samples


class Source(Protocol):
    """Samples by index; any sample can be read at any time, in any process.

    The sources of some kinds also have `collate(samples)`, which makes a batch,
    `batch_sampler(config, dp_rank, step)`, an order of their own, and `fingerprint()`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]: ...


@runtime_checkable
class Stream(Protocol):
    """Training data in the order of its own, in place of a `Source` (stream_source.py)."""

    ends: int | None  # the step after which there is none, once it is known

    def __len__(self) -> int: ...

    def stream(
        self, config: Config, dp_rank: int, start: int, loader: Callable[..., Any]
    ) -> Iterator[Batch]: ...

    def unread(self, config: Config, start: int) -> Iterator[Batch]: ...

    def saved(self, step: int) -> dict[str, torch.Tensor]: ...

    def wanted(
        self, shapes: Mapping[str, Sequence[int]], config: Config, dp_rank: int
    ) -> dict[str, torch.Tensor]: ...

    def restore(self, entries: Mapping[str, torch.Tensor]) -> None: ...


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
    progress: numbers for the record of a step, by the number of steps whose batches were read;
    example: a batch of one sample, where the run's batches come from elsewhere;
    validation_sets: those of `validation.data` by name, "" of a single one; empty = `validation`.
    """

    train: Source | Stream
    validation: Source
    vocab_size: int | None  # None = of no tokens
    description: str
    boundary: int | None = None
    ends: frozenset[int] = frozenset()
    decode: Callable[[Sequence[int]], str] | None = None
    encode: Callable[[str], list[int]] | None = None
    variable: VariableLength | None = None
    tokenizer: str | None = None
    fingerprint: str | None = None
    progress: Callable[[int], dict[str, float]] | None = None
    example: Batch | None = None
    validation_sets: dict[str, Source] = field(default_factory=dict)

    @property
    def validations(self) -> dict[str, Source]:
        """Name -> what is validated on; "" of a single one."""
        return self.validation_sets or {"": self.validation}


def documents_note(data: Any) -> str:
    """The end of a description."""
    return ", attention within documents" if getattr(data, "documents", False) else ""


# --- fingerprints -------------------------------------------------------------------------------
#
# What identifies a run's data in its checkpoints: hashes of their content. Tokens and samples are
# hashed whole where there are few, else in blocks that are spread evenly over all of them: a change
# between the blocks is not seen, another length always is. The hashes do not depend on the layout,
# the path, the time of a file, the type of its integers, or the machine.


def data_fingerprint(data: Data, section: Any) -> dict[str, Any]:
    """Texts by what they are of: the training part, the validation part, tokenizer, documents."""
    own = {
        f"validation {name}".strip(): source_fingerprint(source)
        for name, source in data.validation_sets.items()
    }
    if data.fingerprint is not None:
        return {"format": FORMAT, "fingerprint": data.fingerprint, **own}
    documents = getattr(section, "documents", False)
    assert not isinstance(data.train, Stream), "a stream has a fingerprint"
    return {
        "format": FORMAT,
        "training": source_fingerprint(data.train),
        **(own or {"validation": source_fingerprint(data.validation)}),
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
    if hasattr(source, "fingerprint"):
        return source.fingerprint()
    with random_state_kept():
        text = f"{len(source):,} samples, {_samples_hash(source)}"
    if (lengths := getattr(source, "lengths", None)) is not None:
        lengths = np.asarray(lengths)
        text += f", lengths {numbers_hash(len(lengths), lambda a, n: lengths[a : a + n])}"
    if (variable := getattr(source, "variable", None)) is not None:
        text += f", {variable.bucket}, {sorted(variable.padding.items())}"
    return text


def numbers_hash(count: int, read: Callable[[int, int], np.ndarray]) -> str:
    """A hash of integers [count], as little-endian int64. read: (start, number) to these of
    them."""
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
    """A hash of some samples; of their forms alone if a sample is not the same twice."""
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
def random_state_kept() -> Iterator[None]:
    """A user's samples may draw random numbers, which would change those of training."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])
