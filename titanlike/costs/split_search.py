"""Where stages begin, which rank has them, and in which order they are computed, chosen together.

1. Orders are searched for every placement, with every split that is proposed for it.
2. The best few are changed: a unit goes from a stage to another, those between pass one on. The order
   is fitted to the new costs, and what is faster is kept.
3. For the fastest the order is searched again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from titanlike.costs.list_scheduling import Problem
from titanlike.costs.order_search import Found, Known, adapted, best_order, lower_bound

_CHANGED = 2  # layouts

Starts = tuple[int, ...]  # the first unit of each stage


@dataclass(frozen=True)
class Cut:
    """A placement, and where its stages begin."""

    place: tuple[int, ...]
    starts: Starts


@dataclass(frozen=True)
class FoundCut:
    cut: Cut
    found: Found


def best_cut(
    problem_of: Callable[[Cut], Problem],
    known_of: Callable[[Problem], Sequence[Known]],
    cuts: Sequence[Cut],
    units: int,
    trials: int,
    seed: int = 0,
) -> FoundCut | None:
    """The fastest, beginning with `cuts`; None where no order fits. units: of the model."""
    first = []
    for cut in cuts:
        problem = problem_of(cut)
        found = best_order(problem, known_of(problem), trials // len(cuts), seed)
        if found is not None:
            first.append(FoundCut(cut, found))
    if not first:
        return None
    first.sort(key=lambda one: one.found.seconds)
    changed = [
        _changed(one, problem_of, units, trials, random.Random(seed)) for one in first[:_CHANGED]
    ]
    best = min(changed, key=lambda one: one.found.seconds)
    known = [*known_of(best.found.problem), Known("", best.found.order)]
    found = best_order(best.found.problem, known, trials, seed)
    if found is not None and found.seconds < best.found.seconds:
        best = FoundCut(best.cut, found)
    return best


def _changed(
    best: FoundCut,
    problem_of: Callable[[Cut], Problem],
    units: int,
    trials: int,
    draw: random.Random,
) -> FoundCut:
    """With units moved between stages as long as steps get shorter."""
    left = trials
    while left > 0:
        moves = _moves(best.cut, units)
        draw.shuffle(moves)
        for cut in moves:
            problem = problem_of(cut)
            if lower_bound(problem) >= best.found.seconds:
                continue
            left -= 1
            found = adapted(problem, best.found.order)
            if found is not None and found.seconds < best.found.seconds * (1 - 1e-6):
                best = FoundCut(cut, found)
                break
            if left <= 0:
                return best
        else:
            return best
    return best


def _moves(cut: Cut, units: int) -> list[Cut]:
    """Every way to take a unit from a stage and give one to another."""
    found, stages = [], len(cut.starts)
    for first in range(1, stages):
        for last in range(first, stages):
            for by in (-1, 1):
                starts = [
                    at + by if first <= stage <= last else at for stage, at in enumerate(cut.starts)
                ]
                if all(a < b for a, b in pairwise([*starts, units])):
                    found.append(replace(cut, starts=tuple(starts)))
    return found
