"""zbh1, zbh2, vhalf and vmin have the bubbles and the memory that their papers say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.core.pipeline.order_check import check_order
from titanlike.core.pipeline.schedules import SCHEDULES
from titanlike.planning.costs.simulate import equal_stages, in_flight, simulate

SIZES = [(p, m * p) for p in (2, 3, 4, 6, 8) for m in (1, 2, 4)]


def measured(name: str, pp: int, microbatches: int) -> tuple[float, float]:
    """Time steps that a rank waits, in F of a whole rank, and the most microbatches in flight."""
    order = check_order(SCHEDULES[name](pp, microbatches))
    # F, I and W take a step each
    simulation = simulate(order, equal_stages(order))
    waits = simulation.pipeline - 3 * microbatches
    return waits, max(map(in_flight, order.ranks)) * pp / order.stages


def test_zb_h1_and_h2_wait_a_third_of_1f1b_with_once_and_twice_its_memory() -> None:
    """arXiv 2401.10241, table 1: (p - 1) (F + I - W), p microbatches; and 2 p - 1."""
    for pp, microbatches in SIZES:
        assert measured("1f1b", pp, microbatches) == (pytest.approx(3 * (pp - 1)), pp)
        assert measured("zbh1", pp, microbatches) == (pytest.approx(pp - 1), pp)
        if microbatches >= 2 * pp:
            # from the first action of the first rank to the last of the last, which begins p - 1
            # later: no rank waits once it has begun
            assert measured("zbh2", pp, microbatches) == (pytest.approx(pp - 1), 2 * pp - 1)
            order = SCHEDULES["zbh2"](pp, microbatches)
            for events in simulate(order, equal_stages(order)).events:
                assert events[-1].end - events[0].start == pytest.approx(3 * microbatches)


def test_v_half_and_v_min_have_half_and_a_third_of_1f1bs_memory_and_small_bubbles() -> None:
    """arXiv 2405.15362: (p + 2) // 2 and (p + 4) // 3 microbatches; bubbles of p / 2 m and 2 p / 3
    m."""
    for pp, microbatches in (*SIZES, (12, 48)):
        waits, most = measured("vhalf", pp, microbatches)
        assert most <= (pp + 2) // 2 and waits <= 3 * pp / 2
        assert waits == pytest.approx(max(0.5, 3 * ((pp + 1) // 2) - 3.5))
        waits, most = measured("vmin", pp, microbatches)
        assert most <= (pp + 4) // 3 and waits <= max(0.5, 2 * pp - 2.5)
    # no longer than with the paper's own program (run at its commit of 2025), in steps of a chunk
    for name, pp, microbatches, steps in (("vhalf", 6, 24, 155), ("vmin", 8, 16, 123)):
        waits, _ = measured(name, pp, microbatches)
        assert round(2 * (waits + 3 * microbatches)) <= steps


@settings(max_examples=25)
@given(st.sampled_from(["zbh1", "zbh2", "vhalf", "vmin"]), st.integers(1, 9), st.integers(1, 30))
def test_any_number_of_ranks_and_microbatches_runs(name: str, pp: int, microbatches: int) -> None:
    order = check_order(SCHEDULES[name](pp, microbatches))
    check_order(order.forward_only())
    assert order.splits_backward
