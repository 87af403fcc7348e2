"""A model is cut into consecutive stages, evenly or where the user says."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.core.config.groups.pipeline import BalanceSplit, EvenSplit, PointSplit
from titanlike.core.graph.partition import SplitError, even_sizes, partition
from titanlike.core.graph.units import Unit


def llama(blocks: int) -> list[Unit]:
    """Embedding, blocks, norm, head."""
    layers = [Unit(f"layers.{i}", True) for i in range(blocks)]
    return [Unit("embedding", False), *layers, Unit("norm", False), Unit("head", False)]


def blocks_of(parts: list[list[str]]) -> list[int]:
    return [sum(name.startswith("layers") for name in part) for part in parts]


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[Unit], EvenSplit | PointSplit | BalanceSplit, int]:
    """A model, a split that fits it, and the number of stages."""
    blocks = draw(st.integers(1, 12))
    before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    units = [Unit(f"in.{i}", False) for i in range(before)]
    for i in range(blocks):
        units += [Unit(f"layers.{i}", True)] + [Unit(f"mid.{i}", False)] * draw(st.booleans())
    units += [Unit(f"out.{i}", False) for i in range(after)]
    stages = draw(st.integers(1, blocks))
    cuts = draw(st.permutations(range(1, blocks)))[: stages - 1]
    edges = [0, *sorted(cuts), blocks]
    weight = st.floats(0, 4)
    split = draw(
        st.one_of(
            st.builds(EvenSplit, embedding_weight=weight, head_weight=weight),
            st.just(BalanceSplit(balance=[b - a for a, b in pairwise(edges)])),
            st.just(PointSplit(points=[f"layers.{i}" for i in edges[1:-1]])),
        )
    )
    return units, split, stages


@settings(max_examples=40)
@given(splits())
def test_every_module_is_in_exactly_one_stage_in_order(case):
    units, split, stages = case
    parts = partition(units, split, stages)
    assert [name for part in parts for name in part] == [unit.name for unit in units]
    assert len(parts) == stages and min(blocks_of(parts)) >= 1


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 20), st.booleans(), st.booleans())
def test_more_stages_than_blocks_leave_stages_empty(blocks, stages, before, after):
    units = [Unit("in", False)] * before
    units += [Unit(f"layers.{i}", True) for i in range(blocks)] + [Unit("out", False)] * after
    parts = partition(units, EvenSplit(), stages)
    assert [name for part in parts for name in part] == [unit.name for unit in units]
    assert len(parts) == stages and parts[0] and (parts[-1] or len(units) == 1)
    assert sum(not part for part in parts) == max(0, stages - len(units))


def test_an_empty_stage_may_be_asked_for() -> None:
    assert partition(llama(2), BalanceSplit(balance=[0, 1, 0, 1, 0]), 5) == [
        ["embedding"],
        ["layers.0"],
        [],
        ["layers.1"],
        ["norm", "head"],
    ]
    with pytest.raises(SplitError, match="first stage would be empty"):
        partition(llama(2)[1:], BalanceSplit(balance=[0, 2]), 2)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_the_even_split_is_the_best_of_all(weights, data):
    """Lightest heaviest stage, then least squares, then the smaller stages first: by trying all."""
    stages = data.draw(st.integers(1, len(weights)))

    def badness(cuts: tuple[int, ...]) -> tuple:
        edges = [0, *cuts, len(weights)]
        sums = [sum(weights[a:b]) for a, b in pairwise(edges)]
        return max(sums), sum(s * s for s in sums), [b - a for a, b in pairwise(edges)]

    best = min(map(badness, combinations(range(1, len(weights)), stages - 1)))
    assert even_sizes([float(w) for w in weights], stages) == best[2]


def test_embedding_and_head_weigh_as_much_as_the_config_says():
    units = llama(6)
    assert blocks_of(partition(units, EvenSplit(), 4)) == [1, 2, 2, 1]
    free = EvenSplit(embedding_weight=0.0, head_weight=0.0)
    assert blocks_of(partition(units, free, 3)) == [2, 2, 2]
    assert blocks_of(partition(units, EvenSplit(head_weight=4.0), 2)) == [4, 2]
    assert even_sizes([3.0, 1.0, 1.0, 1.0, 1.0], 3) == [
        1,
        2,
        2,
    ]  # what is below the most is even, too
    # of equal splits that with the smallest first stages, whatever the last bits of their sums
    assert even_sizes([1.65, 1.0, 1.0, 1.0, 1.65], 3) == [1, 2, 2]
    assert blocks_of(partition(units, EvenSplit(head_weight=1e300), 3)) == [2, 3, 1]
    # a model that has neither pays for neither
    heavy_head, heavy_embedding = EvenSplit(head_weight=4.0), EvenSplit(embedding_weight=4.0)
    assert blocks_of(partition(units[1:-2], heavy_head, 2)) == [3, 3]
    assert blocks_of(partition(units[1:-2], heavy_embedding, 2)) == [3, 3]


def test_modules_around_the_blocks_go_to_the_first_and_last_stage():
    assert partition(llama(3), EvenSplit(), 2) == [
        ["embedding", "layers.0"],
        ["layers.1", "layers.2", "norm", "head"],
    ]
    assert partition(llama(2), BalanceSplit(balance=[1, 1]), 2) == [
        ["embedding", "layers.0"],
        ["layers.1", "norm", "head"],
    ]
    assert partition(llama(1), EvenSplit(), 1) == [["embedding", "layers.0", "norm", "head"]]


def test_split_points_may_be_outside_of_blocks():
    points = PointSplit(points=["layers.0", "norm"])
    assert partition(llama(1), points, 3) == [["embedding"], ["layers.0"], ["norm", "head"]]
    assert partition(llama(1), PointSplit(), 1) == [["embedding", "layers.0", "norm", "head"]]


def points(*names: str) -> PointSplit:
    return PointSplit(points=list(names))


def balance(*blocks: int) -> BalanceSplit:
    return BalanceSplit(balance=list(blocks))


MISTAKES = {  # of 8 blocks
    "a mistyped point": (points("layer.3"), 2, "no unit layer.3", "split.points=[layers.3]"),
    "no such point": (points("x"), 2, "units are [embedding,...,head]", "split.points=[layers.4]"),
    "the wrong order": (
        points("layers.5", "layers.2"),
        3,
        "layers.2 comes before layers.5",
        "split.points=[layers.2,layers.5]",
    ),
    "twice": (points("layers.2", "layers.2"), 3, "layers.2 is listed twice", "[layers.2,layers.5]"),
    "the first unit": (points("embedding"), 2, "first unit", "split.points=[layers.4]"),
    "too few points": (points("layers.4"), 4, "takes 3 points", "[layers.1,layers.3,layers.6]"),
    "too many stages": (PointSplit(), 12, "takes 11 points", "at most 11 stages"),
    "a wrong sum": (balance(4, 3), 2, "sums to 7", "split.balance=[4,4]"),
    "too few numbers": (balance(4, 4), 3, "3 stages", "split.balance=[2,3,3]"),
    "a negative number": (balance(9, -1), 2, "stage 1 gets -1 blocks", "split.balance=[4,4]"),
    "no numbers": (BalanceSplit(), 9, "9 stages", "split.balance=[1,1,1,1,1,1,1,1,0]"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_split_that_does_not_fit_is_refused_with_one_that_does(case: str) -> None:
    split, stages, reason, fix = MISTAKES[case]
    with pytest.raises(SplitError) as error:
        partition(llama(8), split, stages)
    problem = error.value.problem
    assert problem.key == f"split.{split.name}"
    assert reason in problem.reason and fix in problem.fix
    assert str(error.value).startswith(f"{problem.key}=")
