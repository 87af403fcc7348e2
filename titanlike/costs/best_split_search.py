"""Search for a split whose ranks and stages cost at most given limits; several stages per rank.

`VPlacementSearch` is exact, for stages s and S - 1 - s on one rank; `BranchAndBound` is for any
placement and has a limit. `load_lower_bound` is a bound without a search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import Any

import numpy as np

from titanlike.costs.stage_costs import INFINITE, StageCosts, Starts

_MAX_SUMS = 20_000  # of units, to which capacities are rounded down


class SearchLimit(Exception):
    """The search reached its limit of nodes."""


def load_lower_bound(weights: Sequence[int], bins: int) -> int:
    """A lower bound on the load of the fullest of `bins` bins that contain all weights."""
    low = max(max(weights), -(-sum(weights) // bins))
    high = sum(weights)
    while low < high:  # a load at which they cannot fit is a bound, whatever larger loads do
        middle = (low + high) // 2
        if cannot_fit(weights, bins, middle):
            low = middle + 1
        else:
            high = middle
    return low


def cannot_fit(weights: Sequence[int], bins: int, capacity: int) -> bool:
    """Whether the weights provably do not fit into the bins; False proves nothing.

    By dual feasible functions, which round weights such that what fits into a bin still does (at
    most k weights that are each more than 1 / (k + 1) of the capacity).
    """
    counts = Counter(weights)
    for k in range(1, 65):
        total = 0  # in units of 1 / (k * capacity)
        for weight, count in counts.items():
            whole, rest = divmod((k + 1) * weight, max(1, capacity))
            total += count * (whole * capacity if rest else k * weight)
        if total > bins * k * capacity:
            return True
    return False


class VPlacementSearch:
    """Stages s and S - 1 - s on one rank: dynamic programming from both ends inwards."""

    def __init__(self, costs: StageCosts) -> None:
        self._costs = costs

    def find(self, rank: int, stage: int) -> Starts | None:
        """A split whose ranks and stages cost at most these limits, or None. Exact.

        reached[i, j]: whether the pairs so far can hold the units before i and those from j on.
        Of all j reached with one i, the smallest makes a pair's later stage cheapest.
        """
        n, pairs = self._costs.units, self._costs.stages // 2
        reached = np.zeros((n + 1, n + 1), dtype=bool)
        reached[0, n] = True
        steps = []
        for pair in range(pairs - 1):
            early, late = self._tables(pair, stage)
            nearest = np.where(reached, np.arange(n + 1)[None, :], n + 1)
            nearest = np.minimum.accumulate(nearest[:, ::-1], axis=1)[:, ::-1]
            nearest = np.concatenate([nearest[:, 1:], np.full((n + 1, 1), n + 1)], axis=1)
            padded = np.concatenate([late, np.full((n + 1, 1), INFINITE)], axis=1)
            cost = padded[np.arange(n + 1)[None, :], nearest]  # [i, j'] of units j' ... j
            steps.append((early, cost, nearest))
            least = np.full((n + 1, n + 1), INFINITE)
            for i in np.flatnonzero(reached.any(axis=1)):
                ends = np.flatnonzero(early[i] <= rank)  # a range, as costs grow with the end
                if len(ends):
                    part = least[ends[0] : ends[-1] + 1]
                    sums = early[i, ends[0] : ends[-1] + 1, None] + cost[i][None, :]
                    np.minimum(part, sums, out=part)
            reached = least <= rank
            if not reached.any():
                return None
        early, late = self._tables(pairs - 1, stage)
        for middle in range(1, n):
            fits = reached & (early[:, middle, None] + late[None, middle, :] <= rank)
            if fits.any():
                i, j = (int(at) for at in np.argwhere(fits)[0])
                return self._trace(steps, rank, i, middle, j)
        return None

    def _tables(self, pair: int, stage: int) -> tuple[np.ndarray, np.ndarray]:
        tables = (self._costs.table(s) for s in (pair, self._costs.stages - 1 - pair))
        early, late = (np.where(table <= stage, table, INFINITE) for table in tables)
        return early, late

    @staticmethod
    def _trace(steps: list[Any], rank: int, i: int, middle: int, j: int) -> Starts:
        before, after = [i], [middle, j]
        for early, cost, nearest in reversed(steps):
            came = int(np.flatnonzero(early[:, i] + cost[:, j] <= rank)[0])
            i, j = came, int(nearest[came, j])
            before.insert(0, i)
            after.append(j)
        return [*before, *after[:-1]]


class BranchAndBound:
    """Any placement: depth-first over the stages, bounded by the capacity left on the ranks."""

    def __init__(self, costs: StageCosts, place: Sequence[int], max_nodes: int) -> None:
        self._costs, self._place, self._nodes_left = costs, list(place), max_nodes
        lists: dict[int, Any] = {factor: None for factor in costs.factors}
        for stage, factor in enumerate(costs.factors):
            lists[factor] = lists[factor] or costs.table(stage).tolist()
        self._tables = [lists[factor] for factor in costs.factors]
        rest = accumulate(reversed(costs.lower_bounds))
        self._rest = [*reversed([0, *rest])]  # lower bounds summed over units[i:]
        self._later = [0] * costs.stages  # how many later stages are on the same rank
        seen: dict[int, int] = {}
        for stage in reversed(range(costs.stages)):
            self._later[stage] = seen.get(place[stage], 0)
            seen[place[stage]] = self._later[stage] + 1
        self._sums = _sums(costs.lower_bounds) if len(set(costs.factors)) == 1 else None

    def find(self, rank: int, stage: int) -> Starts | None:
        """A split whose ranks and stages cost at most these limits, or None. Raises SearchLimit."""
        ranks = len(set(self._place))
        least = self._costs.lower_bounds
        if cannot_fit(least, ranks, rank) or cannot_fit(least, self._costs.stages, stage):
            return None
        loads = [0] * ranks
        capacity = [self._capacity(rank, stage, self._place.count(r)) for r in range(ranks)]
        failed: set[tuple[int, ...]] = set()
        starts: Starts = []

        def fill(s: int, start: int, total: int) -> bool:
            """Place the units from `start`; total: the capacity left on all ranks together."""
            n, stages = self._costs.units, self._costs.stages
            if s == stages:
                return start == n
            if self._rest[start] > min(total, (stages - s) * stage):
                return False
            state = (s, start, *loads)
            if state in failed:
                return False
            self._nodes_left -= 1
            if self._nodes_left < 0:
                raise SearchLimit
            where, row = self._place[s], self._tables[s][start]
            most = min(stage, rank - loads[where])
            stops = [n] if s == stages - 1 else range(start + 1, n - (stages - s - 1) + 1)
            fits = takewhile(lambda stop: row[stop] <= most, stops)
            ideal = self._rest[start] / (stages - s)
            before, starts_here = capacity[where], len(starts)
            starts.append(start)
            for stop in sorted(fits, key=lambda stop: abs(row[stop] - ideal)):
                loads[where] += row[stop]
                capacity[where] = self._capacity(rank - loads[where], stage, self._later[s])
                if fill(s + 1, stop, total - before + capacity[where]):
                    return True
                loads[where] -= row[stop]
            capacity[where] = before
            del starts[starts_here:]
            failed.add(state)
            return False

        return starts if fill(0, 0, sum(capacity)) else None

    def _capacity(self, limit: int, stage: int, stages: int) -> int:
        """The capacity of so many stages of one rank, rounded down to a sum of units."""
        limit = min(limit, stages * stage)
        if self._sums is None or stages == 0:
            return limit if stages else 0
        return int(self._sums[np.searchsorted(self._sums, limit, side="right") - 1])


def _sums(weights: Sequence[int]) -> np.ndarray | None:
    """All subset sums, ascending; None where they are too many."""
    sums = np.zeros(1, dtype=np.int64)
    for weight in weights:
        sums = np.union1d(sums, sums + weight)
        if len(sums) > _MAX_SUMS:
            return None
    return sums
