"""The cost of every possible stage, in whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np

INFINITE = 2**61  # more than any cost; the sum of two does not overflow

Starts = list[int]  # for each stage, the position of its first unit


class StageCosts:
    """The cost of a stage with the units start ... stop - 1:

    fixed[start, stop] + factors[stage] * (variable[start] + ... + variable[stop - 1])
    """

    def __init__(self, fixed: np.ndarray, variable: Sequence[int], factors: Sequence[int]) -> None:
        """fixed: [units + 1, units + 1] whole numbers, at most the sum of the stage's units (what
        units share counts once) and growing with the range; variable: [units]; factors: [stages].
        """
        largest = int(fixed.max(initial=0)) + sum(map(int, variable)) * max(factors)
        shift = max(0, largest.bit_length() - 59)
        self.scale = 1 << shift  # of all costs, so that sums fit into 64 bits
        self._fixed = np.asarray(fixed, dtype=np.int64) >> shift
        variable = [int(cost) >> shift for cost in variable]
        self._prefix_sums = np.array([0, *accumulate(variable)], dtype=np.int64)
        self.factors = list(factors)
        self._tables: dict[int, np.ndarray] = {}

    @property
    def units(self) -> int:
        return len(self._prefix_sums) - 1

    @property
    def stages(self) -> int:
        return len(self.factors)

    def of(self, stage: int, start: int, stop: int) -> int:
        variable = self._prefix_sums[stop] - self._prefix_sums[start]
        return int(self._fixed[start, stop] + self.factors[stage] * variable) if stop > start else 0

    def table(self, stage: int) -> np.ndarray:
        """[start, stop] -> cost; INFINITE for an empty stage."""
        factor = self.factors[stage]
        if factor not in self._tables:
            sums = self._prefix_sums
            costs = self._fixed + factor * (sums[None, :] - sums[:, None])
            at = np.arange(self.units + 1)
            self._tables[factor] = np.where(at[:, None] < at[None, :], costs, INFINITE)
        return self._tables[factor]

    @cached_property
    def lower_bounds(self) -> list[int]:
        """[units]; every stage costs at least the sum over its units."""
        fixed = np.diff(self._fixed[0])
        return [int(x) for x in fixed + min(self.factors) * np.diff(self._prefix_sums)]
