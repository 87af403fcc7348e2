"""Balance of experts: over the global batch, once a step, the same in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from support.cells import cells
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
    Model,
)
from titanlike.data.loader import batches, open_data
from titanlike.launch.worker import Worker
from titanlike.metrics.sinks import read_jsonl
from titanlike.models.moe import Moe, RoutedFeedForward
from titanlike.models.registry import initial_weights_of, resolve_model
from titanlike.parallel.expert_balance import ExpertBalance
from titanlike.parallel.initialize import initialize
from titanlike.parallel.mesh import close_mesh, open_mesh
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


LAYOUTS = {"parts of the sequence": mixture(tp=2, args={"layers": 2})}
MORE_LAYOUTS = {
    "a pipeline of parts": mixture(2, tp=2, args=DEEPSEEK),
    "compiled, recomputed": mixture(
        2, 1, "zbvzerobubble", compile=True, activation_checkpoint=FULL, args={"layers": 4}
    ),
    "sizes that no grouped product takes": mixture(
        dp=2, args={"expert_dim": 30, "dim": 40, "experts": 5, "layers": 2}
    ),
}


@pytest.mark.parametrize("config", cells(LAYOUTS, MORE_LAYOUTS))
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


@pytest.mark.slow
def test_on_skewed_text_the_busiest_expert_comes_near_the_mean_in_every_layout(
    tmp_path: Path,
) -> None:
    balanced = trained(skewed(), tmp_path / "balanced")
    busiest = [record["busiest_expert"] for record in balanced]
    assert busiest[0] > 1.4
    assert sum(busiest[-10:]) / 10 < 1.2
    unbalanced = trained(skewed(rate=0.0, steps=90), tmp_path / "unbalanced")
    assert sum(record["busiest_expert"] for record in unbalanced[-10:]) / 10 > 1.8
    divided = trained(skewed(dp=2, tp=2, steps=20), tmp_path / "divided")
    for mine, right in zip(divided, balanced, strict=False):
        assert mine["dropped"] == right["dropped"] == 0
        for key in ("loss", "busiest_expert", "idlest_expert"):
            # a token or two of 1024 choices may go elsewhere by rounding
            assert mine[key] == pytest.approx(right[key], abs=0.02), (mine["step"], key)


# --- a step that is not applied, and a run that moves ----------------------------------------------


@pytest.fixture(scope="module")
def recomputed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], list[Tensor]]:
    """After each of three steps of a recomputed mixture its buffers, and `ExpertBalance.loads`."""
    config = mixture(args={"layers": 2}, activation_checkpoint=FULL)
    folder = tmp_path_factory.mktemp("steps")
    [(buffers, loads)] = run_world(three_steps_and_loads, config, folder)
    return buffers, loads


def three_steps_and_loads(config: Config, worker: Worker) -> tuple[list[dict], list[Tensor]]:
    loads: list[Tensor] = []
    update = ExpertBalance.update

    def kept(balance: ExpertBalance, skip: Tensor | None = None) -> None:
        update(balance, skip)
        loads.append(balance.loads)

    ExpertBalance.update = kept
    return three_steps(config, worker), loads


def test_a_recomputed_block_counts_its_tokens_once(recomputed: tuple) -> None:
    """Else the metric `dropped` is -1: twice as many choices were computed as made."""
    _, loads = recomputed
    for busiest, idlest, dropped in loads:
        assert dropped == 0 and busiest > 1 > -idlest >= 0


def test_a_step_that_is_not_applied_moves_no_balance(recomputed: tuple) -> None:
    (first, second, third), _ = recomputed
    assert {"layers.0.moe.bias", "layers.1.moe.load"} <= first.keys()
    for name in first:
        assert first[name].abs().max() > 0
        assert torch.equal(first[name], second[name])
        assert not torch.equal(second[name], third[name])
        if name.endswith("bias"):
            bias, load = first[name], first[name.replace("bias", "load")]
            assert bias.sum().abs() < 1e-7 and bias.abs().max() < 0.02
            assert (bias * (load - load.mean())).sum() < 0  # the busy ones are chosen less


@pytest.mark.slow
def test_a_run_that_moves_keeps_its_balance(tmp_path: Path) -> None:
    """From a pipeline to FSDP, beside one process."""
    saving = {"checkpoint": Checkpoint(every=2), "lr": ConstantLr(warmup=0)}
    layouts = {2: (2, 1), 4: (1, 2)}
    moved, truth = tmp_path / "moved", tmp_path / "truth"
    for steps, layout in layouts.items():
        run_world(train, mixture(*layout, args={"layers": 4}, steps=steps, **saving), moved)
    run_world(train, mixture(args={"layers": 4}, steps=4, **saving), truth)
    mine, right = (read_jsonl(folder / "metrics.jsonl") for folder in (moved, truth))
    assert len(mine) == len(right) == 4
    for row, expected in zip(mine, right, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert row["busiest_expert"] == pytest.approx(expected["busiest_expert"], abs=0.01)
    biases = [saved_biases(folder / "checkpoints" / "step-00000004") for folder in (moved, truth)]
    for mine, right in zip(*biases, strict=True):
        assert right.abs().max() > 0
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-6)


def saved_biases(checkpoint: Path) -> list[Tensor]:
    state = {f"model.layers.{layer}.moe.bias": torch.zeros(8) for layer in range(4)}
    dcp.load(state, checkpoint_id=checkpoint)
    return [*state.values()]
