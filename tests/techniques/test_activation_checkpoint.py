"""Activation checkpointing: which blocks are computed twice, how often, and with the same numbers.

That every schedule and layout is exact with it is proven in `tests/proof/test_layouts.py`.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import SelectiveCheckpointContext

from support.cells import slow
from support.families import hf, moe
from support.live_memory import LiveStorages
from support.models import tiny
from support.opened import opened
from support.proven import assert_proven
from support.real_model import real
from support.world import run_world
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.computation import ActivationCheckpoint, EveryActivationCheckpoint
from titanlike.core.config.groups.computation import FitActivationCheckpoint as Fit
from titanlike.core.config.groups.computation import SelectiveActivationCheckpoint as Selective
from titanlike.core.config.groups.pipeline import TraceSplit
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.models.llama import Block
from titanlike.core.training.train_plan import make_plan
from titanlike.run.checks import problems
from titanlike.techniques.activation_checkpoint import checkpoint_blocks

FULL = ActivationCheckpoint("full")


def doubled(block: Noisy, x: Tensor) -> Tensor:
    y = F.linear(x, block.linear.weight)
    y *= 2
    return y.tanh()


def counted(block: Noisy, x: Tensor) -> Tensor:
    block.calls += 1
    return block.linear(x) * block.calls


def downhill(block: Noisy, x: Tensor) -> Tensor:
    """A step of gradient descent, whose own gradient is taken in the backward."""
    z = x.detach().requires_grad_()
    with torch.enable_grad():
        [gradient] = torch.autograd.grad(block.linear(z).square().sum(), z, create_graph=True)
    return x - 0.1 * gradient


# blocks that cannot be computed twice; "own" checkpoints itself
KINDS = {
    "": lambda block, x: x + F.dropout(block.linear(x).relu(), 0.5, block.training),
    "random": lambda block, x: block.linear(x) * random.random(),
    "in place": lambda block, x: block.linear(x.mul_(0.5)),
    "generator": lambda block, x: block.linear(x) * torch.rand(x.shape, generator=block.generator),
    "counts": counted,
    "by keyword": lambda block, x: x.tanh(),
    "result": doubled,
    "gradient": downhill,
    "functional gradient": lambda block, x: (
        x - 0.1 * torch.func.grad(lambda z: block.linear(z).square().sum())(x)
    ),
    "own": lambda block, x: torch.utils.checkpoint.checkpoint(block.linear, x, use_reentrant=False),
}


class Noisy(nn.Module):
    def __init__(self, dim: int, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.kind, self.calls, self.generator = kind, 0, torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return KINDS[self.kind](self, x)


class Model(nn.Module):
    def __init__(self, *, dim: int = 16, layers: int = 4, kind: str = "") -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, dim)
        self.layers = nn.ModuleList(Noisy(dim, kind) for _ in range(layers))
        self.head = nn.Linear(dim, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            if layer.kind == "by keyword":
                x += layer(x=x)
            else:
                x = layer(x)
        return self.head(x)


# --- what is computed ---------------------------------------------------------------------------


def test_recomputation_repeats_the_dropout_masks() -> None:
    def gradients(recomputed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model()
        if recomputed:
            checkpoint_blocks(model, ["layers.0", "layers.2"], save=[])
        torch.manual_seed(1)
        model(torch.arange(64)).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, gradients(True), gradients(False)))


@pytest.mark.parametrize("save", [[], Selective().save], ids=["full", "selective"])
@pytest.mark.parametrize("family", ["ours", "mixtral"])
def test_recomputation_keeps_expert_routing(family: str, save: list[str]) -> None:
    """Chosen again, among equal scores on a GPU, they may be others. Not where a router changes
    what topk gives it in place."""
    mixtral = hf("mixtral", vocab_size=64, num_hidden_layers=2)
    model = real(moe(vocab_size=64) if family == "ours" else mixtral)
    blocks = [name for name, _ in model.named_modules() if name.endswith(("layers.0", "layers.1"))]
    checkpoint_blocks(model, blocks, save)
    with LiveStorages() as live:
        model(torch.arange(32).view(2, 16)).square().sum().backward()
    assert live.operators["topk"] == (2 if family == "ours" else 4)


def calls_of_blocks(config: Config, worker: Worker) -> tuple[int, str]:
    """Count forwards of blocks in a step whose weight gradients are not computed; its error."""
    calls: Counter[bool] = Counter()
    forward = Block.forward

    @functools.wraps(forward)
    def counting(self: Block, x: Tensor, *args: object) -> Tensor:
        calls[x.is_meta] += 1
        return forward(self, x, *args)

    Block.forward = counting
    with opened(config, worker) as job:
        calls.clear()
        for deferred in getattr(
            job.run.transforms.get("weight gradients later"), "_of", {}
        ).values():
            deferred.take = lambda: lambda: None
        try:
            job.train()
        except AssertionError as error:
            return calls[False], str(error)
    return calls[False], ""


@pytest.mark.parametrize("schedule", ["zbvzerobubble", *slow("1f1b")])
def test_a_recomputed_block_runs_twice_and_a_queue_that_is_not_emptied_is_noticed(
    schedule: object, tmp_path: Path
) -> None:
    config = tiny(pp=2, schedule=schedule, layers=4, activation_checkpoint=FULL)
    runs = run_world(calls_of_blocks, config, tmp_path)
    assert sum(calls for calls, _ in runs) == 2 * 4 * make_plan(config).microbatches
    waits = "weight gradients of the step were not computed" if schedule != "1f1b" else ""
    assert all(waits in error for _, error in runs)


@pytest.mark.skipif(
    "op_output" not in inspect.signature(SelectiveCheckpointContext).parameters,
    reason="2.11 does not say what an operator returned",
)
def test_a_saved_result_changed_in_place_is_refused_by_name() -> None:
    """Torch does not notice it where the layer has no bias."""
    for save, refused in (([], False), (["aten.mm"], True)):
        model = Model(kind="result")
        checkpoint_blocks(model, ["layers.1"], save)
        if not refused:
            model(torch.arange(64)).sum().backward()
            continue
        with pytest.raises(ConfigError, match=r"layers\.1 changes a result of aten\.mm"):
            model(torch.arange(64))


# --- which blocks ------------------------------------------------------------------------------


def test_which_blocks_are_recomputed() -> None:
    def chosen(how: ActivationCheckpoint, **changes: object) -> list[list[str]]:
        config = tiny(pp=2, activation_checkpoint=how, **changes)
        return make_plan(config).recomputed.blocks

    names = [f"model.layers.{i}" for i in range(8)]
    assert chosen(ActivationCheckpoint("none")) == [[], []]
    assert chosen(FULL) == [names[:4], names[4:]]
    assert chosen(EveryActivationCheckpoint(every=3)) == [[names[0], names[3]], [names[6]]]
    assert chosen(FULL, model=Custom(f"{__name__}.Model", {"kind": "own"})) == [[], []]


def kind(name: str) -> dict[str, Custom]:
    return {"model": Custom(f"{__name__}.Model", {"kind": name})}


@pytest.mark.parametrize("name", ["gradient", *slow("functional gradient")])
def test_blocks_that_call_autograd_are_neither_recomputed_nor_compiled(
    name: str, tmp_path: Path
) -> None:
    """torch does neither: it raises in the first step."""
    config = tiny(dp=2, activation_checkpoint=Selective(), compile=True, **kind(name))
    assert make_plan(config).recomputed.blocks == [[]]
    assert_proven(config, tmp_path)


SMALL = {"model": Custom(f"{__name__}.Model", {"layers": 2})}
TRACED = {"split": TraceSplit(points=["layers.1"])}
NO_BLOCKS = {
    "model": Custom("torch.nn.Embedding", {"num_embeddings": 64, "embedding_dim": 64}),
    "pp": 1,
}
FIT = {"model": Custom("support.unreached.Net"), "activation_checkpoint": Fit(memory=700_000)}


@pytest.mark.parametrize(
    "changes, words",
    [
        (kind("random"), "layers.0 draws random numbers"),
        (kind("in place"), "layers.0 changes a tensor"),
        (kind("generator"), "a torch.Generator of its own"),
        (kind("counts"), "layers.0 changes self.calls"),
        (kind("by keyword"), "tensor that is later changed"),
        (SMALL | TRACED, "split=trace takes the blocks apart"),
        (NO_BLOCKS, "no blocks"),
        (FIT, "cannot be estimated: .* write activation_checkpoint=full"),
    ],
)
def test_a_block_that_cannot_be_recomputed_is_refused_by_name(changes: dict, words: str) -> None:
    config = replace(tiny(pp=2, activation_checkpoint=FULL), **changes)
    with pytest.raises(ConfigError, match=words):
        make_plan(config)
    other = "full" if changes is FIT else "none"
    make_plan(replace(config, activation_checkpoint=ActivationCheckpoint(other)))


def test_names_that_no_operator_has_and_every_zeroth_block_are_refused() -> None:
    names = ["aten.*mm", "aten.mm.default", "*attention*"]
    [problem] = problems(tiny(activation_checkpoint=Selective(save=names)))
    assert problem.value == "aten.mm.default"
    assert problem.fix == "activation_checkpoint.save=[aten.*mm,*attention*,aten.mm]"
    [problem] = problems(tiny(activation_checkpoint=EveryActivationCheckpoint(every=0)))
    assert problem.key == "activation_checkpoint.every"


def test_fit_recomputes_the_fewest_blocks_that_fit_on_each_rank() -> None:
    """The last rank of 1F1B has the fewest microbatches in memory."""
    config = tiny(pp=4, layers=16, batch_size=32, seq_len=64)

    def fitted(memory: int):
        fit = Fit(memory=memory)
        return make_plan(replace(config, activation_checkpoint=fit)).recomputed

    nothing, everything = fitted(1 << 40), fitted(1)
    most, least = max(nothing.memory), max(everything.memory)
    before = make_plan(replace(config, activation_checkpoint=FULL)).recomputed.blocks
    assert nothing.count == 0 and everything.blocks == before
    for limit in (least, (most + least) // 2, most - 1):
        found = fitted(limit)
        assert max(found.memory) <= limit
        assert all(len(few) <= len(more) for few, more in zip(found.blocks, before, strict=True))
        before = found.blocks
        if least < limit < most - 1:
            counts = [len(blocks) for blocks in found.blocks]
            assert counts[-1] < min(counts[:-1])


def test_experts_that_are_sharded_apart_are_recomputed_selectively(tmp_path: Path) -> None:
    """FSDP's hooks run inside of the block there, in the recomputation as well."""
    model = moe(balance_loss=0.01)
    config = tiny(dp=2, ep=2, model=model, batch_size=8, activation_checkpoint=Selective())
    assert_proven(config, tmp_path)
