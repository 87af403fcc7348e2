"""Find the split into consecutive units whose most expensive rank is cheapest.

Minimized are, in this order: the cost of the most expensive rank (the sum over its stages), of the
most expensive stage, and the sum of squares over ranks. The first two minima are exact:

- one stage per rank: dynamic programming over the stages;
- two stages per rank in a V: dynamic programming from both ends inwards;
- any other placement (loops, an order from a file): branch and bound, starting at a good split. At
  the search limit the best split so far is returned, with `CostedSplit.proven` false.

Costs are whole numbers, so that every rank of a run finds the same split. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from titanlike.costs import best_split_search as searches
from titanlike.costs.stage_costs import INFINITE, StageCosts, Starts

_MAX_NODES = 200_000  # of branch and bound: some seconds
_MAX_MOVES = 200  # of local search


@dataclass(frozen=True)
class CostedSplit:
    """A split and its costs."""

    starts: Starts
    stages: list[int]  # cost of each
    ranks: list[int]  # cost of each
    proven: bool = True

    @property
    def imbalance(self) -> float:
        """Cost of the most expensive rank / mean over ranks."""
        return max(self.ranks) * len(self.ranks) / max(1, sum(self.ranks))

    @property
    def key(self) -> tuple[int, int, int]:
        """The objective: smaller is better."""
        return max(self.ranks), max(self.stages), sum(cost * cost for cost in self.ranks)


def cost_of_split(costs: StageCosts, place: Sequence[int], starts: Starts) -> CostedSplit:
    """The costs of a split; place: the rank of each stage."""
    edges = [*starts, costs.units]
    stages = [costs.of(stage, *span) for stage, span in enumerate(pairwise(edges))]
    ranks = [0] * (max(place) + 1)
    for rank, cost in zip(place, stages, strict=True):
        ranks[rank] += cost
    return CostedSplit(list(starts), stages, ranks)


def best_split(costs: StageCosts, place: Sequence[int], max_nodes: int = _MAX_NODES) -> CostedSplit:
    """The best split of the units into stages, none empty unless there are fewer units than stages.

    max_nodes: the limit of branch and bound.
    """
    n, stages = costs.units, costs.stages
    if n <= stages:
        own = list(range(max(1, n - 1)))
        last = n - 1 if n > 1 else n  # empty stages come before the last stage
        return cost_of_split(costs, place, [*own, *[last] * (stages - len(own))])
    bottleneck, starts = _one_stage_per_rank(costs)
    if len(set(place)) == stages:
        return cost_of_split(costs, place, starts)
    best = _improve(costs, place, cost_of_split(costs, place, starts))
    if v := len(set(place)) * 2 == stages and list(place) == list(place)[::-1]:
        search = searches.VPlacementSearch(costs)
    else:
        search = searches.BranchAndBound(costs, place, max_nodes)
    low = searches.load_lower_bound(costs.lower_bounds, len(set(place)))
    best = _minimize(costs, place, best, 0, low, lambda limit: search.find(limit, limit), v)
    if not best.proven:
        return best
    rank = max(best.ranks)
    return _minimize(costs, place, best, 1, bottleneck, lambda limit: search.find(rank, limit), v)


# --- one stage per rank --------------------------------------------------------------------------


def _one_stage_per_rank(costs: StageCosts) -> tuple[int, Starts]:
    """The smallest cost of the most expensive stage, and of the splits with it the one with the
    smallest sum of squares."""
    n = costs.units
    costliest = np.full(n + 1, INFINITE)
    costliest[0] = 0
    for stage in range(costs.stages):
        costliest = np.maximum(costliest[:, None], costs.table(stage)).min(axis=0)
    limit = int(costliest[n])
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


# --- several stages per rank ---------------------------------------------------------------------


def _minimize(
    costs: StageCosts,
    place: Sequence[int],
    best: CostedSplit,
    which: int,
    low: int,
    find: Callable[[int], Starts | None],
    bisect: bool,
) -> CostedSplit:
    """Minimize `best.key[which]`, which is at least `low`.

    find: a split within a limit, or None; bisect: halve the interval, as `find` takes equally long for any limit.
    """
    halve = False
    while low < best.key[which]:
        limit = (low + best.key[which]) // 2 if halve else best.key[which] - 1
        try:
            starts = find(limit)
        except searches.SearchLimit:
            return replace(best, proven=False)
        if starts is None:
            low = limit + 1
        else:
            best = _improve(costs, place, cost_of_split(costs, place, starts))
        halve = bisect and not halve
    return best


def _improve(costs: StageCosts, place: Sequence[int], best: CostedSplit) -> CostedSplit:
    """Local search: move one unit from a stage to another, shifting all cuts between them."""
    stages = costs.stages
    for _ in range(_MAX_MOVES):
        edges, key = [*best.starts, costs.units], best.key
        heavy = {s for s in range(stages) if best.ranks[place[s]] == key[0]}
        heavy |= {s for s in range(stages) if best.stages[s] == key[1]}
        sources = sorted(range(stages), key=lambda stage: stage not in heavy)  # heavy ones first
        sources = [s for s in sources if edges[s + 1] - edges[s] >= 2]
        moves = (_best_move(costs, place, best, edges, source) for source in sources)
        found = next((move for move in moves if move is not None), None)
        if found is None:
            return best
        best = found
    return best


def _best_move(
    costs: StageCosts, place: Sequence[int], best: CostedSplit, edges: list[int], source: int
) -> CostedSplit | None:
    """The best split that moves a unit out of stage `source`, or None if none beats `best`."""
    key, starts = best.key, None
    for step in (1, -1):  # to later stages, to earlier ones
        changed = {}
        target = source + step
        while 0 <= target < costs.stages:
            between = target - step
            for stage in (between, target):
                begin, end = edges[stage], edges[stage + 1]
                if step == 1:  # every cut between them moves down by one
                    begin -= stage != source
                    end -= stage != target
                else:
                    end += stage != source
                    begin += stage != target
                changed[stage] = costs.of(stage, begin, end)
            stages = [changed.get(s, cost) for s, cost in enumerate(best.stages)]
            ranks = [0] * len(best.ranks)
            for rank, cost in zip(place, stages, strict=True):
                ranks[rank] += cost
            candidate = CostedSplit([], stages, ranks).key
            if candidate < key:
                low, high = sorted((source, target))
                moved = range(low + 1, high + 1)
                key = candidate
                starts = [cut - step * (s in moved) for s, cut in enumerate(best.starts)]
            target += step
    return None if starts is None else cost_of_split(costs, place, starts)
