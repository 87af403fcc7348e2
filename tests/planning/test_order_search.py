"""Orders made for costs: never slower than a schedule that keeps within the same memory, near what
is possible, and fit to be run."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise, product

import pytest

from support.cells import GRID, slow
from support.message_streams import a_pair, compute, makespan, one_stream, order_of
from titanlike.core.pipeline.order import Action, Order
from titanlike.core.pipeline.order_check import check_order
from titanlike.core.pipeline.schedules import (
    LOOPED,
    SCHEDULES,
    V_SCHEDULES,
    interleaved_1f1b,
    loop,
    one_f_one_b,
    vee,
)
from titanlike.core.torch_private.pipeline_runtime import _lower
from titanlike.planning.auto_schedule import Placement, best_cut
from titanlike.planning.costs.auto_split import StageCosts, best_split
from titanlike.planning.costs.simulate import Duration, StageTimes, equal_stages
from titanlike.planning.order_search import (
    OrderProblem,
    Rule,
    SearchResult,
    best_known,
    best_order,
    fastest,
    list_order,
    lower_bound,
    trials_for,
    wanted,
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
        costs = StageCosts(None, [round(1e6 * value) for value in each], [1] * len(place))
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


def checked(found: SearchResult) -> None:
    """It runs to its end, under NCCL's streams too, and keeps within its memory."""
    order = check_order(found.order)
    assert found.problem.fits(order)
    assert found.seconds >= lower_bound(found.problem) * (1 - 1e-9)
    for evaluated in (order, order.forward_only()):
        ranks = _lower(evaluated, evaluated.stages)
        for stream in (compute, one_stream, a_pair):
            makespan(ranks, evaluated.stage_to_rank, stream, 0.1)


@pytest.mark.parametrize(
    "sets, shares, trials",
    [([2], [math.inf, 0.5], 20), *slow((range(12), [math.inf, 1.0, 0.5, 0.35], 40), marks=GRID)],
)
def test_an_order_made_for_costs_is_never_slower_than_a_schedule(sets, shares, trials) -> None:
    """Random costs, split=even and what a search cuts; and there is an order wherever there can be
    one. On the median of many it halves what the best schedule is above the lower bound, and gains
    5% where the split is open, too."""
    left, gains = [], []
    for seed, share in product(sets, shares):
        costs = CostSet.draw(seed)
        limit = costs.limit(share)
        both = [compare(costs, limit, trials), compare_all(costs, limit, trials)]
        for each in both:
            if each.built_in is not None:
                assert each.found and each.found.seconds <= each.built_in.seconds
            if each.found is not None:
                checked(each.found)
        given, free = both
        if free.found is None:  # no split leaves every rank room for one microbatch
            assert costs.least_memory() > limit
        if share == 1.0 and given.built_in and free.built_in:
            theirs, ours = (
                each.seconds / given.bound - 1 for each in (given.built_in, given.found)
            )
            left.append(ours / theirs if theirs > 0 else 1.0)
            gains.append(free.built_in.seconds / free.found.seconds)
    if len(left) > 10:
        assert statistics.median(left) < 0.6 and statistics.median(gains) > 1.05


def test_an_order_follows_its_keys_and_keeps_within_its_memory() -> None:
    """Keys of 1F1B's own times give 1F1B with its weight gradients later."""
    order = interleaved_1f1b(2, 4, 1)
    problem = OrderProblem(loop(2), 4, equal_stages(order), [1.0, 1.0], [0.0, 0.0], 2.0)
    found = list_order(problem, *wanted(problem, order), Rule())
    assert found is not None and problem.fits(check_order(found))
    assert str(found.ranks[1][0]) == "1F0" and str(found.ranks[1][1]) == "1I0"
    queues = replace(problem, queued=[0.5, 0.5])
    found = list_order(queues, *wanted(queues, order), Rule())
    assert found is not None and queues.fits(check_order(found))
    less = replace(problem, limit=0.5)
    assert list_order(less, *wanted(problem, order), Rule()) is None
    assert best_order(less, {}, 10) is None
    # a search takes seconds, whatever the sizes: so many actions are scheduled
    for microbatches in (4, 64, 1024):
        many = replace(problem, microbatches=microbatches)
        assert trials_for([many] * 3) * 3 * 3 * 2 * microbatches <= 500_000


def rows(stage: int, microbatches: int) -> Iterator[tuple[Action, ...]]:
    """All orders of a stage's F, I and W: microbatches of each in turn, F before I before W."""

    def go_on(done: tuple[Action, ...], counts: dict[str, int]) -> Iterator[tuple[Action, ...]]:
        if len(done) == 3 * microbatches:
            yield done
        for kind, most in zip("FIW", (microbatches, counts["F"], counts["I"]), strict=True):
            if counts[kind] < most:
                act = Action(kind, stage, counts[kind])
                yield from go_on((*done, act), {**counts, kind: counts[kind] + 1})

    return go_on((), dict.fromkeys("FIW", 0))


def test_small_orders_are_within_two_percent_of_the_optimum() -> None:
    """By trying all 1764 orders of 3 microbatches on 2 ranks."""
    every = [Order(ranks, loop(2), 3) for ranks in product(*(rows(s, 3) for s in (0, 1)))]
    assert len(every) == 42**2
    for seed in range(3):
        draw = random.Random(seed)
        times = [
            StageTimes(*(Duration(part * each) for part in (1, 2, 1.1, 0.9)), 0.02, 0.02)
            for each in (draw.uniform(0.8, 1.2), draw.uniform(0.8, 2))
        ]
        limit = 2 * draw.choice((1.5, 1.0, 0.5))
        problem = OrderProblem(loop(2), 3, times, [1.0, 1.0], [1.0, 1.0], limit)
        seconds = []
        for order in filter(problem.fits, every):
            try:
                seconds.append(problem.step(order))
            except ValueError:  # it would wait forever
                continue
        found = best_order(problem, known(loop(2), 2, 3), 100)
        assert problem.fits(found.order)
        assert min(seconds) * (1 - 1e-9) <= found.seconds <= 1.02 * min(seconds)
