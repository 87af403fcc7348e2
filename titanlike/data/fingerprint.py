"""What identifies a run's data in its checkpoints: hashes of their content.

Tokens and samples are hashed whole where there are few, else in blocks that are spread evenly over
all of them: a change between the blocks is not seen, another length always is. The hashes do not
depend on the layout, the path, the time of a file, the type of its integers, or the machine.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from titanlike.config.schema import Config
from titanlike.data.checked_source import CheckedSource
from titanlike.data.sources import Data, PackedSource, Source

FORMAT = 1  # fingerprints of other formats are not compared
_WHOLE = 1 << 24  # tokens that are hashed whole
_BLOCKS, _BLOCK = 256, 1 << 12  # of more tokens: so many blocks of so many tokens
_SAMPLES = 32  # of another source: so many samples


def data_fingerprint(data: Data, config: Config) -> dict[str, Any]:
    """Texts by what they are of: the training part, the validation part, tokenizer, documents."""
    if data.fingerprint is not None:
        return {"format": FORMAT, "fingerprint": data.fingerprint}
    documents = getattr(config.data, "documents", False)
    return {
        "format": FORMAT,
        "training": _source(data.train),
        "validation": _source(data.validation),
        "tokenizer": data.tokenizer,
        "documents": f"separated at {data.boundary}" if documents else "not separated",
    }


def fingerprint_changes(saved: dict[str, Any], now: dict[str, Any]) -> list[str] | None:
    """What differs between two fingerprints; None where they cannot be compared."""
    if saved.get("format") != FORMAT:
        return None
    keys = [key for key in (*now, *saved) if saved.get(key) != now.get(key)]
    return [f"{key}: {now.get(key)}, was {saved.get(key)}" for key in dict.fromkeys(keys)]


def _source(source: Source) -> str:
    if isinstance(source, PackedSource):
        return f"{len(source.tokens):,} tokens, {_numbers_hash(source.tokens)}"
    with _random_state_kept():
        text = f"{len(source):,} samples, {_samples_hash(source)}"
    if isinstance(source, CheckedSource):
        if source.lengths is not None:
            text += f", lengths {_numbers_hash(np.asarray(source.lengths))}"
        if source.variable is not None:
            text += f", {source.variable.bucket}, {sorted(source.variable.padding.items())}"
    return text


def _numbers_hash(numbers: np.ndarray) -> str:
    """Of integers [N], as little-endian int64."""
    hasher = xxhash.xxh3_64()
    if len(numbers) <= _WHOLE:
        starts, size = range(0, len(numbers), _BLOCKS * _BLOCK), _BLOCKS * _BLOCK
    else:
        starts, size = _spread(len(numbers) - _BLOCK + 1, _BLOCKS), _BLOCK
    for start in starts:
        block = _read(numbers, start, min(size, len(numbers) - start))
        hasher.update(np.ascontiguousarray(block, dtype="<i8"))
    return hasher.hexdigest()


def _read(numbers: np.ndarray, start: int, size: int) -> np.ndarray:
    """A block; of a mapped file it is read, since a page fault may read megabytes ahead."""
    mapped = numbers
    while mapped is not None and not isinstance(mapped, np.memmap):
        mapped = getattr(mapped, "base", None)
    if mapped is None:
        return numbers[start : start + size]
    offset = mapped.offset + numbers.ctypes.data - mapped.ctypes.data + start * numbers.itemsize
    return np.fromfile(mapped.filename, numbers.dtype, size, offset=offset)


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
            hasher.update(flat.view(torch.uint8).numpy())
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
