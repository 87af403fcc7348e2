"""Is there a split whose ranks and stages cost at most so much? For several stages on a rank.

`VPlacementSearch` answers for stages s and S - 1 - s on one rank, always; `BranchAndBound` for any placement, or it gives
up. `load_lower_bound` is a bound that needs no search.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from titanlike.split.stage_costs import NEVER, StageCosts, Starts

_MOST_SUMS = 20_000  # of units, that capacities are rounded down to


class SearchLimit(Exception):
    """The search took too long."""


def load_lower_bound(weights: Sequence[int], bins: int) -> int:
    """A bound from below on the heaviest of so many bins that hold all weights."""
    low = max(max(weights), -(-sum(weights) // bins))
    high = sum(weights)
    while (
        low < high
    ):  # what is shown impossible is a bound, whether or not all above it is possible
        middle = (low + high) // 2
        if cannot_fit(weights, bins, middle):
            low = middle + 1
        else:
            high = middle
    return low


def cannot_fit(weights: Sequence[int], bins: int, most: int) -> bool:
    """Whether it can be seen that bins of size `most` do not hold all weights: by dual feasible
    functions, which round weights so that what fits into a bin still does (k large pieces at most
    where each is more than 1 / (k + 1) of it)."""
    counts: dict[int, int] = {}
    for weight in weights:
        counts[weight] = counts.get(weight, 0) + 1
    for k in range(1, 65):
        total = 0  # in units of 1 / (k * most)
        for weight, count in counts.items():
            whole, rest = divmod((k + 1) * weight, max(1, most))
            total += count * (whole * most if rest else k * weight)
        if total > bins * k * most:
            return True
    return False


class VPlacementSearch:
    """Stages s and S - 1 - s on one rank: decided from outside in."""

    def __init__(self, costs: StageCosts) -> None:
        self._costs = costs

    def decide(self, rank: int, stage: int) -> Starts | None:
        """A split whose ranks and stages cost at most so much. Exact.

        reached[i, j]: whether the pairs so far can take the units before i and those from j on.
        Of all j that are reached with one i, a pair's later stage is lightest with the smallest.
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
            padded = np.concatenate([late, np.full((n + 1, 1), NEVER)], axis=1)
            cost = padded[np.arange(n + 1)[None, :], nearest]  # [i, j'] of taking j' ... j
            steps.append((early, cost, nearest))
            least = np.full((n + 1, n + 1), NEVER)
            for i in np.flatnonzero(reached.any(axis=1)):
                ends = np.flatnonzero(early[i] <= rank)  # the costs grow: a range
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
        early, late = (np.where(table <= stage, table, NEVER) for table in tables)
        return early, late

    @staticmethod
    def _trace(steps: list, rank: int, i: int, middle: int, j: int) -> Starts:
        before, after = [i], [middle, j]
        for early, cost, nearest in reversed(steps):
            came = int(np.flatnonzero(early[:, i] + cost[:, j] <= rank)[0])
            i, j = came, int(nearest[came, j])
            before.insert(0, i)
            after.append(j)
        return [*before, *after[:-1]]


class BranchAndBound:
    """Any placement: depth first over the stages, with bounds on what the ranks can still take."""

    def __init__(self, costs: StageCosts, place: Sequence[int], most_nodes: int) -> None:
        self._costs, self._place, self._left = costs, list(place), most_nodes
        lists = {times: None for times in costs.times}
        for stage, times in enumerate(costs.times):
            lists[times] = lists[times] or costs.table(stage).tolist()
        self._tables = [lists[times] for times in costs.times]
        rest = accumulate(reversed(costs.least))
        self._rest = [*reversed([0, *rest])]  # of the units from here on
        self._later = [0] * costs.stages  # stages of the same rank that come after
        seen: dict[int, int] = {}
        for stage in reversed(range(costs.stages)):
            self._later[stage] = seen.get(place[stage], 0)
            seen[place[stage]] = self._later[stage] + 1
        self._sums = _sums(costs.least) if len(set(costs.times)) == 1 else None

    def decide(self, rank: int, stage: int) -> Starts | None:
        """A split whose ranks and stages cost at most so much. Raises SearchLimit."""
        ranks = len(set(self._place))
        least = self._costs.least
        if cannot_fit(least, ranks, rank) or cannot_fit(least, self._costs.stages, stage):
            return None
        loads = [0] * ranks
        room = [self._room(rank, stage, self._place.count(r)) for r in range(ranks)]
        failed: set[tuple[int, ...]] = set()
        starts: Starts = []

        def fill(s: int, start: int, total: int) -> bool:
            """Place the units from `start` on; total: what all ranks together can take."""
            n, stages = self._costs.units, self._costs.stages
            if s == stages:
                return start == n
            if self._rest[start] > min(total, (stages - s) * stage):
                return False
            state = (s, start, *loads)
            if state in failed:
                return False
            self._left -= 1
            if self._left < 0:
                raise SearchLimit
            where, row = self._place[s], self._tables[s][start]
            most = min(stage, rank - loads[where])
            last = n - (stages - s - 1)
            stops = [n] if s == stages - 1 else range(start + 1, last + 1)
            fits = []
            for stop in stops:
                if row[stop] > most:
                    break
                fits.append(stop)
            ideal = self._rest[start] / (stages - s)
            before, starts_here = room[where], len(starts)
            starts.append(start)
            for stop in sorted(fits, key=lambda stop: abs(row[stop] - ideal)):
                loads[where] += row[stop]
                room[where] = self._room(rank - loads[where], stage, self._later[s])
                if fill(s + 1, stop, total - before + room[where]):
                    return True
                loads[where] -= row[stop]
            room[where] = before
            del starts[starts_here:]
            failed.add(state)
            return False

        return starts if fill(0, 0, sum(room)) else None

    def _room(self, most: int, stage: int, stages: int) -> int:
        """What so many stages of one rank can take: a sum of units."""
        most = min(most, stages * stage)
        if self._sums is None or stages == 0:
            return most if stages else 0
        return int(self._sums[np.searchsorted(self._sums, most, side="right") - 1])


def _sums(weights: Sequence[int]) -> np.ndarray | None:
    """All sums of some of the weights, ascending; None where they are too many."""
    sums = np.zeros(1, dtype=np.int64)
    for weight in weights:
        sums = np.union1d(sums, sums + weight)
        if len(sums) > _MOST_SUMS:
            return None
    return sums
