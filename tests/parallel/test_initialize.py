"""Initial weights depend on seed and name alone."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.distributed import initialize as initialize_module
from titanlike.distributed.initialize import (
    SeededWeights,
    draw,
    drawing_threads,
    initialize,
)
from titanlike.distributed.placement import Slices


@given(
    rows=st.integers(1, 2000),
    width=st.sampled_from([1, 7, 600]),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    seed=st.integers(0, 10),
)
@settings(max_examples=20, deadline=None)
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


def test_threads_are_a_ranks_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialize_module, "available_cores", lambda: 128)
    for ranks, threads in (("8", 16), ("1000", 1), ("1", 32)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert drawing_threads() == threads


def test_weights_that_take_long_are_drawn_with_lines_of_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(initialize_module, "PROGRESS", 0.001)
    lines: list[str] = []
    said = threading.Condition()

    def say(line: str) -> None:
        with said:
            lines.append(line)
            said.notify_all()

    class Slow:
        """Gives a parameter once a line says how much is done."""

        def block(self, name: str, shape: torch.Size, place: Slices) -> torch.Tensor:
            share = "weights: 50%" if name == "1.weight" else "weights: 0%"
            with said:
                assert said.wait_for(lambda: lines and lines[-1].startswith(share), timeout=60)
            return torch.ones(shape)[place]

    with torch.device("meta"):
        stage = torch.nn.Sequential(*(torch.nn.Linear(100, 100, bias=False) for _ in range(2)))
    initialize(stage, Slow(), torch.device("cpu"), say=say)
    assert all(weight.eq(1).all() for weight in stage.parameters())
    assert re.fullmatch(r"weights: 0% of 20.0k after \d+ s", lines[0])
    assert "progress" not in {thread.name for thread in threading.enumerate()}  # none goes on


def test_a_tied_weight_stays_one_and_is_named_as_in_the_whole_model() -> None:
    """In a stage of a model, whose modules begin with 0."""
    with torch.device("meta"):
        stage = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(3))
        stage[2].weight = stage[0].weight
    weights = SeededWeights(lambda name: (0.0, 1.0), 3, {})
    names = {"0.weight": "layers.7.weight", "1.weight": "layers.8.weight"}
    initialize(stage, weights, torch.device("cpu"), names)
    assert stage[2].weight is stage[0].weight
    for part, name in ((stage[0], "layers.7.weight"), (stage[1], "layers.8.weight")):
        drawn = draw(torch.Size([4, 4]), slice(0, 4), 3, name, 0.0, 1.0)
        assert torch.equal(part.weight, drawn)
