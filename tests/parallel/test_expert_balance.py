"""Balance of experts: over the global batch, once a step, the same in every layout."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from support.cells import cells, slow
from support.models import tiny
from support.proven import assert_proven
from support.skipped_step import three_steps
from support.world import run_world
from titanlike.config.schema import (
    ActivationCheckpoint,
    AdamW,
    Checkpoint,
    Config,
    ConstantLr,
    Custom,
    EveryActivationCheckpoint,
    Fsdp,
    Model,
    Precision,
    SelectiveActivationCheckpoint,
)
from titanlike.data.loader import batches, open_data
from titanlike.launch.worker import Worker
from titanlike.metrics.sinks import read_jsonl
from titanlike.models.moe import Moe, RoutedFeedForward
from titanlike.models.registry import initial_weights_of, resolve_model
from titanlike.parallel import expert_balance
from titanlike.parallel.expert_balance import ExpertBalance
from titanlike.parallel.initialize import initialize
from titanlike.parallel.mesh import close_mesh, open_mesh
from titanlike.proof.verification import verify
from titanlike.training.build import build
from titanlike.training.guard import Guard
from titanlike.training.step import measured_step
from titanlike.training.train import train

SIZES = {"vocab_size": None, "dim": 32, "heads": 4, "kv_heads": 2, "experts": 8, "expert_dim": 32}
ALL = {"bias_rate": 0.01, "balance_loss": 0.02, "z_loss": 0.01}
FULL = ActivationCheckpoint("full")


def mixture(pp: int = 1, dp: int = 1, schedule: Any = "1f1b", **changes: Any) -> Config:
    args = {**SIZES, "layers": 4 * pp, **ALL, **changes.pop("args", {})}
    return tiny(pp, dp, schedule, model=Model("moe", args), **changes)


DEEPSEEK = {"scores": "sigmoid", "groups": 4, "groups_chosen": 2, "shared_experts": 1, "scale": 2.5}
DEEPSEEK |= {"dense_layers": 1, "qk_norm": True, "head_dim": 16}


@pytest.mark.parametrize(
    "config",
    cells(
        {
            "parts of the sequence": mixture(tp=2, args={"layers": 2}),
        },
        {
            "FSDP": mixture(dp=4, fsdp=Fsdp(3)),
            "ZeRO 1": mixture(dp=2, fsdp=Fsdp(1)),
            "replicas": mixture(dp=2, replicate=2),
            "interleaved": mixture(
                2, 2, "interleaved1f1b", activation_checkpoint=SelectiveActivationCheckpoint()
            ),
            "every second block": mixture(
                2, 2, activation_checkpoint=EveryActivationCheckpoint(), args=DEEPSEEK
            ),
            "whole sequences on each rank": mixture(tp=2, tp_sequence=False, args=DEEPSEEK),
            "a pipeline of parts": mixture(2, tp=2, args=DEEPSEEK),
            "bf16": mixture(dp=2, precision=Precision("bf16")),
            "compiled": mixture(compile=True, args={"layers": 2}),
            "compiled, recomputed": mixture(
                2, 1, "zbvzerobubble", compile=True, activation_checkpoint=FULL, args={"layers": 4}
            ),
            "sizes that no grouped product takes": mixture(
                dp=2, args={"expert_dim": 30, "dim": 40, "experts": 5}
            ),
        },
        {
            "recomputed, in a V": mixture(
                2, 2, "zbvzerobubble", activation_checkpoint=FULL, args={"layers": 4}
            ),
        },
    ),
)
def test_every_layout_trains_and_balances_as_one_process(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path, timeout=300)


# --- what the losses are --------------------------------------------------------------------------


class Written:
    """The losses of a step, written down: what each router gives, and the choices."""

    def __init__(self, model: Moe) -> None:
        self.logits: dict[nn.Module, Tensor] = {}
        self.counts: dict[nn.Module, Tensor] = {}
        self.layers = [m for m in model.modules() if isinstance(m, RoutedFeedForward)]
        for layer in self.layers:
            layer.router.register_forward_hook(lambda m, _, out: self.logits.update({m: out}))
            layer.experts.register_forward_pre_hook(lambda m, a: self.counts.update({m: a[1]}))

    def loss(self, load: list[Tensor]) -> Tensor:
        """load: of each layer, the share of tokens of each expert in the step before."""
        total = torch.zeros(())
        for layer, shares in zip(self.layers, load, strict=True):
            logits = self.logits[layer.router]
            probabilities = logits.softmax(-1).mean(0)
            total += 0.02 * len(shares) * (shares * probabilities).sum()
            total += 0.01 * logits.logsumexp(-1).square().mean()
        return total

    def load(self) -> list[Tensor]:
        return [
            self.counts[layer.experts] / sum(self.counts[layer.experts]) for layer in self.layers
        ]


def gradients_of_two_steps(config: Config, worker: Worker) -> list[dict[str, Tensor]]:
    data = open_data(config)
    mesh = open_mesh(config, worker)
    run = build(config, mesh, data)
    stream = batches(data.train, config, dp_rank=mesh.dp_rank)
    found: list[dict[str, Tensor]] = []

    def keep() -> None:
        named = (item for state in run.stage_states for item in state.parameters())
        found.append({n: expert_balance_full(p.grad) for n, p in named})

    for step in (1, 2):
        measured_step(run, config, step, stream, Guard(config, {}), worker, before_update=keep)
    close_mesh()
    return found


def expert_balance_full(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


@pytest.mark.slow
def test_the_losses_are_those_of_the_global_batch_with_the_last_steps_load(tmp_path: Path) -> None:
    """Written down in plain torch, for two steps of a pipeline in microbatches."""
    config = mixture(2, 2, args={"layers": 4}, lr=ConstantLr(warmup=0), optimizer=AdamW(clip=None))
    ranks = run_world(gradients_of_two_steps, config, tmp_path)
    plain = {**SIZES, "layers": 4, "vocab_size": 64, "bias_rate": 0.01}
    model = Moe(**plain)
    initialize(model, initial_weights_of(resolve_model(config), config.seed), torch.device("cpu"))
    written, data = Written(model), open_data(config)
    stream = batches(data.train, replace(config, pp=1, dp=1), dp_rank=0)
    load = [torch.full((8,), 1 / 8) for _ in written.layers]
    from titanlike.optim.optimizer import build_optimizers

    optimizers = build_optimizers(dict(model.named_parameters()), model, config)
    for step in (0, 1):
        batch = next(stream)
        logits = model(batch["inputs"])
        text = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        (text + written.loss(load)).backward()
        for rank in ranks:
            for name, mine in rank[step].items():
                right = dict(model.named_parameters())[name].grad
                assert (mine - right).norm() < 1e-5 * right.norm(), (step, name)
        for layer in written.layers:
            layer.balance(written.counts[layer.experts])
        load = written.load()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


# --- skewed text ----------------------------------------------------------------------------------


def skewed(pp: int = 1, dp: int = 1, steps: int = 60, rate: float = 0.001, **more: Any) -> Config:
    args = {**SIZES, "layers": 2, "bias_rate": rate}
    settings = {"data": Custom("support.skewed.zipf"), "seq_len": 32, "lr": ConstantLr(warmup=0)}
    settings |= {"model": Model("moe", args), "optimizer": AdamW(lr=1e-3), "steps": steps}
    return tiny(pp, dp, **settings, **more)


def trained(config: Config, folder: Path) -> list[dict[str, Any]]:
    run_world(train, config, folder)
    return read_jsonl(folder / "metrics.jsonl")


KEYS = ("loss", "busiest_expert", "idlest_expert")


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return trained(skewed(), tmp_path_factory.mktemp("balanced"))


def test_on_skewed_text_the_busiest_expert_comes_near_the_mean(balanced: list[dict]) -> None:
    busiest = [record["busiest_expert"] for record in balanced]
    assert busiest[0] > 1.4
    assert sum(busiest[-10:]) / 10 < 1.2
    assert all(record["dropped"] == 0 for record in balanced)


@pytest.mark.parametrize(
    "config",
    cells(
        {},
        {"FSDP": skewed(dp=4, steps=20), "parts": skewed(tp=2, steps=20)},
        {"a pipeline, recomputed": skewed(2, steps=20, activation_checkpoint=FULL)},
    ),
)
def test_it_does_so_in_the_same_numbers_in_every_layout(
    config: Config, balanced: list[dict], tmp_path: Path
) -> None:
    for mine, right in zip(trained(config, tmp_path), balanced, strict=False):
        assert mine["dropped"] == 0
        for key in KEYS:  # a token or two of 1024 choices may go elsewhere by rounding
            assert mine[key] == pytest.approx(right[key], abs=0.02), (mine["step"], key)


@pytest.mark.slow
def test_without_balance_it_gets_worse(tmp_path: Path) -> None:
    busiest = [record["busiest_expert"] for record in trained(skewed(rate=0.0, steps=90), tmp_path)]
    assert sum(busiest[-10:]) / 10 > 1.8


# --- faults ---------------------------------------------------------------------------------------


def train_counting_twice(config: Config, worker: Worker) -> Any:
    """As if a recomputed forward counted."""
    expert_balance.in_backward = lambda: False
    return train(config, worker)


def test_tokens_that_are_counted_twice_are_seen_as_dropped(tmp_path: Path) -> None:
    config = skewed(steps=2, activation_checkpoint=FULL)
    run_world(train_counting_twice, config, tmp_path)
    assert [record["dropped"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [-1, -1]


def verify_with_one_rank_behind(config: Config, worker: Worker) -> Any:
    if worker.rank == 1:
        RoutedFeedForward.balance = lambda self, counts, skip=None: None
    return verify(config, worker)


def verify_with_counts_of_each_rank(config: Config, worker: Worker) -> Any:
    update = ExpertBalance.update

    def alone(balance: ExpertBalance, skip: Tensor | None = None) -> None:
        balance._mesh = replace(balance._mesh, dp=1)
        update(balance, skip)

    ExpertBalance.update = alone
    return verify(config, worker)


@pytest.mark.parametrize(
    "fault", [verify_with_one_rank_behind, *slow(verify_with_counts_of_each_rank)]
)
def test_ranks_that_come_apart_are_found_by_verify(fault: Any, tmp_path: Path) -> None:
    config = mixture(dp=2, args={"layers": 2})
    assert {result["exit_code"] for result in run_world(fault, config, tmp_path)} == {1}
    assert re.search(r"buffer .*moe\.bias.* DIFFERS", (tmp_path / "rank0.out").read_text())


# --- a step that is not applied, and a run that moves ----------------------------------------------


def test_a_step_that_is_not_applied_moves_no_balance(tmp_path: Path) -> None:
    ((first, second, third),) = run_world(three_steps, mixture(args={"layers": 2}), tmp_path)
    assert {"layers.0.moe.bias", "layers.1.moe.load"} <= first.keys()
    for name in first:
        assert first[name].abs().max() > 0
        assert torch.equal(first[name], second[name])
        assert not torch.equal(second[name], third[name])
        if name.endswith("bias"):
            assert first[name].sum().abs() < 1e-7 and first[name].abs().max() < 0.02


@pytest.mark.slow
def test_a_run_that_moves_keeps_its_balance(tmp_path: Path) -> None:
    """From a pipeline to FSDP to one process."""
    saving = {"checkpoint": Checkpoint(every=2), "lr": ConstantLr(warmup=0)}
    layouts = {2: (2, 1), 4: (1, 2), 6: (1, 1)}
    moved, truth = tmp_path / "moved", tmp_path / "truth"
    for steps, layout in layouts.items():
        run_world(train, mixture(*layout, args={"layers": 4}, steps=steps, **saving), moved)
    run_world(train, mixture(args={"layers": 4}, steps=6, **saving), truth)
    mine, right = (read_jsonl(folder / "metrics.jsonl") for folder in (moved, truth))
    assert len(mine) == len(right) == 6
    for row, expected in zip(mine, right, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert row["busiest_expert"] == pytest.approx(expected["busiest_expert"], abs=0.01)
    biases = [saved_biases(folder / "checkpoints" / "step-00000006") for folder in (moved, truth)]
    for mine, right in zip(*biases, strict=True):
        assert right.abs().max() > 0
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-6)


def saved_biases(checkpoint: Path) -> list[Tensor]:
    state = {f"model.layers.{layer}.moe.bias": torch.zeros(8) for layer in range(4)}
    dcp.load(state, checkpoint_id=checkpoint)
    return [*state.values()]
