"""The interface of all data: map-style sources of samples. A user's function returns `Data`.

A source has `len(source)` samples; `source[i]` is dict(inputs=[T], targets=[T]), int64 tensors of
`seq_len` T, where targets[t] is the token after inputs[t]. With `data.documents=true` there is also
document_ids=[T], int64, which changes where a document begins.

A user's source may return other inputs and targets (IGNORE = no loss), and more fields with tensors
of any shape: stacked to [B, ...], each is an argument of the model's forward. All samples have the
same keys, dtypes and shapes; see `VariableLength` for different lengths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from titanlike.core.config.errors import Problem
from titanlike.core.config.schema import Config

Batch = dict[str, torch.Tensor]  # field -> tensor whose first dimension is samples
IGNORE = -100  # a target without a loss, as in torch's cross_entropy
REAL = "real_tokens"  # field, bool [B, T]: False = padding; never given to the model
ENDLESS = 1 << 40  # length of a source without an end, in samples


def no_targets(data: Any, of: str, fix: str) -> Problem:
    """Return the error for a step, validation or proof in which no target has a loss. data: the
    config's section, as in the functions below."""
    reason = f"no target of {of} counts: each is {IGNORE}, which a loss leaves out"
    return Problem("data", data.name, reason, fix)


_WHOLE = 1 << 24  # up to so many tokens all are hashed
_BLOCKS, _BLOCK = 256, 1 << 12  # otherwise so many blocks of so many tokens
_SAMPLES = 32  # hashed of a source that is not token files


class Source(Protocol):
    """Samples by index; any sample can be read at any time, in any process.

    Some sources also have `collate(samples)`, which makes a batch, `batch_sampler(config, dp_rank,
    step)`, their own order, and `fingerprint()`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]: ...


class Stream(ABC):
    """Training data that are read in their own order, in place of a `Source` (stream_source.py)."""

    ends: int | None  # the last step that has a batch, once known

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def stream(
        self, config: Config, dp_rank: int, start: int, loader: Callable[..., Any]
    ) -> Iterator[Batch]: ...

    @abstractmethod
    def unread(self, config: Config, start: int) -> Iterator[Batch]: ...

    @abstractmethod
    def samples_read(self) -> int: ...

    @abstractmethod
    def first_samples(self, config: Config, dp_rank: int) -> Iterator[tuple[int, int]]: ...

    @abstractmethod
    def saved(self, step: int) -> dict[str, torch.Tensor]: ...

    @abstractmethod
    def wanted(
        self, shapes: Mapping[str, Sequence[int]], config: Config, dp_rank: int
    ) -> dict[str, torch.Tensor]: ...

    @abstractmethod
    def restore(self, entries: Mapping[str, torch.Tensor]) -> None: ...


def stack(samples: list[Batch]) -> Batch:
    """Stack samples of equal shapes to a batch [B, ...]."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def with_real_tokens(batch: Batch) -> Batch:
    """Add `REAL` to a batch of sequences that does not have it: padding is what a `mask` [B, T] of
    bool or int excludes, else what ends a sequence: tokens without a target that repeat the last
    one."""
    inputs, targets, mask = batch["inputs"], batch["targets"], batch.get("mask")
    if REAL in batch or inputs.dim() not in (2, 3) or inputs.shape[:2] != targets.shape:
        return batch
    if mask is not None and mask.shape == targets.shape and not mask.is_floating_point():
        return batch | {REAL: mask.bool()}
    alike = (inputs == inputs[:, -1:]).reshape(*targets.shape, -1).all(2)
    padding = (alike & (targets == IGNORE)).long().flip(1).cumprod(1).flip(1)
    return batch | {REAL: padding == 0}


@dataclass(frozen=True)
class Pad:
    """The padding of a field: `value`, appended in its first `dims` dimensions."""

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
    """Training and validation data; a user's function (`data.name=package.function`) may return it.

    boundary: id of the token that begins a document; ends: further ids that end a generated answer;
    encode, decode: text to ids and back; variable: for samples of different lengths; tokenizer: a
    text that identifies it; fingerprint: identifies the data on a resume, instead of a hash of
    samples; progress: metrics for a step's record, by the number of steps read so far; example: a
    batch of one sample, if it cannot be read from `train`; validation_sets: the sets of
    `validation.data` by name ("" for a single one), which replace `validation`.
    """

    train: Source | Stream
    validation: Source
    vocab_size: int | None  # None = not tokens
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
        """Validation sources by name; "" for a single one."""
        return self.validation_sets or {"": self.validation}


