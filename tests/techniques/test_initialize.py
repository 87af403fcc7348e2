"""Initial weights depend on seed and name alone."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from support.models import tiny
from support.opened import opened
from support.world import run_world
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.data import SyntheticData
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.distributed import initialize as initialize_module
from titanlike.core.distributed import module_weights
from titanlike.core.distributed.initialize import (
    ConstructedWeights,
    SeededWeights,
    draw,
    drawing_threads,
    initialize,
)
from titanlike.core.distributed.module_weights import ModuleWeights
from titanlike.core.distributed.placement import Slices
from titanlike.core.launch.worker import Worker
from titanlike.core.models.registry import build_model, initial_weights_of


@given(
    rows=st.integers(1, 2000),
    width=st.sampled_from([1, 7, 600]),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    seed=st.integers(0, 10),
)
@settings(max_examples=20)
def test_a_weight_is_initialized_alike_in_every_sharding(rows, width, cuts, seed) -> None:
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


def test_a_tied_weight_stays_tied_and_keeps_its_name() -> None:
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


class OwnBlock(nn.Module):
    """Attention that initializes itself, and a scale of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.5)


class OwnModel(nn.Module):
    def __init__(self, *, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, width)
        self.layers = nn.ModuleList(OwnBlock(width) for _ in range(layers))
        self.out = nn.Linear(width, 16)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


def test_modules_initialize_themselves_alike_in_any_stage() -> None:
    whole = on_meta(OwnModel)
    initialize(whole, ModuleWeights(on_meta(OwnModel), "mine", 3, {}), torch.device("cpu"))
    assert all(not p.isnan().any() for p in whole.parameters())
    assert 0.015 < whole.tokens.weight.std() < 0.025  # by _init_weights, behind N(0, 1)
    for block in whole.layers:
        assert block.scale.eq(0.5).all() and block.attention.out_proj.bias.eq(0).all()
        assert 0.3 < block.linear.weight.abs().max() <= 8**-0.5
    assert not torch.equal(whole.layers[0].linear.weight, whole.layers[1].linear.weight)
    stage = on_meta(OwnModel).layers[2]  # alone, in another order, and in parts
    weights, names = ModuleWeights(on_meta(OwnModel), "mine", 3, {}), dict(stage.named_parameters())
    initialize(stage, weights, torch.device("cpu"), {name: f"layers.2.{name}" for name in names})
    for name, parameter in whole.layers[2].named_parameters():
        assert torch.equal(stage.get_parameter(name), parameter)
        rows = weights.block(f"layers.2.{name}", parameter.shape, (slice(2, 4),))
        assert torch.equal(rows, parameter[2:4])
    other = ModuleWeights(on_meta(OwnModel), "mine", 4, {})
    shape = whole.out.weight.shape
    assert not torch.equal(other.block("out.weight", shape, ()), whole.out.weight)


def test_a_parameter_that_no_module_initializes_is_named() -> None:
    class Scaled(OwnModel):
        _init_weights = None  # type: ignore[assignment]

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.inner = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

    class Unset(OwnModel):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

    with pytest.raises(ConfigError, match="neither reset_parameters .* sets scale"):
        ModuleWeights(on_meta(Scaled), "mine", 0, {})
    with pytest.raises(ConfigError, match="sets scale"):  # _init_weights does nothing with it
        ModuleWeights(on_meta(Unset), "mine", 0, {}).block("scale", torch.Size([4]), ())


def test_a_model_that_a_rank_cannot_construct_is_not_constructed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Custom("support.any_models.Plain", {})
    assert isinstance(initial_weights_of(model, 0), ConstructedWeights)
    needed = sum(4 * p.numel() for p in build_model(model).parameters())
    for ranks, too_large in ((1, False), (8, True)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        room = lambda _, ranks: 5 * needed // ranks  # noqa: E731
        monkeypatch.setattr("titanlike.core.distributed.module_weights.total_memory", room)
        found = initial_weights_of(model, 0)
        assert isinstance(found, ModuleWeights) == too_large
        assert ("_init_weights" in found.origin) == too_large
    assert isinstance(initial_weights_of(model, 0, lambda _: False), ConstructedWeights)


def first_loss(config: Config, worker: Worker) -> tuple[float, str]:
    """Where the last rank alone has no room for the whole model."""
    last = worker.rank == worker.world_size - 1
    module_weights.too_large_to_construct = lambda _: last
    with opened(config, worker) as job:
        return job.train().item(), job.run.weights_source


def test_layouts_begin_with_the_same_weights_of_modules(tmp_path: Path) -> None:
    more = {"model": Custom("support.forwards.Dense"), "data": SyntheticData(vocab_size=64)}
    ((loss, said),) = run_world(first_loss, tiny(pp=1, **more), tmp_path / "one")
    assert said == ModuleWeights.origin
    for other, told in run_world(first_loss, tiny(pp=2, dp=2, **more), tmp_path / "ranks"):
        assert (pytest.approx(other, rel=1e-6), told) == (loss, said)
