"""The split whose heaviest rank is as light as can be, against all splits tried one by one."""

from __future__ import annotations

from itertools import combinations, pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.costs.auto_split import (
    StageCosts,
    VPlacementSearch,
    best_split,
    cost_of_split,
    load_lower_bound,
)
from titanlike.pipeline.schedules import loop, vee


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


@pytest.mark.parametrize("kinds", ["single", "vee", "loop", "any"])
def test_no_split_is_better(kinds: str) -> None:
    @settings(max_examples=30, deadline=None)
    @given(cases(kinds))
    def check(case: tuple[StageCosts, tuple[int, ...]]) -> None:
        costs, place = case
        found = best_split(costs, place)
        cuts = combinations(range(1, costs.units), costs.stages - 1)
        exact = 3 if len(set(place)) == costs.stages else 2  # with one stage a rank, squares too
        best = min(cost_of_split(costs, place, [0, *cut]).key[:exact] for cut in cuts)
        assert found.proven and found.key[:exact] == best
        assert all(a < b for a, b in pairwise([*found.starts, costs.units]))
        assert found == cost_of_split(costs, place, found.starts)

    check()


def test_a_bound_by_the_cheapest_stages_does_not_end_the_search() -> None:
    """Microbatches in flight differ: a unit costs a stage four times as much as another."""
    found = best_split(costs_of([2, 2, 9, 4, 5, 6, 8], 4, [1, 4, 1, 4]), loop(2, 2))
    assert found.proven and found.key[:2] == (40, 32)


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 12))
def test_more_stages_than_units_leave_those_before_the_last_empty(units: int, stages: int) -> None:
    stages = max(units, stages)
    found = best_split(costs_of([1] * units, stages), range(stages))
    sizes = [b - a for a, b in pairwise([*found.starts, units])]
    empty = [0] * (stages - units)
    assert sizes == [1] * (units - 1) + empty + [1] if units > 1 else sizes == [1, *empty]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 4))
def test_the_bound_on_the_heaviest_is_never_too_high(weights: list[int], bins: int) -> None:
    """Against all ways to put weights into bins, in any order."""
    loads = {(0,) * bins}
    for weight in weights:
        loads = {
            tuple(sorted((*load[:at], load[at] + weight, *load[at + 1 :])))
            for load in loads
            for at in range(bins)
        }
    assert load_lower_bound(weights, bins) <= min(max(load) for load in loads)


# Llama 3 405B: 126 blocks, and a head of 0.65 blocks
BLOCKS = [0, *[1000] * 126, 0, 652]


@pytest.mark.parametrize(
    "place",
    [tuple(range(16)), vee(16), loop(16, 2), loop(16, 4)],
    ids=["one a rank", "V", "two a rank", "four a rank"],
)
def test_a_large_model_is_cut_and_proven_in_few_steps(
    place: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = mock.Mock(side_effect=VPlacementSearch.find, autospec=True)
    monkeypatch.setattr(VPlacementSearch, "find", lambda *args: find(*args))
    found = best_split(costs_of(BLOCKS, len(place)), place, max_nodes=5000)
    assert max(found.ranks) == 8000 and found.proven
    assert find.call_count <= 20


def test_a_search_that_is_given_up_says_so_and_gives_a_good_split() -> None:
    run = [(37 * i * i) % 101 + 1 for i in range(40)]
    costs, place = costs_of(run, 12), loop(4, 3)
    found = best_split(costs, place, max_nodes=20)
    assert not found.proven and max(found.ranks) < 1.2 * sum(run) / 4
