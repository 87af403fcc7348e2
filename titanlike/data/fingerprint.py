"""What identifies a run's data in its checkpoints: hashes of their content.

Tokens and samples are hashed whole where there are few, else in blocks that are spread evenly over
all of them: a change between the blocks is not seen, another length always is. The hashes do not
depend on the layout, the path, the time of a file, the type of its integers, or the machine.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from titanlike.config.schema import Config
from titanlike.data.checked_source import CheckedSource
from titanlike.data.sources import Data, PackedFiles, PackedSource, Source

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
    if isinstance(source, PackedSource | PackedFiles):
        return f"{source.count:,} tokens, {_numbers_hash(source.count, source.read)}"
    with _random_state_kept():
        text = f"{len(source):,} samples, {_samples_hash(source)}"
    if isinstance(source, CheckedSource):
        if source.lengths is not None:
            lengths = np.asarray(source.lengths)
            text += f", lengths {_numbers_hash(len(lengths), lambda a, n: lengths[a : a + n])}"
        if source.variable is not None:
            text += f", {source.variable.bucket}, {sorted(source.variable.padding.items())}"
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