def documents_note(data: Any) -> str:
    """Return the end of a data description: whether attention stays within documents."""
    return ", attention within documents" if getattr(data, "documents", False) else ""


# --- fingerprints -------------------------------------------------------------------------------
#
# What identifies a run's data in its checkpoints: hashes of their content. Tokens and samples are
# hashed whole where there are few, else in blocks that are spread evenly over all of them: a change
# between the blocks is not seen, another length always is. The hashes do not depend on the layout,
# the path, the time of a file, the type of its integers, or the machine.


def data_fingerprint(data: Data, section: Any) -> dict[str, Any]:
    """Fingerprint the training part, the validation parts, the tokenizer and the document handling."""
    validation = {
        f"validation {name}".strip(): source_fingerprint(source)
        for name, source in data.validation_sets.items()
    }
    fingerprint = data.fingerprint
    if fingerprint is None and isinstance(data.train, Stream):  # of one's own, without a name
        fingerprint = f"a stream of {section.name}"
        if not hasattr(data.validation, "of_stream"):
            validation = validation or {"validation": source_fingerprint(data.validation)}
    if fingerprint is not None:
        return {"fingerprint": fingerprint, **validation}
    assert not isinstance(data.train, Stream), "a stream has a fingerprint"
    documents = getattr(section, "documents", False)
    return {
        "training": source_fingerprint(data.train),
        **(validation or {"validation": source_fingerprint(data.validation)}),
        "tokenizer": data.tokenizer,
        "documents": f"separated at {data.boundary}" if documents else "not separated",
    }


def fingerprint_changes(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what differs between two fingerprints."""
    keys = [key for key in (*now, *saved) if saved.get(key) != now.get(key)]
    return [f"{key}: {now.get(key)}, was {saved.get(key)}" for key in dict.fromkeys(keys)]


def source_fingerprint(source: Source, before: Callable[[], object] | None = None) -> str:
    """Return a text that identifies a source's content. before: called before each sample; with it,
    samples are read even if the source has a fingerprint of its own, which reads megabytes."""
    if hasattr(source, "fingerprint") and before is None:
        return source.fingerprint()
    hashes = []
    for i in spread(len(source), _SAMPLES):
        if before is not None:
            before()
        hashes.append(sample_hash(source, i))
    text = f"{len(source):,} samples, {xxhash.xxh3_64_hexdigest(' '.join(hashes).encode())}"
    if (lengths := getattr(source, "lengths", None)) is not None:
        lengths = np.asarray(lengths)
        text += f", lengths {numbers_hash(len(lengths), lambda a, n: lengths[a : a + n])}"
    if (variable := getattr(source, "variable", None)) is not None:
        text += f", {variable.bucket}, {sorted(variable.padding.items())}"
    return text


def numbers_hash(count: int, read: Callable[[int, int], np.ndarray]) -> str:
    """Hash `count` integers as little-endian int64. read(start, number): returns a slice of them."""
    hasher = xxhash.xxh3_64()
    if count <= _WHOLE:
        starts, size = range(0, count, _BLOCKS * _BLOCK), _BLOCKS * _BLOCK
    else:
        starts, size = spread(count - _BLOCK + 1, _BLOCKS), _BLOCK
    for start in starts:
        block = read(start, min(size, count - start))
        hasher.update(np.ascontiguousarray(block, dtype="<i8").data)
    return hasher.hexdigest()


def sample_hash(source: Source, i: int) -> str:
    """Hash a sample; of one that cannot be read, return the name of its error."""
    hasher = xxhash.xxh3_64()
    try:
        sample = source[i]
    except Exception as error:  # a broken sample that training may never read
        return type(error).__name__
    for name, value in sorted(sample.items()):
        if name == REAL:
            continue
        hasher.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().flatten()
        hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def spread(size: int, most: int) -> Sequence[int]:
    """Return up to `most` of 0..size-1, evenly spread, first and last included."""
    if size <= most:
        return range(size)
    return [i * (size - 1) // (most - 1) for i in range(most)]
