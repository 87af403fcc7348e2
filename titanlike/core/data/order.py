"""The global order of samples, shuffled in constant memory, and each dp rank's share of a step.

Step s is samples [s * batch_size, (s + 1) * batch_size) of the order. An epoch's order is a
pseudo-random permutation of 0..size-1, evaluated at single positions: a Feistel network permutes
the smallest domain of 4^k numbers that contains `size`, and numbers outside of 0..size-1 are
permuted again until they are inside (cycle walking; Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", 2002). So the order depends on (seed, size, position) alone, neither on the mesh
nor on what was read before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from typing import Any, overload

import numpy as np

from titanlike.core.config.schema import Config

_BLOCK = 1024  # samples whose order is computed in one call
_ROUNDS = 8  # four suffice for large domains (Luby, Rackoff), small ones need eight to be uniform
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def splitmix64(x: Any) -> Any:
    """Apply the finalizer of splitmix64, a bijective 64-bit hash, to an int64 array or tensor."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)


@overload
def shuffled_index(position: int, size: int, seed: int) -> int: ...
@overload
def shuffled_index(position: np.ndarray, size: int, seed: int) -> np.ndarray: ...
def shuffled_index(position: int | np.ndarray, size: int, seed: int) -> int | np.ndarray:
    """Return the sample, 0..size-1, at `position` of the run; the epoch is position // size.

    position: an int >= 0 (returns an int) or an array (returns an int64 array of its shape). Every
    epoch of every seed has a different permutation.
    """
    assert size >= 1, "the data set is empty"
    shape = np.shape(position)
    epoch, x = np.divmod(np.atleast_1d(np.asarray(position, np.int64)), size)
    start = np.array([seed % (1 << 64)], np.uint64).view(np.int64)
    key = splitmix64(splitmix64(start) + epoch * _GOLDEN)
    half = max(1, ((size - 1).bit_length() + 1) // 2)  # bits in each half of an index
    x = _permute(x, key, half)
    while (outside := x >= size).any():
        x[outside] = _permute(x[outside], key[outside], half)
    return x.reshape(shape) if shape else int(x[0])


def _permute(x: np.ndarray, key: np.ndarray, half: int) -> np.ndarray:
    """Apply a Feistel network on 2 * half bits, whose round function is a splitmix64 stream of
    `key`."""
    mask = (1 << half) - 1
    left, right = x >> half, x & mask
    for turn in range(_ROUNDS):
        element = right | turn << 32  # (turn, right) of the stream; right has at most 32 bits
        left, right = right, left ^ (splitmix64(key + element * _GOLDEN) & mask)
    return left << half | right


def held_out(fraction: float) -> Iterator[bool]:
    """Yield for each document, by its number, whether it belongs to the validation part."""
    limit = np.uint64(math.ceil(fraction * 2.0**64))
    for first in count(1, _BLOCK):
        hashes = splitmix64(np.arange(first, first + _BLOCK)).astype(np.uint64)
        yield from (hashes < limit).tolist()


class GlobalBatchSampler:
    """Yields the sample indices of a dp rank's slice of each step, endlessly.

    Indices are computed for `_BLOCK` samples or more per call, which takes hardly longer than for
    one step.
    """

    with_epochs = False  # True: indices are epoch * size + index

    def __init__(self, size: int, config: Config, dp_rank: int, step: int) -> None:
        assert config.batch_size % config.dp == 0, "batch_size must divide into dp parts"
        self._size, self._seed = size, config.seed
        self._global, self._local = config.batch_size, config.batch_size // config.dp
        self._offset = dp_rank * self._local
        self._step = step
        self._steps = max(1, _BLOCK // self._local)  # steps in a block
        # (block's number, samples of each step)
        self._block: tuple[int, list[list[int]]] = (-1, [])

    def __iter__(self) -> GlobalBatchSampler:
        return self

    def __next__(self) -> list[int]:
        number, row = divmod(self._step, self._steps)
        if number != self._block[0]:
            steps = np.arange(number * self._steps, (number + 1) * self._steps)
            samples = self._samples(steps)
            if self.with_epochs:
                samples = samples + self._positions(steps) // self._size * self._size
            self._block = (number, samples.tolist())
        self._step += 1
        return self._block[1][row]

    def _samples(self, steps: np.ndarray) -> np.ndarray:
        """Return this dp rank's sample indices for several steps, [steps, samples per step]."""
        return shuffled_index(self._positions(steps), self._size, self._seed)

    def _positions(self, steps: np.ndarray) -> np.ndarray:
        return steps[:, None] * self._global + self._offset + np.arange(self._local)


class RampBatchSampler(GlobalBatchSampler):
    """The same order of samples, with as many per step as fill the step's tokens: see
    `Config.ramp`."""

    def __init__(self, size: int, config: Config, dp_rank: int, step: int) -> None:
        super().__init__(size, config, dp_rank, step)
        self._config, self._dp_rank = config, dp_rank

    def __next__(self) -> list[int]:
        length = self._config.seq_len
        first, end = (self._config.tokens(self._step + more) // length for more in (0, 1))
        self._step += 1
        count = (end - first) // self._config.dp
        positions = first + self._dp_rank * count + np.arange(count)
        return shuffled_index(positions, self._size, self._seed).tolist()
