"""Initial weights depend on seed and name alone."""

from __future__ import annotations

import re
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.parallel import initialize as initialize_module
from titanlike.parallel.initialize import draw, drawing_threads, initialize, piece_seed
from titanlike.parallel.tp.part import Slices


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
        draw(shape, slice(a, b), seed, "layers.0.wq.weight", 0.0, 0.02, threads=3)
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


def test_a_weight_is_its_pieces_however_many_threads_draw_them() -> None:
    """A run that goes on elsewhere, or with another number of cores, starts from the same weights."""
    shape = torch.Size([1000, 600])
    rows = 2**18 // 600  # of a piece
    pieces = []
    for piece in range(-(-1000 // rows)):
        generator = torch.Generator().manual_seed(piece_seed(3, "a", piece))
        size = (min(rows, 1000 - piece * rows), 600)
        pieces.append(torch.empty(size).normal_(0.5, 0.02, generator=generator))
    for threads in (1, 2, 8):
        drawn = draw(shape, slice(0, 1000), 3, "a", 0.5, 0.02, threads)
        assert torch.equal(drawn, torch.cat(pieces))


def test_threads_are_a_ranks_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialize_module, "available_cores", lambda: 128)
    for ranks, threads in (("8", 16), ("1000", 1), ("1", 32)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert drawing_threads() == threads


def test_weights_that_take_long_are_drawn_with_lines_of_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(initialize_module, "PROGRESS", 0.2)

    class Slow:
        """Takes half a second for each parameter."""

        def block(self, name: str, shape: torch.Size, place: Slices) -> torch.Tensor:
            time.sleep(0.5)
            return torch.ones(shape)[place]

    with torch.device("meta"):
        stage = torch.nn.Sequential(*(torch.nn.Linear(100, 100, bias=False) for _ in range(2)))
    lines: list[str] = []
    initialize(stage, Slow(), torch.device("cpu"), say=lines.append)
    assert all(weight.eq(1).all() for weight in stage.parameters())
    assert re.fullmatch(r"weights: 0% of 20.0k after \d s", lines[0])
    assert any(line.startswith("weights: 50% of 20.0k after") for line in lines)
    count = len(lines)
    time.sleep(0.5)
    assert len(lines) == count  # no thread goes on
