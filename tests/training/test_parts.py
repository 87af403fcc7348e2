"""What single parts promise: initial weights, the learning rate, stages, memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.models import tiny
from support.world import run_world
from titanlike.config.errors import ConfigError
from titanlike.config.schema import (
    BalanceSplit,
    Config,
    ConstantLr,
    Custom,
    DecayLr,
    Fsdp,
    LoopedSchedule,
    WsdLr,
)
from titanlike.data.loader import batches, open_data
from titanlike.graph.cut import message
from titanlike.graph.stage import Stage
from titanlike.launch.worker import Worker
from titanlike.models.registry import build_model, initial_weights_of
from titanlike.optim.optimizer import lr_factor
from titanlike.parallel.device import peak_memory, resident_memory
from titanlike.parallel.initialize import draw, initialize
from titanlike.parallel.mesh import open_mesh
from titanlike.training.build import build
from titanlike.training.draft import draft
from titanlike.training.guard import Guard
from titanlike.training.measure import measured_step
from titanlike.training.preflight import preflight

# --- initial weights ---------------------------------------------------------------------------


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


# --- the learning rate -------------------------------------------------------------------------


@given(
    lr=st.one_of(
        st.builds(ConstantLr, warmup=st.integers(0, 50)),
        st.builds(
            DecayLr,
            name=st.sampled_from(["linear", "cosine"]),
            warmup=st.integers(0, 50),
            final=st.floats(0, 1),
        ),
        st.builds(
            WsdLr, warmup=st.integers(0, 50), decay=st.floats(0.01, 1), final=st.floats(0, 1)
        ),
    ),
    steps=st.integers(60, 500),
)
def test_the_learning_rate_rises_then_never_rises_again(lr, steps) -> None:
    factors = [lr_factor(lr, step, steps) for step in range(1, steps + 1)]
    warm, rest = factors[: lr.warmup], factors[max(0, lr.warmup - 1) :]
    assert warm == sorted(warm)
    assert all(a >= b - 1e-12 for a, b in zip(rest, rest[1:], strict=False))
    assert max(factors) <= 1 and min(factors) >= 0
    assert factors[-1] == pytest.approx(getattr(lr, "final", 1.0))


def test_wsd_keeps_its_peak_when_a_run_is_made_longer() -> None:
    lr = WsdLr(warmup=10, decay=0.2)
    before_decay = [lr_factor(lr, step, 100) for step in range(1, 80)]
    assert before_decay == [lr_factor(lr, step, 1000) for step in range(1, 80)]


# --- stages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_stages_run_one_after_another_are_the_model(family: str) -> None:
    config = tiny(4, 1, LoopedSchedule("interleaved1f1b", None, 2), family=family)
    plan = draft(config)
    assert [name for names in plan.stages for name in names] == [
        u.name for u in plan.model_graph.units
    ]
    start, canonical = (
        initial_weights_of(plan.model, config.seed),
        plan.model_graph.canonical_names(),
    )
    whole = build_model(plan.model)
    initialize(whole, start, torch.device("cpu"))
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    arrived = (ids,)
    for index, graph in enumerate(plan.model_graph.graphs(plan.fields, True)):
        stage = Stage(build_model(plan.model), graph.units, graph.weights)
        initialize(stage, start, torch.device("cpu"), canonical)
        stage.add_forwards("a shape", {True: graph}, index, torch.device("cpu"))
        sent = stage(*arrived, inputs=ids)
        arrived = sent if isinstance(sent, tuple) else (sent,)
        assert [message(node).shape[1:] for node in graph.sends] == [t.shape[1:] for t in arrived]
    assert torch.equal(arrived[0], whole(ids))


def test_names_in_a_stage_are_names_in_the_whole_model() -> None:
    plan = draft(tiny(2, 1))
    whole = {name for name, _ in build_model(plan.model).named_parameters()}
    graphs = plan.model_graph.graphs(plan.fields, True)
    stages = [Stage(build_model(plan.model), graph.units, graph.weights) for graph in graphs]
    parts = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(parts) == sorted(whole)


def test_a_405b_model_is_drafted_in_seconds() -> None:
    sizes = {"dim": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "ffn_dim": 53248}
    config = tiny(
        16, 64, batch_size=16 * 64, model=Custom("llama", {**sizes, "vocab_size": 128256})
    )
    plan = draft(config)
    assert plan.numel == pytest.approx(405.9e9, rel=1e-3)
    biggest = max(plan.stage_numel(stage) for stage in range(16))
    assert biggest < 1.1 * plan.numel / 16


@pytest.mark.parametrize(
    "config, expected",
    [
        (tiny(model=Custom("llama", {"vocab_size": None, "dim": 30, "heads": 4})), r"model.dim=32"),
        (tiny(model=Custom("llama", {"vocab_size": None, "heads": 6, "dim": 48, "kv_heads": 4})), r"model.kv_heads=3"),
        (tiny(model=Custom("llama", {"vocab_size": None, "width": 4})), r"width"),
        (tiny(model=Custom("llama", {"vocab_size": None, "dimm": 64})), r"model.dim=64"),
        (tiny(model=Custom("lama", {})), r"llama"),
        (tiny(model=Custom("no.such.module", {})), r"no\.such"),
        (tiny(model=Custom("llama", {"vocab_size": 10})), r"model.vocab_size=null"),
        (tiny(model=Custom("gpt2", {"vocab_size": None, "max_seq_len": 8})), r"seq_len=8"),
        (tiny(2, 2, "zbvzerobubble", fsdp=Fsdp(3)), r"fsdp.zero=1"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_laid_out_is_refused_with_one_that_can(config, expected) -> None:
    problems = preflight(config)
    assert problems and expected.replace("\\", "") in "\n".join(map(str, problems))


def test_draft_raises_what_preflight_lists() -> None:
    with pytest.raises(ConfigError, match="sums to 7"):
        draft(tiny(2, 1, split=BalanceSplit(balance=[4, 3])))


# --- memory ------------------------------------------------------------------------------------


def train_two_steps(config: Config, worker: Worker) -> int:
    """Bytes that this rank's memory grew by, at its peak."""
    mesh = open_mesh(config, worker)
    before = resident_memory(mesh.device)
    data = open_data(config)
    run = build(config, mesh)
    stream = batches(data.train, config, dp_rank=mesh.dp_rank)
    for step in (1, 2):
        measured_step(run, config, step, stream, Guard(config, {}), worker)
    return peak_memory(mesh.device) - before


def test_a_ranks_memory_falls_with_pp_and_with_dp_as_the_parameters_do(tmp_path: Path) -> None:
    sizes = {"dim": 512, "heads": 8, "kv_heads": 8, "ffn_dim": 1408, "layers": 8}
    model = Custom("llama", {**sizes, "vocab_size": 64})

    def fullest(name: str, **layout) -> int:
        config = tiny(model=model, batch_size=4, seq_len=8, **layout)
        return max(run_world(train_two_steps, config, tmp_path / name))

    one = fullest("one")
    # weights, gradients and two moments in fp32
    assert one > 16 * draft(tiny(model=model)).numel > 300 * 2**20
    assert fullest("pp", pp=2) < 0.6 * one
    assert fullest("dp", dp=2) < 0.75 * one  # besides its shards, the block that runs
    assert fullest("pp dp", pp=2, dp=2) < 0.6 * one  # a stage's parameters stay gathered
    assert fullest("pp dp, ZeRO 3", pp=2, dp=2, fsdp=Fsdp(3)) < 0.55 * one
