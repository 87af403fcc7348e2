"""The split whose heaviest rank is as light as can be, against all splits tried one by one."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.core.pipeline.schedules import loop, vee
from titanlike.planning.costs.auto_split import CostedSplit, StageCosts, best_split, cost_of_split


def shared(weights: list[list[int]]) -> np.ndarray:
    """held[start, stop] of units that hold these things: what two have counts once."""
    n = len(weights)
    held = np.zeros((n + 1, n + 1), dtype=np.int64)
    for start in range(n):
        for stop in range(start + 1, n + 1):
            held[start, stop] = sum(set().union(*weights[start:stop]))
    return held


def costs_of(run: list[int], stages: int, times: list[int] | None = None) -> StageCosts:
    held = np.zeros((len(run) + 1, len(run) + 1), dtype=np.int64)
    return StageCosts(held, run, times or [1] * stages)


@st.composite
def cases(draw: st.DrawFn, kinds: str) -> tuple[StageCosts, tuple[int, ...]]:
    """Units with costs, some of them alike, and a placement of stages on ranks."""
    kind = draw(st.sampled_from(kinds.split()))
    if kind == "single":
        place = tuple(draw(st.permutations(range(draw(st.integers(1, 4))))))
    elif kind == "vee":
        place = vee(draw(st.integers(1, 3)))
    elif kind == "loop":
        place = loop(draw(st.integers(1, 3)), draw(st.integers(2, 3)))
        place = place[:6]
    else:
        ranks = draw(st.integers(1, 3))
        extra = draw(st.lists(st.integers(0, ranks - 1), max_size=3))
        place = tuple(draw(st.permutations([*range(ranks), *extra])))
    units = draw(st.integers(len(place), len(place) + 4))
    cost = draw(st.sampled_from([st.integers(0, 9), st.sampled_from([1, 5]), st.just(3)]))
    run = draw(st.lists(cost, min_size=units, max_size=units))
    things = st.lists(st.integers(1, 9), max_size=2)  # equal numbers are the same thing
    weights = draw(st.lists(things, min_size=units, max_size=units))
    times = draw(
        st.one_of(
            st.just([1] * len(place)),
            st.lists(st.integers(1, 4), min_size=len(place), max_size=len(place)),
        )
    )
    return StageCosts(shared(weights), run, times), place


def weight(split: CostedSplit) -> int:
    """What is minimized."""
    return 2 * max(split.ranks) + max(split.stages)


@pytest.mark.parametrize("kinds", ["single", "vee", "loop", "any"])
def test_no_other_split_costs_less(kinds: str) -> None:
    """With one stage a rank no split at all is; with several none where one unit is moved."""

    @settings(max_examples=30)
    @given(cases(kinds))
    def check(case: tuple[StageCosts, tuple[int, ...]]) -> None:
        costs, place = case
        found = best_split(costs, place)
        cuts = [[0, *cut] for cut in combinations(range(1, costs.units), costs.stages - 1)]
        if len(set(place)) < costs.stages:
            sizes = np.diff([*found.starts, costs.units])
            changes = (np.abs(np.diff([*cut, costs.units]) - sizes).sum() for cut in cuts)
            cuts = [cut for cut, change in zip(cuts, changes, strict=True) if change == 2]
        others = [cost_of_split(costs, place, cut) for cut in cuts]
        assert all(weight(found) <= weight(other) for other in others)
        assert all(a < b for a, b in pairwise([*found.starts, costs.units]))
        assert found == cost_of_split(costs, place, found.starts)

    check()


def test_ranks_are_not_evened_out_by_unequal_stages() -> None:
    """For 2 of 4018, a stage of three blocks beside one of one: all ranks would wait for it."""
    found = best_split(costs_of([1000 + 37 * i * i % 11 for i in range(8)], 4), loop(2, 2))
    assert found.ranks == [4014, 4018] and max(found.stages) == 2010


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 12))
def test_more_stages_than_units_leave_those_before_the_last_empty(units: int, stages: int) -> None:
    stages = max(units, stages)
    found = best_split(costs_of([1] * units, stages), range(stages))
    sizes = [b - a for a, b in pairwise([*found.starts, units])]
    empty = [0] * (stages - units)
    assert sizes == [1] * (units - 1) + empty + [1] if units > 1 else sizes == [1, *empty]


# Llama 3 405B: 126 blocks, and a head of 0.65 blocks
BLOCKS = [0, *[1000] * 126, 0, 652]


@pytest.mark.parametrize(
    "place",
    [tuple(range(16)), vee(16), loop(16, 2), loop(16, 4)],
    ids=["one a rank", "V", "two a rank", "four a rank"],
)
def test_a_large_model_is_cut_as_well_as_can_be(place: tuple[int, ...]) -> None:
    assert max(best_split(costs_of(BLOCKS, len(place)), place).ranks) == 8000
