"""Activation checkpointing and deferred weight gradients: the same numbers, blocks computed twice."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from support.cells import cells, slow
from support.hf_tiny import model_of, tiny_hf
from support.models import schedule_of, tiny
from support.proven import assert_proven
from support.world import run_world
from titanlike.config.errors import ConfigError
from titanlike.config.groups import (
    ActivationCheckpoint,
    EveryActivationCheckpoint,
    FitActivationCheckpoint,
    LoopedZeroBubbleSchedule,
    SelectiveActivationCheckpoint,
    ZeroBubbleSchedule,
)
from titanlike.config.schema import (
    Checkpoint,
    Config,
    ConstantLr,
    Custom,
    Fsdp,
    PointSplit,
    Precision,
    TraceSplit,
)
from titanlike.data.loader import batches, open_data
from titanlike.job.check import problems
from titanlike.launch.worker import Worker
from titanlike.metrics.sinks import read_jsonl
from titanlike.models.llama import Block
from titanlike.parallel import activation_checkpoint
from titanlike.parallel.mesh import close_mesh, open_mesh
from titanlike.training.build import build
from titanlike.training.draft import draft
from titanlike.training.feed import to_device
from titanlike.training.train import train

CPU = torch.device("cpu")
FULL = ActivationCheckpoint("full")
HOW = {
    "none": ActivationCheckpoint("none"),
    "full": FULL,
    "selective": SelectiveActivationCheckpoint(),
    "every": EveryActivationCheckpoint(every=3),
    "fit": FitActivationCheckpoint(memory=700_000),
}
SCHEDULES = ("1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
TOGETHER = {
    "interleavedzerobubble": LoopedZeroBubbleSchedule(weight_gradients="together"),
    "zbvzerobubble": ZeroBubbleSchedule(weight_gradients="together"),
    "dualpipev": ZeroBubbleSchedule("dualpipev", weight_gradients="together"),
}
QUICK = {("zbvzerobubble", "full", 2), ("1f1b", "fit", 1)}
EVERY = [(schedule, how, dp) for schedule in SCHEDULES for how in HOW for dp in (1, 2)]


@pytest.mark.parametrize(
    "schedule, how, dp",
    [*sorted(QUICK), *slow(*(case for case in EVERY if case not in QUICK))],
)
def test_every_schedule_with_every_recomputation_is_exact(
    schedule: str, how: str, dp: int, tmp_path: Path
) -> None:
    config = tiny(2, dp, schedule_of(schedule, 2, tmp_path), activation_checkpoint=HOW[how])
    assert_proven(config, tmp_path)


WAYS = {
    "gradients together": tiny(2, 2, TOGETHER["zbvzerobubble"], activation_checkpoint=FULL),
    "sharded parameters, without a pipeline": tiny(1, 2, activation_checkpoint=HOW["selective"]),
    "GPT-2, tied, with biases": tiny(
        2, 1, ZeroBubbleSchedule(), family="gpt2", tied=True, activation_checkpoint=FULL
    ),
}
MORE_WAYS = {
    **{
        f"{name}, gradients together": tiny(2, 2, schedule, activation_checkpoint=HOW["every"])
        for name, schedule in TOGETHER.items()
    },
    "sharded parameters": tiny(2, 2, fsdp=Fsdp(3), activation_checkpoint=FULL),
    "HSDP": tiny(2, 4, "interleaved1f1b", replicate=2, activation_checkpoint=HOW["selective"]),
    "CPU offload": tiny(2, 2, fsdp=Fsdp(cpu_offload=True), activation_checkpoint=FULL),
    "bf16": tiny(
        2, 2, ZeroBubbleSchedule(), precision=Precision("bf16"), activation_checkpoint=FULL
    ),
    "tied over stages": tiny(2, 2, "1f1b", tied=True, activation_checkpoint=FULL),
    "stages inside of blocks": tiny(
        2, 1, split=PointSplit(points=["layers.2.ffn"]), activation_checkpoint=FULL
    ),
    "HF Llama": tiny_hf(model_of("llama"), 2, 2, activation_checkpoint=FULL),
    "HF Qwen3": tiny_hf(
        model_of("qwen3"), 2, 1, "zbvzerobubble", activation_checkpoint=HOW["selective"]
    ),
    "HF GPT-2, whose matrices are no linear layers": tiny_hf(
        model_of("gpt2"), 2, 1, "zbvzerobubble", activation_checkpoint=FULL
    ),
}


@pytest.mark.parametrize("config", cells(WAYS, MORE_WAYS))
def test_every_way_to_lay_out_a_recomputed_model_is_exact(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path)


# --- what is computed ---------------------------------------------------------------------------


def a_step(config: Config, worker: Worker, fault: str = "") -> tuple[Counter, dict[str, Tensor]]:
    """Train on one batch: calls of each block's forward on this rank, and gradients."""
    if fault == "masks":
        wrong = functools.partial(torch.utils.checkpoint.checkpoint, preserve_rng_state=False)
        activation_checkpoint.checkpoint = wrong
    calls: Counter[str] = Counter()
    for kind in (Block, Noisy):
        kind.forward = counted(kind.forward, calls)
    mesh = open_mesh(config, worker)
    data = open_data(config)
    run = build(config, mesh, data)
    if fault == "queue":
        for deferred in run.pipeline._deferred.values():
            deferred.take = lambda: lambda: None
    batch = next(batches(data.train, config, dp_rank=mesh.dp_rank))
    calls.clear()
    run.pipeline.train(to_device(batch, mesh, config))
    named = [item for state in run.stage_states for item in state.parameters()]
    trained = [] if mesh.dp > 1 else [(name, p) for name, p in named if p.grad is not None]
    gradients = {name: p.grad.clone() for name, p in trained}
    close_mesh()
    return calls, gradients


