"""The order of samples: a real shuffle, the same for everybody."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.models import tiny
from titanlike.core.data.checked import SimilarLengthBatchSampler
from titanlike.core.data.order import GlobalBatchSampler, shuffled_index

sizes = st.integers(1, 5000)
seeds = st.integers(-(2**63), 2**64)


@settings(max_examples=20)
@given(size=sizes, seed=seeds, epoch=st.integers(0, 2**20))
def test_every_epoch_reads_every_sample_exactly_once(size: int, seed: int, epoch: int) -> None:
    order = shuffled_index(np.arange(epoch * size, (epoch + 1) * size), size, seed)
    assert sorted(order.tolist()) == list(range(size))


@settings(max_examples=15)
@given(size=st.one_of(sizes, st.just(2**40)), seed=seeds, start=st.integers(0, 2**45))
def test_a_position_maps_to_the_same_sample_alone_and_in_bulk(
    size: int, seed: int, start: int
) -> None:
    positions = np.arange(start, start + 12).reshape(3, 4)
    together = shuffled_index(positions, size, seed)
    alone = [[shuffled_index(int(j), size, seed) for j in row] for row in positions]
    assert together.tolist() == alone
    assert all(0 <= i < size for row in alone for i in row)


@pytest.mark.parametrize("size", [20, 10_000])
def test_epochs_and_seeds_have_different_orders(size: int) -> None:
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


@settings(max_examples=25)
@given(
    batch=st.sampled_from([1, 2, 6, 8, 32]),
    epoch_steps=st.one_of(st.floats(2, 14), st.floats(60, 160)),
    skipped=st.integers(0, 200),
    seed=st.integers(0, 2**32),
)
def test_length_buckets_do_not_mix_epochs(
    batch: int, epoch_steps: float, skipped: int, seed: int
) -> None:
    """Each epoch has each sample once, no batch has a copy, whether or not the batch divides the
    epoch; any layout and any start give the same batches; windows within an epoch are as plain."""
    size = max(2 * batch, int(epoch_steps * batch))
    lengths = np.random.default_rng(seed % 97).integers(1, 50, size)
    steps, config = 2 * size // batch + 70, tiny(batch_size=batch, seed=seed)

    def rows(dp: int, start: int, count: int) -> np.ndarray:
        ranks = [
            SimilarLengthBatchSampler(
                size, tiny(dp=dp, batch_size=batch, seed=seed), r, start, lengths
            )
            for r in range(dp)
        ]
        return np.array([sum(map(next, ranks), []) for _ in range(count)])

    found = rows(1, 0, steps)
    assert all(len({*row}) == batch for row in found.tolist())
    # a step of two epochs has the end of the first, then the beginning of the second
    for epoch in range(steps * batch // size):
        ids = found.reshape(-1)[epoch * size : (epoch + 1) * size]
        assert sorted(ids.tolist()) == list(range(size)), epoch
    layout = batch if batch < 8 else 4
    assert (rows(layout, skipped, 70) == rows(1, 0, skipped + 70)[skipped:]).all()
    plain = GlobalBatchSampler(size, config, 0, 0)
    for first in range(0, size // batch - 63, 64):  # of the first epoch
        window = np.array([next(plain) for _ in range(64)])
        assert sorted(window.flat) == sorted(found[first : first + 64].flat)
        by_length = lengths[found[first : first + 64]]
        assert (by_length.max(1) - by_length.min(1)).sum() <= 50 + 64


def test_no_epoch_is_too_short_for_similar_lengths() -> None:
    """Of fewer samples than a batch, too: each sample in turn."""
    sampler = SimilarLengthBatchSampler(5, tiny(batch_size=8), 0, 0, [3, 1, 4, 1, 5])
    ids = [i for _ in range(10) for i in next(sampler)]
    assert all({*ids[at : at + 5]} == {*range(5)} for at in range(0, 80, 5))
