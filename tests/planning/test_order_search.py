"""Orders made for costs: never slower than a schedule that keeps within the same memory, near what
is possible, and fit to be run."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from support.cells import GRID, slow
from support.cost_sets import CostSet, compare, compare_all, known
from support.message_streams import a_pair, compute, makespan, one_stream
from titanlike.costs.simulate import Duration, StageTimes, equal_stages
from titanlike.pipeline.order import Action, Order
from titanlike.pipeline.order_check import check_order
from titanlike.pipeline.schedules import interleaved_1f1b, loop
from titanlike.planning.order_search import (
    OrderProblem,
    Rule,
    SearchResult,
    best_order,
    list_order,
    lower_bound,
    trials_for,
    wanted,
)
from titanlike.torch_private.pipeline_runtime import _lower


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
