"""Initial weights depend on seed and name alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.parallel.initialize import draw


@given(
    rows=st.integers(1, 2000),
    width=st.sampled_from([1, 7, 600]),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    seed=st.integers(0, 10),
)
@settings(max_examples=30, deadline=None)
def test_shards_of_a_weight_are_parts_of_the_same_weight(rows, width, cuts, seed) -> None:
    shape = torch.Size([rows, width])
    whole = draw(shape, slice(0, rows), seed, "layers.0.wq.weight", 0.0, 0.02)
    edges = sorted({0, rows, *(int(cut * rows) for cut in cuts)})
    parts = [
        draw(shape, slice(a, b), seed, "layers.0.wq.weight", 0.0, 0.02)
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_weights_differ_by_name_and_seed_and_have_the_asked_spread() -> None:
    shape, rows = torch.Size([1000, 300]), slice(0, 1000)
    one = draw(shape, rows, 0, "a", 0.0, 0.02)
    assert not torch.equal(one, draw(shape, rows, 0, "b", 0.0, 0.02))
    assert not torch.equal(one, draw(shape, rows, 1, "a", 0.0, 0.02))
    assert one.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(one.mean().item()) < 1e-3
