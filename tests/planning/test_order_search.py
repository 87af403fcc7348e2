"""Orders made for costs: never slower than a schedule that keeps within the same memory, near what is
possible, and fit to be run."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable

import pytest

from support.cells import slow
from support.cost_sets import Compared, CostSet, compare, compare_all, known
from support.exact_order import exact_seconds
from support.message_streams import a_pair, compute, makespan, one_stream
from titanlike.pipeline.schedules import interleaved_1f1b, loop, vee
from titanlike.planning.list_scheduling import Problem, Rule, list_order, wanted
from titanlike.planning.order_search import Found, best_order, lower_bound, trials_for
from titanlike.planning.simulate import Duration, StageTimes, equal_stages
from titanlike.torch_private.pipeline_runtime import _lower

# all of 200 random sets of costs
REST = slow(range(1, 13), range(200), marks=[pytest.mark.slow, pytest.mark.grid])
SHARES = (math.inf, 1.0, 0.75, 0.5, 0.35)
TRIALS = 40


def checked(found: Found) -> None:
    """It runs to its end, under NCCL's streams too, and keeps within its memory."""
    order = found.order.check()
    assert found.problem.fits(order)
    assert found.seconds >= lower_bound(found.problem) * (1 - 1e-9)
    for evaluated in (order, order.forward_only()):
        ranks = _lower(evaluated, evaluated.stages)
        for stream in (compute, one_stream, a_pair):
            makespan(ranks, evaluated.place, stream, 0.1)


def table(each: dict[float, list[Compared]]) -> str:
    """Medians (and the worst) of each limit of memory."""
    lines = ["memory  fits  found  built-in/bound  found/bound     faster by"]
    for share, rows in each.items():
        both = [row for row in rows if row.built_in and row.found]
        cells = []
        for of in (
            lambda r: r.built_in.seconds / r.bound,
            lambda r: r.found.seconds / r.bound,
            lambda r: r.built_in.seconds / r.found.seconds,
        ):
            values = [of(row) for row in both]
            shown = f"{statistics.median(values):.3f} ({max(values):.3f})" if values else "-"
            cells.append(f"{shown:14}")
        found = sum(row.found is not None for row in rows)
        lines.append(f"{share:6}  {len(both):4}  {found:5}  {'  '.join(cells)}")
    return "\n".join(lines)


def compared(sets: range, of: Callable[[CostSet, float], Compared]) -> dict[float, list[Compared]]:
    return {share: [of(CostSet.draw(seed), share) for seed in sets] for share in SHARES}


def gain(rows: list[Compared]) -> float:
    return statistics.median(
        row.built_in.seconds / row.found.seconds for row in rows if row.built_in and row.found
    )


@pytest.mark.parametrize("sets", [range(1), *slow(range(1, 4)), *REST])
def test_an_order_made_for_a_split_is_never_slower_and_halves_what_is_left(sets: range) -> None:
    """Of the time by which the best schedule is above the lower bound, on the median."""
    each = compared(sets, lambda costs, share: compare(costs, share, False, TRIALS))
    print("\nsplit=even, order and placement searched\n" + table(each))
    for rows in each.values():
        for row in rows:
            if row.built_in is not None:
                assert row.found and row.found.seconds <= row.built_in.seconds
            if row.found is not None:
                checked(row.found)
    both = [row for row in each[1.0] if row.built_in]
    left = [
        (row.built_in.seconds / row.bound - 1, row.found.seconds / row.bound - 1) for row in both
    ]
    if len(both) > 10:
        halves = [ours / theirs for theirs, ours in left if theirs > 0]
        assert statistics.median(halves) < 0.6


@pytest.mark.parametrize("sets", [range(1), *slow(range(1, 4)), *REST])
def test_split_placement_and_order_together_gain_five_percent(sets: range) -> None:
    """Over the best schedule with split=auto; and there is an order wherever there can be one."""
    each = compared(sets, lambda costs, share: compare_all(costs, share, TRIALS))
    print("\nsplit, placement and order searched\n" + table(each))
    for share, rows in each.items():
        for seed, row in zip(sets, rows, strict=True):
            costs = CostSet.draw(seed)
            if row.found is None:
                # no split leaves every rank room for one microbatch
                assert costs.least_memory() > costs.limit(share)
                continue
            checked(row.found)
            if row.built_in is not None:
                assert row.found.seconds <= row.built_in.seconds
    if len(sets) > 10:
        assert gain(each[1.0]) > 1.05


@pytest.mark.slow
def test_a_large_pipeline_is_searched_in_ten_seconds_of_one_core() -> None:
    pp, microbatches = 16, 64
    problems = []
    for place in (vee(pp), loop(pp), loop(pp, 2)):
        own = known(place, pp, microbatches)
        times = equal_stages(next(own).order)
        held = [1.0] * len(place)
        problems.append(Problem(place, microbatches, times, held, held, len(place)))
    begin = time.process_time()
    for problem in problems:
        own = [*known(problem.place, pp, microbatches)]
        assert best_order(problem, own, trials_for(problems)) is not None
    assert time.process_time() - begin < 10


def test_an_order_follows_its_keys_and_keeps_within_its_memory() -> None:
    """Keys of 1F1B's own times give 1F1B with its weight gradients later."""
    order = interleaved_1f1b(2, 4, 1)
    problem = Problem(loop(2), 4, equal_stages(order), [1.0, 1.0], [0.0, 0.0], 2.0)
    found = list_order(problem, *wanted(problem, order), Rule())
    assert found is not None and problem.fits(found.check())
    assert str(found.ranks[1][0]) == "1F0" and str(found.ranks[1][1]) == "1I0"
    less = Problem(loop(2), 4, problem.times, [1.0, 1.0], [0.0, 0.0], 0.5)
    assert list_order(less, *wanted(problem, order), Rule()) is None
    assert best_order(less, [], 10) is None


@pytest.mark.slow
def test_small_orders_are_within_two_percent_of_the_optimum() -> None:
    """By a search that is exact (see support/exact_order.py)."""
    pytest.importorskip("ortools", reason="see tests/support/exact_order.py")
    above = []
    for seed in range(10):
        draw = random.Random(seed)
        pp, microbatches = draw.choice((2, 2, 3)), draw.choice((3, 4))
        for place in (vee(pp), loop(pp), loop(pp, 2)):
            seconds = [draw.uniform(0.8, 1.2) for _ in place]
            seconds[-1] *= draw.uniform(1, 2)
            times = [
                StageTimes(
                    *(Duration(round(part * each, 3)) for part in (1, 2, 1.1, 0.9)), 0.02, 0.02
                )
                for each in seconds
            ]
            held = [2 * pp / len(place)] * len(place)
            limit = 2 * pp * draw.choice((1.0, 0.8, 0.6))
            problem = Problem(place, microbatches, times, held, held, limit)
            own = [*known(place, pp, microbatches)]
            found = best_order(problem, own, trials_for([problem]))
            if found is not None:
                best, bound = exact_seconds(found, 8)
                above.append(found.seconds / best - 1)
                print(
                    f"pp={pp} {len(place)} stages: {above[-1]:.2%} above; bound {bound / best:.1%}"
                )
    assert len(above) > 20 and max(above) <= 0.02
