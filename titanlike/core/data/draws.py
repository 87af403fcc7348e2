"""Random numbers that samples draw: from torch's, numpy's and Python's global generators, seeded
for each sample, so that every rank, layout, loader process and resume draws the same."""

from __future__ import annotations

import random

import numpy as np
import torch
import xxhash
from numpy.random import mtrand


def number_of(*key: object) -> int:
    """Hash a key to 64 bits, equal in every process and on every machine."""
    return xxhash.xxh3_64_intdigest(repr(key).encode())


class Draws:
    """A context for reading samples, after which the process's generators, such as dropout's, are
    as before. Takes some 70 us, and 30 us for each `seed`."""

    def __init__(self) -> None:
        self._own = np.random.MT19937()  # swapped in: copying numpy's state takes 0.4 ms

    def __enter__(self) -> Draws:
        self._states = random.getstate(), torch.default_generator.get_state()
        self._numpys = mtrand.get_bit_generator()
        mtrand.set_bit_generator(self._own)
        return self

    def seed(self, *key: object) -> None:
        """Seed the three generators from a key."""
        number = number_of(*key)
        random.seed(number)
        np.random.seed(number % (1 << 32))
        torch.default_generator.manual_seed(number)  # torch.manual_seed also asks each device

    def __exit__(self, *_: object) -> None:
        random.setstate(self._states[0])
        torch.default_generator.set_state(self._states[1])
        mtrand.set_bit_generator(self._numpys)
