"""Shuffle a data set of any size without memory: position in the run -> sample.

An epoch's order is a pseudo-random permutation of 0..size-1, computed for one position at a time:
a Feistel network permutes the smallest domain of 4^k numbers that contains `size`, and numbers
outside of 0..size-1 are permuted again until they are inside (cycle walking; Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002). So the order depends on (seed, size, position)
alone: not on the mesh, and not on what was read before.
"""

from __future__ import annotations

from typing import overload

import numpy as np

_ROUNDS = 8  # four suffice for large domains (Luby, Rackoff), small ones need eight to be uniform
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK64 = (1 << 64) - 1


def splitmix64(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: a bijective hash of a uint64 array."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@overload
def shuffled_index(position: int, size: int, seed: int) -> int: ...
@overload
def shuffled_index(position: np.ndarray, size: int, seed: int) -> np.ndarray: ...
def shuffled_index(position: int | np.ndarray, size: int, seed: int) -> int | np.ndarray:
    """The sample at `position` of the run, in 0..size-1; the epoch is position // size.

    position: an int >= 0 (returns an int) or an array (returns an int64 array of its shape). Every
    epoch of every seed has another permutation.
    """
    assert size >= 1, "the data set is empty"
    shape = np.shape(position)
    epoch, x = np.divmod(np.atleast_1d(np.asarray(position, np.uint64)), np.uint64(size))
    key = splitmix64(splitmix64(np.array([seed & _MASK64], np.uint64)) + epoch * _GOLDEN)
    half = max(1, ((size - 1).bit_length() + 1) // 2)  # bits in each half of a number
    x = _permute(x, key, half)
    while (outside := x >= np.uint64(size)).any():
        x[outside] = _permute(x[outside], key[outside], half)
    return x.astype(np.int64).reshape(shape) if shape else int(x[0])


def _permute(x: np.ndarray, key: np.ndarray, half: int) -> np.ndarray:
    """A Feistel network on 2 * half bits; its round function is a splitmix64 stream of `key`."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> bits, x & mask
    for turn in range(_ROUNDS):
        # element (turn, right) of the stream; right has at most 32 bits
        element = right | np.uint64(turn << 32)
        left, right = right, left ^ (splitmix64(key + element * _GOLDEN) & mask)
    return left << bits | right
