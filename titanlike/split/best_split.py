"""The stages whose heaviest rank is as light as can be: which consecutive units go to which.

What counts is, in this order: the heaviest rank (the sum over its stages), the heaviest stage, and
how even the ranks are otherwise. The first two are exact:

- one stage a rank: dynamic programming over the stages;
- two stages a rank in a V: from outside in, over what is taken at both ends;
- anything else (loops, an order from a file): branch and bound from a good split on. Where the
  search is given up the best split found is returned, and `CostedSplit.proven` is false.

Costs are whole numbers, so that every rank of a run finds the same split. No torch in here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from titanlike.split.best_split_search import (
    BranchAndBound,
    SearchLimit,
    VPlacementSearch,
    load_lower_bound,
)
from titanlike.split.stage_costs import NEVER, StageCosts, Starts

_MOST_NODES = 200_000  # of the search over a loop's stages: some seconds
_MOST_ROUNDS = 200  # of improving a split step by step


@dataclass(frozen=True)
class CostedSplit:
    """A split and what it costs."""

    starts: Starts
    stages: list[int]  # cost of each
    ranks: list[int]  # cost of each
    proven: bool = True

    @property
    def imbalance(self) -> float:
        """The heaviest rank over the mean of all."""
        return max(self.ranks) * len(self.ranks) / max(1, sum(self.ranks))

    @property
    def key(self) -> tuple[int, int, int]:
        """What is to be small."""
        return max(self.ranks), max(self.stages), sum(cost * cost for cost in self.ranks)


def cost_of_split(costs: StageCosts, place: Sequence[int], starts: Starts) -> CostedSplit:
    """What a split costs; place: the rank of each stage."""
    edges = [*starts, costs.units]
    stages = [costs.of(stage, *span) for stage, span in enumerate(pairwise(edges))]
    ranks = [0] * (max(place) + 1)
    for rank, cost in zip(place, stages, strict=True):
        ranks[rank] += cost
    return CostedSplit(list(starts), stages, ranks)


def best_split(
    costs: StageCosts, place: Sequence[int], most_nodes: int = _MOST_NODES
) -> CostedSplit:
    """The best split of the units into stages, none empty unless there are fewer units than stages.

    most_nodes: after so many steps of the search over loops it is given up.
    """
    n, stages = costs.units, costs.stages
    if n <= stages:
        own = list(range(n))
        last = own[-1] if n > 1 else n  # the empty ones come before the last, after the first
        return cost_of_split(
            costs, place, [*own[: max(1, n - 1)], *[last] * (stages - max(1, n - 1))]
        )
    lightest, starts = _chain(costs)
    if len(set(place)) == stages:
        return cost_of_split(costs, place, starts)
    best = _improve(costs, place, cost_of_split(costs, place, starts))
    if len(set(place)) * 2 == stages and list(place) == list(place)[::-1]:
        search = VPlacementSearch(costs)
        best = _least_rank(costs, place, best, search.decide, bisect=True)
        best = _least_stage(costs, place, best, search.decide, lightest, bisect=True)
        return best
    search = BranchAndBound(costs, place, most_nodes)
    best = _least_rank(costs, place, best, search.decide, bisect=False)
    if best.proven:
        best = _least_stage(costs, place, best, search.decide, lightest, bisect=False)
    return best


# --- one stage a rank --------------------------------------------------------------------------


def _chain(costs: StageCosts) -> tuple[int, Starts]:
    """The least that the heaviest stage can cost; of such splits the one whose sum of squares is
    the smallest."""
    n = costs.units
    heaviest = np.full(n + 1, NEVER)
    heaviest[0] = 0
    for stage in range(costs.stages):
        heaviest = np.maximum(heaviest[:, None], costs.table(stage)).min(axis=0)
    limit = int(heaviest[n])
    squares = np.full(n + 1, np.inf)
    squares[0] = 0.0
    chosen = []
    for stage in range(costs.stages):
        table = costs.table(stage)
        own = np.where(table <= limit, table.astype(np.float64) ** 2, np.inf)
        sums = squares[:, None] + own
        chosen.append(sums.argmin(axis=0))
        squares = sums.min(axis=0)
    starts, stop = [], n
    for choice in reversed(chosen):
        stop = int(choice[stop])
        starts.append(stop)
    return limit, starts[::-1]


# --- several stages a rank ---------------------------------------------------------------------

Decide = Callable[[int, int], Starts | None]  # (most a rank, most a stage) -> a split within both


def _least_rank(
    costs: StageCosts, place: Sequence[int], best: CostedSplit, decide: Decide, bisect: bool
) -> CostedSplit:
    low = load_lower_bound(costs.least, len(set(place)))
    return _minimize(costs, place, best, 0, low, lambda most: decide(most, most), bisect)


def _least_stage(
    costs: StageCosts,
    place: Sequence[int],
    best: CostedSplit,
    decide: Decide,
    low: int,
    bisect: bool,
) -> CostedSplit:
    rank = max(best.ranks)
    return _minimize(costs, place, best, 1, low, lambda most: decide(rank, most), bisect)


def _minimize(
    costs: StageCosts,
    place: Sequence[int],
    best: CostedSplit,
    which: int,
    low: int,
    decide: Callable[[int], Starts | None],
    bisect: bool,
) -> CostedSplit:
    """Make `best.key[which]` as small as can be; low: it cannot be less.

    bisect: whether a question far below the answer is as quick as one beside it.
    """
    halve = False
    while low < best.key[which]:
        most = (low + best.key[which]) // 2 if halve else best.key[which] - 1
        try:
            starts = decide(most)
        except SearchLimit:
            return replace(best, proven=False)
        if starts is None:
            low = most + 1
        else:
            best = _improve(costs, place, cost_of_split(costs, place, starts))
        halve = bisect and not halve
    return best


def _improve(costs: StageCosts, place: Sequence[int], best: CostedSplit) -> CostedSplit:
    """Better by moving one unit from a stage to another, all cuts between them shifted."""
    stages = costs.stages
    for _ in range(_MOST_ROUNDS):
        edges = [*best.starts, costs.units]
        key, found = best.key, None
        heavy = {s for s in range(stages) if best.ranks[place[s]] == key[0]}
        heavy |= {s for s in range(stages) if best.stages[s] == key[1]}
        for only_heavy in (True, False):
            for giver in range(stages):
                if only_heavy and giver not in heavy or edges[giver + 1] - edges[giver] < 2:
                    continue
                found = _give(costs, place, best, edges, giver) or found
                if found:
                    break
            if found:
                break
        if found is None:
            return best
        best = found
    return best


def _give(
    costs: StageCosts, place: Sequence[int], best: CostedSplit, edges: list[int], giver: int
) -> CostedSplit | None:
    """The best of the splits in which a stage gives one unit away, if it is better than `best`."""
    key, starts = best.key, None
    for step in (1, -1):  # to later stages, to earlier ones
        changed = {}
        receiver = giver + step
        while 0 <= receiver < costs.stages:
            between = receiver - step
            for stage in (between, receiver):
                begin, end = edges[stage], edges[stage + 1]
                if step == 1:  # every cut in between moves down by one
                    begin -= stage != giver
                    end -= stage != receiver
                else:
                    end += stage != giver
                    begin += stage != receiver
                changed[stage] = costs.of(stage, begin, end)
            stages = [changed.get(s, cost) for s, cost in enumerate(best.stages)]
            ranks = [0] * len(best.ranks)
            for rank, cost in zip(place, stages, strict=True):
                ranks[rank] += cost
            candidate = CostedSplit([], stages, ranks).key
            if candidate < key:
                low, high = sorted((giver, receiver))
                moved = range(low + 1, high + 1)
                key = candidate
                starts = [cut - step * (s in moved) for s, cut in enumerate(best.starts)]
            receiver += step
    return None if starts is None else cost_of_split(costs, place, starts)
