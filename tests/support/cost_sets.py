"""Random costs of a model's units, and the orders that are made for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from support.message_streams import order_of
from titanlike.costs.auto_split import StageCosts, best_split
from titanlike.costs.simulate import Duration, StageTimes
from titanlike.pipeline.order import Order
from titanlike.pipeline.schedules import LOOPED, SCHEDULES, V_SCHEDULES, loop, one_f_one_b, vee
from titanlike.planning.auto_schedule import Placement, best_cut
from titanlike.planning.order_search import (
    OrderProblem,
    SearchResult,
    best_known,
    best_order,
    fastest,
    lower_bound,
)

Split = tuple[int, ...]  # the first unit of each stage


@dataclass(frozen=True)
class CostSet:
    """Units of unequal cost on pp ranks: blocks, some recomputed, an embedding, a heavy head."""

    pp: int
    microbatches: int
    forward: Sequence[float]
    inputs: Sequence[float]  # input gradients
    weights: Sequence[float]
    held: Sequence[float]
    message: float

    @classmethod
    def draw(cls, seed: int) -> CostSet:
        draw = random.Random(seed)
        pp = draw.choice((2, 4, 4, 8))
        blocks = pp * draw.choice((2, 3, 4, 6))
        forward = [draw.uniform(0.9, 1.1) for _ in range(blocks)]
        ratio = draw.uniform(0.9, 1.3), draw.uniform(0.7, 1.1)
        inputs = [ratio[0] * each for each in forward]
        held = [1.0] * blocks
        if draw.random() < 0.3:  # the first ranks recompute
            for at in range(blocks // 2):
                inputs[at] += forward[at]
                held[at] = 0.3
        weights = [ratio[1] * each for each in forward]
        head, embedding = draw.uniform(0.5, 4.0), draw.uniform(0.0, 0.5)
        forward = [embedding, *forward, head]
        inputs = [0.0, *inputs, ratio[0] * head]
        weights = [embedding, *weights, ratio[1] * head]
        message = draw.choice((0.0, 0.02, 0.1, 0.3)) * blocks / pp
        microbatches = pp * draw.choice((2, 3, 4))
        return cls(pp, microbatches, forward, inputs, weights, [0.1, *held, 0.5], message)

    @property
    def places(self) -> list[tuple[int, ...]]:
        """Placements that are searched."""
        return [vee(self.pp), loop(self.pp), loop(self.pp, 2)]

    def balanced(self, place: tuple[int, ...], by_memory: bool = False) -> Split:
        """As split=auto, by the time of each unit, or what it holds."""
        each = self.held
        if not by_memory:
            seconds = zip(self.forward, self.inputs, self.weights, strict=True)
            each = [sum(unit) for unit in seconds]
        costs = StageCosts(
            None,
            [round(1e6 * value) for value in each],
            [1] * len(place),
        )
        return tuple(best_split(costs, place).starts)

    def least_memory(self) -> float:
        """What the fullest rank holds at the least, of one microbatch, whatever the split."""
        return min(
            self.problem(place, self.balanced(place, True), 1.0).least_memory
            for place in self.places
        )

    def even(self, place: tuple[int, ...]) -> Split:
        """As split=even: as many blocks on each stage."""
        count = len(self.forward)
        return tuple(at * count // len(place) for at in range(len(place)))

    def limit(self, share: float) -> float:
        """A share of what 1f1b holds, at the most on a rank, with an even split."""
        place = loop(self.pp)
        problem = self.problem(place, self.even(place), 1.0)
        order = one_f_one_b(self.pp, self.microbatches)
        return share * max(problem.peak(order, rank) for rank in range(self.pp))

    def problem(self, place: tuple[int, ...], split: Split, limit: float) -> OrderProblem:
        def of(values: Sequence[float]) -> list[float]:
            sums = [0.0, *accumulate(values)]
            return [sums[b] - sums[a] for a, b in pairwise([*split, len(values)])]

        times = [
            StageTimes(
                Duration(f), Duration(i + w), Duration(i), Duration(w), self.message, self.message
            )
            for f, i, w in zip(of(self.forward), of(self.inputs), of(self.weights), strict=True)
        ]
        held = of(self.held)
        return OrderProblem(place, self.microbatches, times, held, held, limit, starts=tuple(split))


@cache
def known(place: tuple[int, ...], pp: int, microbatches: int) -> dict[str, Order]:
    """Schedules of a placement."""
    found = {}
    for name in SCHEDULES:
        of = vee(pp) if name in V_SCHEDULES else loop(pp, 2 if name in LOOPED else 1)
        if of == place and (order := order_of(name, pp, microbatches)) is not None:
            found[name] = order
    return found


@dataclass(frozen=True)
class Compared:
    """One set of costs under one limit of memory."""

    built_in: SearchResult | None  # the fastest of all schedules
    found: SearchResult | None
    bound: float  # below which no order of any of the placements can be


def compare(costs: CostSet, limit: float, trials: int) -> Compared:
    """The best order and placement with split=even."""
    built_in, found, bounds = None, None, []
    for place in costs.places:
        problem = costs.problem(place, costs.even(place), limit)
        own = known(place, costs.pp, costs.microbatches)
        bounds.append(lower_bound(problem))
        built_in = fastest((built_in, best_known(problem, own)))
        found = fastest((found, best_order(problem, own, trials)))
    return Compared(built_in, found, min(bounds))


def compare_all(costs: CostSet, limit: float, trials: int) -> Compared:
    """The best split, placement and order together, against schedules with split=auto."""

    def problem_of(cut: Placement) -> OrderProblem:
        return costs.problem(cut.place, cut.starts, limit)

    def known_of(problem: OrderProblem) -> dict[str, Order]:
        return known(problem.place, costs.pp, costs.microbatches)

    built_in, cuts = None, []
    for place in costs.places:
        balanced = Placement(place, costs.balanced(place))
        problem = problem_of(balanced)
        built_in = fastest((built_in, best_known(problem, known_of(problem))))
        cuts += [
            balanced,
            Placement(place, costs.even(place)),
            Placement(place, costs.balanced(place, True)),
        ]
    problems = [problem_of(cut) for cut in cuts]
    best = best_cut(problem_of, known_of, problems, len(costs.forward), trials)
    work = sum(costs.forward) + sum(costs.inputs) + sum(costs.weights)
    return Compared(built_in, best, costs.microbatches * work / costs.pp)