def counted(forward, calls):
    @functools.wraps(forward)
    def count(self, x, *args):
        calls["meta" if x.is_meta else "real"] += 1
        return forward(self, x, *args)

    return count


class Noisy(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.linear(x).relu(), 0.5, self.training)


class OddBlock(Noisy):
    """A block that cannot be computed twice, or that checkpoints itself."""

    def __init__(self, dim: int, kind: str) -> None:
        super().__init__(dim)
        self.kind, self.calls, self.generator = kind, 0, torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "random":
            return self.linear(x) * random.random()
        if self.kind == "in place":
            return self.linear(x.mul_(0.5))
        if self.kind == "generator":
            return self.linear(x) * torch.rand(x.shape, generator=self.generator)
        if self.kind == "counts":
            self.calls += 1
            return self.linear(x) * self.calls
        if self.kind == "by keyword":
            return x.tanh()
        if self.kind == "result":
            y = F.linear(x, self.linear.weight)
            y *= 2
            return y.tanh()
        return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)


class Model(nn.Module):
    def __init__(self, *, dim: int = 16, layers: int = 4, kind: str = "") -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, dim)
        make = functools.partial(OddBlock, dim, kind) if kind else functools.partial(Noisy, dim)
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(dim, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            if getattr(layer, "kind", "") == "by keyword":
                x += layer(x=x)
            else:
                x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    "schedule",
    [
        "1f1b",
        ZeroBubbleSchedule(),
        *slow(*TOGETHER.values(), LoopedZeroBubbleSchedule(), ZeroBubbleSchedule("dualpipev")),
    ],
    ids=str,
)
def test_a_recomputed_block_runs_twice_under_every_schedule(schedule, tmp_path: Path) -> None:
    config = tiny(2, 1, schedule, activation_checkpoint=FULL)
    runs = run_world(a_step, config, tmp_path)
    blocks = config.model.args["layers"]
    assert sum(calls["real"] for calls, _ in runs) == 2 * blocks * draft(config).microbatches


@pytest.mark.slow
def test_dropout_draws_the_masks_of_the_forward_again(tmp_path: Path) -> None:
    model = Custom(f"{__name__}.Model")
    config = tiny(2, 1, ZeroBubbleSchedule(), model=model, data=tiny().data)
    recomputed = replace(config, activation_checkpoint=FULL)

    def gradients(config: Config, *fault: str) -> dict[str, Tensor]:
        runs = run_world(a_step, config, tmp_path / "_".join(["run", *fault]), *fault)
        return {name: gradient for _, found in runs for name, gradient in found.items()}

    kept, again, other = gradients(config), gradients(recomputed), gradients(recomputed, "masks")
    assert kept and all(torch.equal(kept[name], again[name]) for name in kept)
    assert not torch.allclose(kept["layers.1.linear.weight"], other["layers.1.linear.weight"])


def test_a_queue_of_weight_gradients_that_is_not_emptied_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="weight gradients of the step were not computed"):
        run_world(a_step, tiny(2, 1, ZeroBubbleSchedule()), tmp_path, "queue")


# --- which blocks ------------------------------------------------------------------------------


