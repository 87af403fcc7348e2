"""An Order that would deadlock or give wrong gradients is refused, by rank and action."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.core.pipeline.order import Action, Order
from titanlike.core.pipeline.order_check import check_order, completion_key, dependencies, walk
from titanlike.core.pipeline.schedules import interleaved_1f1b, loop, one_f_one_b, vee

# pp 2, 2 microbatches, one stage a rank; rank 0 splits the backward of microbatch 1
SPLIT = "0F0,0F1,0B0,0I1,0W1\n1F0,1F1,1B0,1B1\n"
# right orders, on several stages a rank
orders = st.builds(interleaved_1f1b, st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))


def acts(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(cell) for cell in text.split(","))


def test_an_action_round_trips_through_its_text() -> None:
    assert str(Action("I", 12, 3)) == "12I3"
    assert Action.parse(" 12I3 ") == Action("I", 12, 3)
    for text in ("", "F0", "2F", "2X0", "2SEND_F0", "2F0 1F0", "-1F0", "٢F0"):
        with pytest.raises(ValueError, match="such as 2F0"):
            Action.parse(text)


@pytest.mark.parametrize(
    ("csv", "words"),
    [
        # one action too few, too many, elsewhere
        ("0F0,0B0\n1F0\n", ["pipeline rank 1", "1B0 is missing", "add it after 1F0"]),
        ("0F0,0B0\n1B0\n", ["pipeline rank 1", "1F0 is missing"]),
        ("0F0,0F1,0B0\n1F0,1F1,1B0,1B1\n", ["pipeline rank 0", "0B1 is missing"]),
        ("0F0,0B0,0F0\n1F0,1B0\n", ["pipeline rank 0", "0F0 (action 3", "twice", "remove one"]),
        ("0F0,0B0,1F1\n1F0,1B0\n", ["pipeline rank 0", "1F1", "on pipeline rank 1", "move"]),
        # whole and split backwards
        (SPLIT.replace("0I1", "0B1"), ["pipeline rank 0", "0B1 besides 0W1", "keep either"]),
        (SPLIT.replace(",0W1", ""), ["pipeline rank 0", "0W1 is missing besides 0I1"]),
        (SPLIT.replace("0I1,", ""), ["pipeline rank 0", "0I1 is missing besides 0W1"]),
        (SPLIT.replace("0I1,0W1", "0W1,0I1"), ["pipeline rank 0", "0W1 comes before 0I1", "swap"]),
        ("0B0,0F0\n1F0,1B0\n", ["pipeline rank 0", "0B0 comes before 0F0", "swap"]),
        # losses in the wrong order
        ("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n", ["pipeline rank 1", "1F1 comes before 1F0"]),
        # a circle of waiting, which rank 2 is no part of: rank 0 wants the gradient before it sends
        # what rank 1 waits for
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n2F0,2F1,2B0,2B1\n",
            [
                "deadlock: pipeline rank 0 waits at 0B0 for 1B0 of pipeline rank 1, where it is "
                "action 3; pipeline rank 1 waits at 1F1 for 0F1 of pipeline rank 0, where it is "
                "action 3. Move",
            ],
        ),
        # what cannot be read
        ("0F0,0B0\n1F0,1X0\n", ["row 2, column 2: '1X0' is not an action: expected stage, kind"]),
        (",,\n", ["no action in it: expected a row a pipeline rank"]),
        ("0F0,0B0\n2F0,2B0\n", ["stage 1 has no action, but stage 2 has"]),
        ("0F0,0B0\n,,\n1F0,1B0\n", ["pipeline rank 1 has no stage"]),
        ("0F0,0F999999999\n", ["0F1 is missing"]),
        ("0F0,0B0\n999999999F0\n", ["row 2, column 1: '999999999F0' is not an action"]),
    ],
)
def test_an_invalid_order_is_refused_with_the_place_and_a_fix(csv: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        check_order(Order.from_csv(csv))
    for word in words:
        assert word in str(error.value)


def test_an_order_that_cannot_be_expressed_is_refused() -> None:
    """Orders made by a function can be wrong in more ways than a CSV."""
    row = acts("0F0,0B0")
    for order, words in (
        (Order((row, ()), (0,), 1), "pipeline rank 1 has no stage"),
        (Order((row,), (1,), 1), "stage 0 is placed on pipeline rank 1"),
        (Order((row,), (0,), 0), "at least 1"),
        (Order((row,), (0,), 2), "pipeline rank 0: 0F1 is missing"),
        (Order((acts("0F0,0B0,0F1"),), (0,), 1), "0F1 .* only microbatches 0 to 0"),
        (Order((acts("0F0,0B0,1F0"),), (0,), 1), "1F0 .* only stages 0 to 0"),
        (Order(((*row, Action("F", 0, -1)),), (0,), 1), "0F-1 .* only microbatches"),
        (Order(((*row, Action("X", 0, 0)),), (0,), 1), "kind 'X'"),
        # the turn of a V: nothing is sent, so the rank would compute with what is not there yet
        (Order((row, acts("1F0,2F0,1B0,2B0")), (0, 1, 1), 1), "rank 1: 1B0 comes before 2B0"),
    ):
        with pytest.raises(ValueError, match=words):
            check_order(order)


def can_run(order: Order) -> bool:
    """An independent answer: no cycle among dependencies and program order, losses in order."""
    graph: dict[Action, set[Action]] = {}
    for row in order.ranks:
        for index, act in enumerate(row):
            graph[completion_key(act)] = {
                completion_key(before) for before in row[max(0, index - 1) : index]
            }
            graph[completion_key(act)].update(dependencies(act, order.stages - 1))
    last = order.stages - 1
    arrivals = [a.mb for a in order.ranks[order.stage_to_rank[last]] if a[:2] == ("F", last)]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return arrivals == sorted(arrivals)


@settings(max_examples=100)
@given(orders, st.data())
def test_two_swapped_actions_are_refused_exactly_when_they_deadlock_or_cannot_run(
    order, data
) -> None:
    ranks = [list(acts) for acts in order.ranks]
    row = ranks[data.draw(st.integers(0, len(ranks) - 1))]
    i, j = (data.draw(st.integers(0, len(row) - 1)) for _ in "ij")
    row[i], row[j] = row[j], row[i]
    swapped = Order(tuple(map(tuple, ranks)), order.stage_to_rank, order.microbatches)
    if can_run(swapped):
        check_order(swapped)
    else:
        with pytest.raises(ValueError, match=r"rank \d+.*\d+[FB]\d+"):
            check_order(swapped)


@settings(max_examples=25)
@given(orders)
def test_an_order_is_walked_as_it_can_run_and_a_csv_reads_back_the_same(order) -> None:
    seen: list[Action] = []
    for rank, act in walk(order):
        assert order.stage_to_rank[act.stage] == rank
        assert set(dependencies(act, order.stages - 1)) <= set(map(completion_key, seen))
        seen.append(act)
    assert sorted(seen) == sorted(act for row in order.ranks for act in row)
    assert Order.from_csv(order.to_csv()) == order


@settings(max_examples=25)
@given(
    st.one_of(
        st.builds(loop, st.integers(1, 5), st.integers(1, 3)),
        st.builds(vee, st.integers(1, 5)),
        st.permutations([0, 0, 1, 1, 2]).map(tuple),
    ),
    st.integers(1, 9),
)
def test_evaluation_runs_every_forward_once_on_any_placement(place, microbatches) -> None:
    order = check_order(Order(((),) * (max(place) + 1), place, 1).forward_only(microbatches))
    assert order.stage_to_rank == place and order.microbatches == microbatches
    everything = sorted(act for row in order.ranks for act in row)
    assert everything == [Action("F", s, m) for s in range(len(place)) for m in range(microbatches)]
    assert one_f_one_b(2, microbatches).forward_only().microbatches == microbatches


def test_a_csv_is_what_torch_and_a_spreadsheet_make_of_it() -> None:
    from torch.distributed.pipelining.schedules import _Action

    order = Order.from_csv(SPLIT)
    for row, line in zip(order.ranks, SPLIT.splitlines(), strict=True):
        read = [_Action.from_str(cell) for cell in line.split(",")]
        assert row == tuple((a.computation_type.value, a[0], a.microbatch_index) for a in read)
    assert Order.from_csv("0F0, 0F1 ,,0B0,,0I1,0W1,\n\n,1F0,1F1,1B0,1B1,,,\n\n") == order
    assert order.splits_backward and not interleaved_1f1b(3, 6, 2).splits_backward
    assert interleaved_1f1b(3, 6, 2).local(1) == (1, 4)
