"""An Order that would deadlock or give wrong gradients is refused, by rank and action."""

from __future__ import annotations

from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from titanlike.pipeline.order import Act, Order, awaited, needs, walk
from titanlike.pipeline.schedules import gpipe, interleaved_1f1b, loop, one_f_one_b, vee

# pp 2, 2 microbatches, one stage a rank; rank 0 splits the backward of microbatch 1
SPLIT = "0F0,0F1,0B0,0I1,0W1\n1F0,1F1,1B0,1B1\n"


def edited(order: Order, rank: int, change: Callable[[list[Act]], object]) -> Order:
    """The order with the list of one rank changed."""
    ranks = [list(acts) for acts in order.ranks]
    change(ranks[rank])
    return Order(tuple(map(tuple, ranks)), order.place, order.microbatches)


def acts(text: str) -> list[Act]:
    return [Act.parse(cell) for cell in text.split(",")]


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Orders that are right, on several stages a rank."""
    pp, v = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return interleaved_1f1b(pp, draw(st.integers(1, 6)), v)


def test_an_action_reads_back_what_it_writes():
    assert str(Act("I", 12, 3)) == "12I3"
    assert Act.parse(" 12I3 ") == Act("I", 12, 3)
    for text in ("", "F0", "2F", "2X0", "2SEND_F0", "2F0 1F0", "-1F0", "٢F0"):
        with pytest.raises(ValueError, match="such as 2F0"):
            Act.parse(text)


@pytest.mark.parametrize(
    ("csv", "words"),
    [
        # one action too few, too many, elsewhere
        ("0F0,0B0\n1F0\n", ["pipeline rank 1", "1B0 is missing", "add it after 1F0"]),
        ("0F0,0B0\n1B0\n", ["pipeline rank 1", "1F0 is missing"]),
        ("0F0,0B0,0F0\n1F0,1B0\n", ["pipeline rank 0", "0F0 (action 3", "twice", "remove one"]),
        ("0F0,0B0,1F1\n1F0,1B0\n", ["pipeline rank 0", "1F1", "on pipeline rank 1", "move"]),
        # whole and split backwards
        (SPLIT.replace("0I1", "0B1"), ["pipeline rank 0", "0B1 besides 0W1", "keep either"]),
        (SPLIT.replace(",0W1", ""), ["pipeline rank 0", "0W1 is missing besides 0I1"]),
        (SPLIT.replace("0I1,", ""), ["pipeline rank 0", "0I1 is missing besides 0W1"]),
        (SPLIT.replace("0I1,0W1", "0W1,0I1"), ["pipeline rank 0", "0W1 comes before 0I1", "swap"]),
        ("0B0,0F0\n1F0,1B0\n", ["pipeline rank 0", "0B0 comes before 0F0", "swap"]),
        # losses in the wrong order
        (
            "0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n",
            ["pipeline rank 1", "1F1 comes before 1F0", "microbatch order", "losses"],
        ),
        # a circle of waiting: rank 0 wants the gradient before it sends what rank 1 waits for
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            [
                "deadlock",
                "pipeline rank 0 waits at 0B0 for 1B0 of pipeline rank 1, where it is action 3",
                "pipeline rank 1 waits at 1F1 for 0F1 of pipeline rank 0, where it is action 3",
                "Move",
            ],
        ),
    ],
)
def test_a_wrong_table_is_refused_with_the_rank_the_action_and_what_to_change(csv, words):
    with pytest.raises(ValueError) as error:
        Order.from_csv(csv)
    for word in words:
        assert word in str(error.value)


def test_a_deadlock_names_only_the_ranks_of_the_circle():
    """Ranks 0 and 1 wait for each other; rank 2 waits too, but is not to blame."""
    order = edited(gpipe(3, 2), 0, lambda row: row.insert(1, row.pop(2)))
    with pytest.raises(ValueError, match="deadlock") as error:
        order.check()
    assert "rank 0 waits at 0B0 for 1B0 of pipeline rank 1" in str(error.value)
    assert "rank 1 waits at 1F1 for 0F1 of pipeline rank 0" in str(error.value)
    assert "rank 2" not in str(error.value)


def test_neighbouring_stages_on_one_rank_must_be_in_order_too():
    """The turn of a V: nothing is sent, so the rank would compute with what is not there yet."""
    rows = ("0F0,0B0", "1F0,2F0,1B0,2B0")
    with pytest.raises(ValueError, match="pipeline rank 1: 1B0 comes before 2B0"):
        Order(tuple(tuple(acts(row)) for row in rows), (0, 1, 1), 1).check()


def test_what_a_table_cannot_say_is_refused_too():
    """Orders made by a function can be wrong in more ways than a CSV."""
    row = tuple(acts("0F0,0B0"))
    for order, words in (
        (Order((row, ()), (0,), 1), "pipeline rank 1 has no stage"),
        (Order((row,), (1,), 1), "stage 0 is placed on pipeline rank 1"),
        (Order((row,), (0,), 0), "at least 1"),
        (Order((row,), (0,), 2), "pipeline rank 0: 0F1 is missing"),
        (Order((tuple(acts("0F0,0B0,0F1")),), (0,), 1), "0F1 .* only microbatches 0 to 0"),
        (Order((tuple(acts("0F0,0B0,1F0")),), (0,), 1), "1F0 .* only stages 0 to 0"),
        (Order(((*row, Act("F", 0, -1)),), (0,), 1), "0F-1 .* only microbatches"),
        (Order(((*row, Act("X", 0, 0)),), (0,), 1), "kind 'X'"),
    ):
        with pytest.raises(ValueError, match=words):
            order.check()


@settings(max_examples=60, deadline=None)
@given(orders(), st.data())
def test_whatever_one_cell_is_changed_to_is_caught_with_its_rank(order, data):
    """Drop, double, move to another rank, change the microbatch or the kind."""
    rank = data.draw(st.integers(0, len(order.ranks) - 1))
    index = data.draw(st.integers(0, len(order.ranks[rank]) - 1))
    act = order.ranks[rank][index]
    fault = data.draw(st.sampled_from(["drop", "double", "move", "microbatch", "kind"]))
    # without its only backward an order is an evaluation, which is right
    assume(fault not in ("drop", "kind") or order.stages * order.microbatches > 1)
    assume(fault != "move" or len(order.ranks) > 1)
    if fault == "drop":
        wrong = edited(order, rank, lambda row: row.pop(index))
    elif fault == "double":
        wrong = edited(order, rank, lambda row: row.append(act))
    elif fault == "microbatch":
        other = act._replace(mb=order.microbatches)
        wrong = edited(order, rank, lambda row: row.__setitem__(index, other))
    elif fault == "kind":
        other = act._replace(kind="I" if act.kind == "B" else "W")
        wrong = edited(order, rank, lambda row: row.__setitem__(index, other))
    else:
        rank = (rank + 1) % len(order.ranks)
        wrong = edited(order, rank, lambda row: row.append(act))
    with pytest.raises(ValueError, match=rf"pipeline rank {rank}\b.*\b{act.stage}[FBIW]"):
        wrong.check()


def can_run(order: Order) -> bool:
    """An independent answer: no cycle among dependencies and program order, losses in order."""
    graph: dict[Act, set[Act]] = {}
    for row in order.ranks:
        for index, act in enumerate(row):
            graph[awaited(act)] = {awaited(before) for before in row[max(0, index - 1) : index]}
            graph[awaited(act)].update(needs(act, order.stages - 1))
    last = order.stages - 1
    arrivals = [a.mb for a in order.ranks[order.place[last]] if a[:2] == ("F", last)]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return arrivals == sorted(arrivals)


@settings(max_examples=150, deadline=None)
@given(orders(), st.data())
def test_two_swapped_actions_are_refused_exactly_when_they_cannot_run(order, data):
    rank = data.draw(st.integers(0, len(order.ranks) - 1))
    places = st.integers(0, len(order.ranks[rank]) - 1)
    i, j = data.draw(places), data.draw(places)

    def swap(row: list[Act]) -> None:
        row[i], row[j] = row[j], row[i]

    swapped = edited(order, rank, swap)
    if can_run(swapped):
        swapped.check()
    else:
        with pytest.raises(ValueError, match=r"rank \d+.*\d+[FB]\d+"):
            swapped.check()


@settings(max_examples=60, deadline=None)
@given(orders())
def test_a_walk_visits_every_action_after_all_that_it_needs(order):
    seen: list[Act] = []
    for rank, act in walk(order):
        assert order.place[act.stage] == rank
        assert set(needs(act, order.stages - 1)) <= set(map(awaited, seen))
        seen.append(act)
    assert sorted(seen) == sorted(act for row in order.ranks for act in row)


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.builds(loop, st.integers(1, 5), st.integers(1, 3)),
        st.builds(vee, st.integers(1, 5)),
        st.permutations([0, 0, 1, 1, 2]).map(tuple),
    ),
    st.integers(1, 9),
)
def test_evaluation_runs_every_forward_once_on_any_placement(place, microbatches):
    order = Order(((),) * (max(place) + 1), place, 1).forward_only(microbatches).check()
    assert order.place == place and order.microbatches == microbatches
    everything = sorted(act for row in order.ranks for act in row)
    assert everything == [Act("F", s, m) for s in range(len(place)) for m in range(microbatches)]


def test_evaluation_has_as_many_microbatches_as_training_by_default():
    assert one_f_one_b(2, 5).forward_only().microbatches == 5


@settings(max_examples=60, deadline=None)
@given(orders())
def test_a_csv_reads_back_the_same_order(order):
    assert Order.from_csv(order.to_csv()) == order


def test_torch_reads_the_cells_of_a_csv_as_the_same_actions():
    from torch.distributed.pipelining.schedules import _Action

    for row, line in zip(Order.from_csv(SPLIT).ranks, SPLIT.splitlines(), strict=True):
        read = [_Action.from_str(cell) for cell in line.split(",")]
        assert row == tuple((a.computation_type.value, a[0], a.microbatch_index) for a in read)


def test_a_csv_may_have_empty_cells_spaces_and_empty_lines():
    """As a spreadsheet saves it."""
    sheet = "0F0, 0F1 ,,0B0,,0I1,0W1,\n\n,1F0,1F1,1B0,1B1,,,\n\n"
    assert Order.from_csv(sheet) == Order.from_csv(SPLIT)


@pytest.mark.parametrize(
    ("csv", "words"),
    [
        ("0F0,0B0\n1F0,1X0\n", "row 2, column 2: '1X0' is not an action: expected stage, kind"),
        ("", "no action in it: expected a row a pipeline rank"),
        (",,\n", "no action in it"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 has no action, but stage 2 has"),
        ("0F0,0B0\n,,\n1F0,1B0\n", "pipeline rank 1 has no stage"),
        ("0F0,0F999999999\n", "0F1 is missing"),
    ],
)
def test_a_csv_that_cannot_be_read_is_refused_with_the_place(csv, words):
    with pytest.raises(ValueError, match=words):
        Order.from_csv(csv)


def test_an_order_knows_its_stages_and_whether_it_splits_backwards():
    order = interleaved_1f1b(3, 6, 2)
    assert order.stages == 6 and order.local(1) == (1, 4)
    assert not order.splits_backward
    assert Order.from_csv(SPLIT).splits_backward