def test_which_blocks_are_recomputed() -> None:
    def chosen(how: ActivationCheckpoint, **changes) -> list[list[str]]:
        config = tiny(2, 1, activation_checkpoint=how, **changes)
        return draft(config).recomputed.blocks

    names = [f"layers.{i}" for i in range(8)]
    assert chosen(HOW["none"]) == [[], []]
    assert chosen(FULL) == [names[:4], names[4:]]
    assert chosen(HOW["every"]) == [["layers.0", "layers.3"], ["layers.6"]]
    assert chosen(FULL, model=Custom(f"{__name__}.Model", {"kind": "own"})) == [[], []]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model": Custom(f"{__name__}.Model", {"kind": "random"})}, "layers.0 draws random numbers"),
        ({"model": Custom(f"{__name__}.Model", {"kind": "in place"})}, "layers.0 changes a tensor"),
        ({"model": Custom(f"{__name__}.Model", {"kind": "generator"})}, "a torch.Generator of its own"),
        ({"model": Custom(f"{__name__}.Model", {"kind": "counts"})}, "layers.0 changes self.calls"),
        ({"model": Custom(f"{__name__}.Model", {"kind": "by keyword"})}, "tensor that is later changed"),
        ({"split": TraceSplit(points=["layers.3"])}, "split=trace takes the blocks apart"),
        ({"model": Custom("torch.nn.Embedding", {"num_embeddings": 64, "embedding_dim": 64})}, "no blocks"),
    ],
)  # fmt: skip
def test_what_cannot_be_recomputed_is_refused_by_name(changes: dict, words: str) -> None:
    config = tiny(1 if "no blocks" in words else 2, 1, activation_checkpoint=FULL, **changes)
    with pytest.raises(ConfigError, match=words):
        draft(config)
    draft(replace(config, activation_checkpoint=HOW["none"]))


def test_names_that_no_operator_has_are_refused() -> None:
    names = ["aten.*mm", "aten.mm.default", "*attention*"]
    config = tiny(activation_checkpoint=SelectiveActivationCheckpoint(save=names))
    with pytest.raises(ConfigError) as found:
        draft(config)
    (problem,) = found.value.problems
    assert problem.value == "aten.mm.default"
    assert problem.fix == "activation_checkpoint.save=[aten.*mm,*attention*,aten.mm]"


def test_fit_is_refused_where_activations_cannot_be_estimated() -> None:
    model = Custom("support.unreached.Net")
    config = tiny(2, 1, model=model, activation_checkpoint=HOW["fit"])
    with pytest.raises(
        ConfigError, match="cannot be estimated: .* write activation_checkpoint=full"
    ):
        draft(config)
    draft(replace(config, activation_checkpoint=FULL))


def test_every_zeroth_block_is_refused_in_words() -> None:
    found = problems(tiny(activation_checkpoint=EveryActivationCheckpoint(every=0)))
    assert [problem.key for problem in found] == ["activation_checkpoint.every"]


def test_a_kept_result_that_is_changed_in_place_is_refused_by_name(tmp_path: Path) -> None:
    """Torch does not notice it where the layer has no bias."""
    model = Custom(f"{__name__}.Model", {"kind": "result"})
    config = tiny(2, 1, model=model, data=tiny().data, activation_checkpoint=HOW["selective"])
    with pytest.raises(
        AssertionError, match=r"ConfigError: .*layers\.0 changes a result of aten\.mm"
    ):
        run_world(a_step, config, tmp_path)
    run_world(a_step, replace(config, activation_checkpoint=FULL), tmp_path)


@pytest.mark.parametrize("schedule", ["1f1b", *slow("interleaved1f1b", "zbvzerobubble")])
def test_fit_recomputes_the_fewest_blocks_that_fit_on_each_rank(schedule: str) -> None:
    """The last rank of 1F1B has the fewest microbatches in memory."""
    config = tiny(4, 1, schedule, layers=16, batch_size=32, seq_len=64)

    def fitted(memory: int):
        fit = FitActivationCheckpoint(memory=memory)
        return draft(replace(config, activation_checkpoint=fit)).recomputed

    full = draft(replace(config, activation_checkpoint=FULL)).recomputed.blocks
    most, least = max(fitted(1 << 40).memory), max(fitted(1).memory)
    assert fitted(1 << 40).count == 0 and fitted(1).blocks == full
    before = full
    for limit in range(least, most, (most - least) // 5):
        found = fitted(limit)
        assert max(found.memory) <= limit
        assert all(len(few) <= len(more) for few, more in zip(found.blocks, before, strict=True))
        before = found.blocks
    if schedule == "1f1b":
        counts = [len(blocks) for blocks in fitted((most + least) // 2).blocks]
        assert counts[-1] < min(counts[:-1])


@pytest.mark.slow
def test_a_run_resumes_with_other_activations_in_memory(tmp_path: Path) -> None:
    saving = {"checkpoint": Checkpoint(every=2), "lr": ConstantLr(warmup=0)}
    run_world(train, tiny(2, 1, steps=4, **saving), tmp_path / "whole")
    run_world(train, tiny(2, 1, steps=2, **saving), tmp_path / "cut")
    other = tiny(2, 1, ZeroBubbleSchedule(), steps=4, activation_checkpoint=FULL, **saving)
    run_world(train, other, tmp_path / "cut")
    whole, cut = (
        [row["loss"] for row in read_jsonl(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "cut")
    )
    assert cut == pytest.approx(whole, abs=1e-5) and len(cut) == 4
