"""Experts: their balance over the global batch, once a step, the same in every layout; and ep, which
gives each rank a part of every layer's experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.cells import cells
from support.families import hf, moe
from support.models import tiny
from support.proven import assert_proven
from support.skipped_step import three_steps
from support.world import run_world
from titanlike.config.schema import (
    ActivationCheckpoint,
    AdamW,
    Config,
    ConstantLr,
    Custom,
    Fsdp,
    Model,
)
from titanlike.config.validate import problems
from titanlike.metrics.sinks import read_jsonl
from titanlike.models.moe import Moe, RoutedFeedForward
from titanlike.training.draft import draft, preflight
from titanlike.training.train import train

SIZES = {"vocab_size": None, "dim": 32, "heads": 4, "kv_heads": 2, "experts": 8, "expert_dim": 32}
ALL = {"layers": 2, "bias_rate": 0.01, "balance_loss": 0.02, "z_loss": 0.01}
DEEPSEEK = {"scores": "sigmoid", "groups": 4, "groups_chosen": 2, "shared_experts": 1, "scale": 2.5}
DEEPSEEK |= {"dense_layers": 1, "qk_norm": True, "head_dim": 16, "layers": 4}
FULL = {"activation_checkpoint": ActivationCheckpoint("full")}


def mixture(pp: int = 1, dp: int = 1, schedule: Any = "1f1b", **changes: Any) -> Config:
    model = Model("moe", {**SIZES, **ALL, **changes.pop("args", {})})
    return tiny(pp, dp, schedule, model=model, **changes)


LAYOUTS = {"parts of the sequence": mixture(tp=2)}
MORE_LAYOUTS = {
    "a pipeline of parts": mixture(2, tp=2, args=DEEPSEEK),
    "compiled, recomputed": mixture(
        2, 1, "zbvzerobubble", compile=True, args={"layers": 4}, **FULL
    ),
    "sizes that no grouped product takes": mixture(
        dp=2, args={"expert_dim": 30, "dim": 40, "experts": 5}
    ),
}


@pytest.mark.parametrize("config", cells(LAYOUTS, MORE_LAYOUTS))
def test_every_layout_trains_and_balances_as_one_process(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path, timeout=300)


# --- what the losses are --------------------------------------------------------------------------


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_losses_are_those_of_the_last_steps_load_written_in_plain_torch(scores: str) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (4, 17), generator=generator)
    loads = torch.rand(2, 8, generator=generator).softmax(-1)

    def gradients(written: bool) -> list[Tensor]:
        torch.manual_seed(0)
        losses = {} if written else {"balance_loss": 0.02, "z_loss": 0.01}
        model = Moe(**SIZES | {"layers": 2, "vocab_size": 64, "scores": scores} | losses)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        layers = [m for m in model.modules() if isinstance(m, RoutedFeedForward)]
        routed: list[Tensor] = []
        for layer, load in zip(layers, loads, strict=True):
            layer.router.register_forward_hook(lambda m, _, out: routed.append(out.flatten(0, -2)))
            if not written:
                layer.load.copy_(load)
        total = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        for logits, load in zip(routed, loads, strict=True) if written else ():
            odds = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
            mean = (odds / odds.sum(-1, keepdim=True)).mean(0)
            total = total + 0.02 * 8 * (load * mean).sum()
            total = total + 0.01 * logits.logsumexp(-1).square().mean()
        total.backward()
        return [parameter.grad for parameter in model.parameters()]

    for mine, right in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.slow
def test_on_skewed_text_the_busiest_expert_comes_near_the_mean_in_every_layout(
    tmp_path: Path,
) -> None:
    def trained(name: str, steps: int, rate: float = 0.001, **layout: int) -> list[dict[str, Any]]:
        settings = {"data": Custom("support.skewed.zipf"), "seq_len": 32}
        settings |= {"lr": ConstantLr(warmup=0), "optimizer": AdamW(lr=1e-3), "steps": steps}
        model = Model("moe", {**SIZES, "layers": 2, "bias_rate": rate})
        run_world(train, tiny(model=model, **settings, **layout), tmp_path / name)
        return read_jsonl(tmp_path / name / "metrics.jsonl")

    balanced = trained("balanced", 60)
    busiest = [record["busiest_expert"] for record in balanced]
    assert busiest[0] > 1.4
    assert sum(busiest[-10:]) / 10 < 1.2
    unbalanced = trained("unbalanced", 90, rate=0.0)
    assert sum(record["busiest_expert"] for record in unbalanced[-10:]) / 10 > 1.8
    for mine, right in zip(trained("divided", 20, dp=2, tp=2), balanced, strict=False):
        assert mine["dropped"] == right["dropped"] == 0
        for key in ("loss", "busiest_expert", "idlest_expert"):
            # a token or two of 1024 choices may go elsewhere by rounding
            assert mine[key] == pytest.approx(right[key], abs=0.02), (mine["step"], key)


# --- a step that is not applied -------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], list[Tensor]]:
    """What `three_steps` returns of a recomputed mixture."""
    return run_world(three_steps, mixture(**FULL), tmp_path_factory.mktemp("steps"))[0]


def test_a_recomputed_block_counts_its_tokens_once(steps: tuple) -> None:
    """Else the metric `dropped` is -1: twice as many choices were computed as made."""
    _, loads = steps
    for busiest, idlest, dropped in loads:
        assert dropped == 0 and busiest > 1 > -idlest >= 0


def test_a_step_that_is_not_applied_moves_no_balance(steps: tuple) -> None:
    (first, second, third), _ = steps
    assert {"layers.0.moe.bias", "layers.1.moe.load"} <= first.keys()
    for name in first:
        assert first[name].abs().max() > 0
        assert torch.equal(first[name], second[name])
        assert not torch.equal(second[name], third[name])
        if name.endswith("bias"):
            bias, load = first[name], first[name.replace("bias", "load")]
            assert bias.sum().abs() < 1e-7 and bias.abs().max() < 0.02
            assert (bias * (load - load.mean())).sum() < 0  # the busy ones are chosen less


# --- ep: a rank has a part of the experts ----------------------------------------------------------


def of(model: Any, **layout: Any) -> Config:
    return tiny(model=model, batch_size=8, seq_len=16, steps=3, **layout)


MOE = moe(shared_experts=1, balance_loss=0.01, z_loss=0.001)
# ranks have other tokens, other experts and other shards of them
EXCHANGED = {"moe": of(MOE, dp=2, cp=2, ep=2, fsdp=Fsdp(2))}
MORE_EXCHANGED = {
    "hf mixtral": of(hf("mixtral", num_hidden_layers=2), dp=2, cp=2, ep=4),
    "hf qwen3 moe": of(hf("qwen3_moe", num_hidden_layers=2), dp=4, ep=2, fsdp=Fsdp(3)),
}


@pytest.mark.parametrize("config", cells(EXCHANGED, MORE_EXCHANGED))
def test_a_mixture_trains_as_one_process_does(config: Config, tmp_path: Path) -> None:
    assert preflight(config) == []
    assert_proven(config, tmp_path)


@pytest.mark.parametrize(
    "layout, model, reason, fix",
    [
        ({"dp": 2, "ep": 4}, MOE, "does not divide the ranks that share weights, dp = 2", "ep=2"),
        ({"dp": 3, "ep": 3}, MOE, "does not divide the 4 experts of a layer", "ep=1"),
        ({"dp": 2, "ep": 2}, tiny().model, "the model has no experts", "ep=1"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    layout: dict[str, int], model: Any, reason: str, fix: str
) -> None:
    config = replace(of(model, **layout), batch_size=12)
    found = problems(config, config.world_size) or preflight(config)
    [problem] = [one for one in found if one.key == "ep"]
    assert (problem.value, problem.fix) == (layout["ep"], fix)
    assert reason in problem.reason


def test_a_rank_has_a_part_of_the_experts() -> None:
    whole, divided = (
        sum(draft(of(MOE, dp=4, ep=ep)).stage_parameters[0].values()) for ep in (1, 4)
    )
    experts = 2 * 3 * 4 * 32 * 32
    assert whole - divided == experts * 3 // 4
