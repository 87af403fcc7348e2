"""The simulated step of an order: bubbles, messages and waits as they are known by closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.message_streams import a_pair, makespan, order_of
from titanlike.core.pipeline.schedules import LOOPED, SCHEDULES
from titanlike.core.torch_private.pipeline_runtime import _lower
from titanlike.core.torch_private.pipeline_skips import skip_posts
from titanlike.planning.costs.simulate import Duration, StageTimes, equal_stages, simulate
from titanlike.planning.known_hardware import overlapped_seconds


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_simulated_bubbles_match_the_closed_forms(p: int) -> None:
    """(p - 1) / (v m + p - 1): arXiv 1811.06965, 2104.04473 section 2.2. With F = I = W all that is
    left of it is a third where backwards are split, also of dualpipev as torch runs it: a pair of a
    forward and a backward is one after the other.
    """
    whole = {"gpipe": [1], "1f1b": [1], "interleaved1f1b": [2, 4], "loopedbfs": [2, 4]}
    split = {"interleavedzerobubble": [2, 3], "zbvzerobubble": [2], "dualpipev": [2]}
    for name, chunks in {**whole, **split}.items():
        for v in chunks:
            for m in (2 * p, 4 * p):
                order = order_of(name, p, m, v)
                shared = 3 if name in split else 1
                expected = (p - 1) / (shared * v * m + p - 1)
                found = simulate(order, equal_stages(order)).bubble
                assert found == pytest.approx(expected), (name, p, m, v)


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 20),
    st.integers(2, 3),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_simulated_events_match_torchs_action_lists(
    name: str, pp: int, microbatches: int, stages_per_rank: int, message: float
) -> None:
    """By the longest path through torch's own lists, computed another way."""
    assume(order := order_of(name, pp, microbatches, stages_per_rank if name in LOOPED else 2))
    unit = pp / order.stages
    times = StageTimes(
        Duration(unit), Duration(2 * unit), Duration(unit), Duration(unit), message, message
    )
    lists = _lower(order, order.stages)
    expected = makespan(lists, order.stage_to_rank, a_pair, message, waits_for_sends=False)
    simulated = simulate(order, [times] * order.stages)
    assert simulated.pipeline == pytest.approx(expected)
    for acts, events in zip(order.ranks, simulated.events, strict=True):
        assert [event[:3] for event in events] == [tuple(act) for act in acts]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbh1"])
def test_a_stage_waits_for_a_slow_skip_connection(name: str) -> None:
    """As in the lists of torch's actions with the messages of skips among them."""
    order, message = order_of(name, 4, 8), 3.0
    unit = Duration(1), Duration(2), Duration(1), Duration(1)
    plain = StageTimes(*unit, message, message)
    times = [replace(plain, skips_forward=((2, message), (3, message))), plain]
    times += [replace(plain, skips_backward=((0, message),))] * 2
    lists, place = _lower(order, order.stages), order.stage_to_rank
    posts = skip_posts(lists, place, {(0, 2): True, (0, 3): True})
    expected = makespan(lists, place, a_pair, message, waits_for_sends=False, posts=posts)
    assert simulate(order, times).pipeline == pytest.approx(expected)
    short = StageTimes(*unit)  # the first F of stage 3 waits 20 - 2 for its skip
    late = [replace(short, skips_forward=((3, 20.0),)), *[short] * 3]
    gained = simulate(order, late).pipeline - simulate(order, [short] * 4).pipeline
    assert gained >= 18


def test_gathers_reductions_and_updates_hold_up_their_rank() -> None:
    order = order_of("gpipe", 2, 2)
    base = {"forward": Duration(1), "backward": Duration(2)}
    half = {"input_gradient": Duration(1), "weight_gradient": Duration(1)}
    plain = StageTimes(**base, **half)
    more = StageTimes(**base, **half, gather=5, reduce=7, update=3)
    without = simulate(order, [plain, plain])
    assert (without.pipeline, without.step) == (9, 9)
    first = simulate(order, [more, plain])
    # the second rank waits for the gather of the first, and nobody for its reduction
    assert (first.pipeline, first.step) == (9 + 5 + 7, 9 + 5 + 7 + 3)
    assert first.waits[1, 0] == pytest.approx(5 + 1)
    second = simulate(order, [plain, more], agree=0.5)
    assert second.pipeline == pytest.approx(max(5, 1) + 2 + 4 + 7) and second.step == 18 + 3.5
    # of split backwards: behind the last W
    split = order_of("zbh1", 2, 2)
    both = [simulate(split, [times, plain]) for times in (plain, more)]
    assert both[1].exchanges == [12, 0] and both[1].pipeline == both[0].pipeline + 12


def test_communication_overlaps_with_compute() -> None:
    """By hand: gathers of the next unit, reductions of the one that has ended, in one stream."""
    assert overlapped_seconds([2, 2], []) == 4
    assert overlapped_seconds([2, 2], [1, 3]) == 1 + 3 + 2  # the second unit waits for its own
    assert overlapped_seconds([5, 2], [1, 3]) == 7
    assert overlapped_seconds([4, 4], [], []) == 8
    assert overlapped_seconds([4, 4], [], [1, 3]) == 8 + 3  # nothing is left to hide the last
    assert overlapped_seconds([4, 4], [], [6, 3]) == 4 + 6 + 3
    assert overlapped_seconds([4, 4], [1, 2], [1, 1]) == 9


def test_a_slow_host_delays_the_device() -> None:
    order = order_of("1f1b", 1, 4)
    quick, slow_host = Duration(1, 0.5), Duration(1, 2.0)
    times = StageTimes(quick, quick, quick, quick)
    assert simulate(order, [times]).step == pytest.approx(8)
    assert simulate(order, [times], runs_ahead=False).step == pytest.approx(12)
    late = StageTimes(slow_host, slow_host, quick, quick)
    assert simulate(order, [late]).step == pytest.approx(16)
