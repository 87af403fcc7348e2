"""What any stage of consecutive units would cost, in whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np

NEVER = 2**61  # more than any cost; two of them are no overflow

Starts = list[int]  # of each stage, the position of its first unit


class StageCosts:
    """What any stage would cost: of the units start ... stop - 1,

    held[start, stop] + times[stage] * (run[start] + ... + run[stop - 1])
    """

    def __init__(self, held: np.ndarray, run: Sequence[int], times: Sequence[int]) -> None:
        """held: [units + 1, units + 1] whole numbers that grow with the range, no faster than the
        sum of its units (what units share is held once); run: [units]; times: [stages]."""
        most = int(held.max(initial=0)) + sum(map(int, run)) * max(times)
        shift = max(0, most.bit_length() - 59)
        self.scale = 1 << shift  # sums of costs stay within 64 bits
        self._held = np.asarray(held, dtype=np.int64) >> shift
        run = [int(cost) >> shift for cost in run]
        self._ends = np.array([0, *accumulate(run)], dtype=np.int64)
        self.times = list(times)
        self._tables: dict[int, np.ndarray] = {}

    @property
    def units(self) -> int:
        return len(self._ends) - 1

    @property
    def stages(self) -> int:
        return len(self.times)

    def of(self, stage: int, start: int, stop: int) -> int:
        run = self._ends[stop] - self._ends[start]
        return int(self._held[start, stop] + self.times[stage] * run) if stop > start else 0

    def table(self, stage: int) -> np.ndarray:
        """[start, stop] -> cost; `NEVER` where the stage would be empty."""
        times = self.times[stage]
        if times not in self._tables:
            costs = self._held + times * (self._ends[None, :] - self._ends[:, None])
            at = np.arange(self.units + 1)
            self._tables[times] = np.where(at[:, None] < at[None, :], costs, NEVER)
        return self._tables[times]

    @cached_property
    def least(self) -> list[int]:
        """Of each unit: no stage with it is lighter than the sum of these over its units."""
        held = np.diff(self._held[0])
        return [int(x) for x in held + min(self.times) * np.diff(self._ends)]
