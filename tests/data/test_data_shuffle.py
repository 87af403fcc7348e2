"""The order of samples: a real shuffle, the same for everybody."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.data.order import shuffled_index

sizes = st.integers(1, 5000)
seeds = st.integers(-(2**63), 2**64)


@settings(max_examples=20, deadline=None)
@given(size=sizes, seed=seeds, epoch=st.integers(0, 2**20))
def test_every_epoch_reads_every_sample_exactly_once(size: int, seed: int, epoch: int) -> None:
    order = shuffled_index(np.arange(epoch * size, (epoch + 1) * size), size, seed)
    assert sorted(order.tolist()) == list(range(size))


@settings(max_examples=15, deadline=None)
@given(size=st.one_of(sizes, st.just(2**40)), seed=seeds, start=st.integers(0, 2**45))
def test_one_position_is_the_same_alone_as_among_others(size: int, seed: int, start: int) -> None:
    positions = np.arange(start, start + 12).reshape(3, 4)
    together = shuffled_index(positions, size, seed)
    alone = [[shuffled_index(int(j), size, seed) for j in row] for row in positions]
    assert together.tolist() == alone
    assert all(0 <= i < size for row in alone for i in row)


@pytest.mark.parametrize("size", [20, 10_000])
def test_epochs_and_seeds_have_orders_of_their_own(size: int) -> None:
    positions = np.arange(size)
    orders = [
        shuffled_index(positions + epoch * size, size, seed)
        for epoch in range(3)
        for seed in (0, 1)
    ]
    for i, one in enumerate(orders):
        assert (one == positions).mean() < 0.3, "hardly anything stays in its place"
        for other in orders[:i]:
            assert (one == other).mean() < 0.3


@pytest.mark.parametrize("size", [3, 16, 37])
def test_the_order_is_fair(size: int) -> None:
    """Over many epochs each sample is as often first, and each other one as often after it."""
    epochs = 20_000
    starts = np.arange(epochs) * size
    first, second = (shuffled_index(starts + j, size, seed=0) for j in (0, 1))
    for values, kinds in ((first, size), ((second - first) % size - 1, size - 1)):
        counts = np.bincount(values, minlength=kinds)
        chi2 = ((counts - epochs / kinds) ** 2 / (epochs / kinds)).sum()
        assert len(counts) == kinds
        assert chi2 < kinds + 6 * np.sqrt(2 * kinds), "far from uniform"
