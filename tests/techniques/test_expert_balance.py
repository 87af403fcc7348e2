"""Experts: their balance over the global batch, once a step, the same in every layout; and ep,
which gives each rank a part of every layer's experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.cells import cells
from support.counted_calls import CountedCalls
from support.models import tiny
from support.opened import opened
from support.proven import assert_proven
from support.samples import VOCAB, Phrases
from support.skipped_step import three_steps
from support.sources import of_source
from support.world import run_world
from titanlike.core.config.groups.computation import (
    ActivationCheckpoint,
)
from titanlike.core.config.groups.optimization import ConstantLr
from titanlike.core.config.groups.user_code import Custom, Model
from titanlike.core.config.optimizers.adamw import AdamW
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.registry import open_data
from titanlike.core.data.sources import IGNORE, Data
from titanlike.core.distributed.initialize import initialize
from titanlike.core.distributed.mesh import one_process
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.core.models.registry import initial_weights_of, resolve_model
from titanlike.core.optim.optimizer import build_optimizers
from titanlike.core.training.loop import train
from titanlike.techniques.mixture.expert_parallel import ExpertBalance
from titanlike.techniques.mixture.moe import Moe, RoutedMLP, Routing

WORDS = 256


class Zipf(Sequence):
    """Samples of words of which the n-th has a probability of 1 / (10 + n), up to a factor; every
    second one follows from the one before."""

    def __init__(self, seq_len: int, stream: int):
        self._length, self._stream = seq_len + 1, stream
        self._odds = 1 / (10 + torch.arange(1, WORDS + 1))

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(2 * sample + self._stream)
        ids = torch.multinomial(self._odds, self._length, replacement=True, generator=generator)
        ids[1::2] = (WORDS - 1 - ids[: len(ids[1::2]) * 2 : 2]) % WORDS
        return {"inputs": ids[:-1], "targets": ids[1:]}


def zipf(seq_len: int) -> Data:
    return Data(Zipf(seq_len, 0), Zipf(seq_len, 1), WORDS, "words by Zipf")


SIZES = {
    "vocab_size": None,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "moe_intermediate_size": 32,
}
ALL = {"num_hidden_layers": 2, "bias_rate": 0.01, "balance_loss": 0.02, "z_loss": 0.01}
DEEPSEEK = {
    "scoring_func": "sigmoid",
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}
DEEPSEEK |= {"first_k_dense_replace": 1, "qk_norm": True, "head_dim": 16, "num_hidden_layers": 4}
FULL = {"activation_checkpoint": ActivationCheckpoint("full")}


def mixture(pp: int = 1, dp: int = 1, schedule: Any = "1f1b", **changes: Any) -> Config:
    model = Model("moe", {**SIZES, **ALL, **changes.pop("args", {})})
    return tiny(pp=pp, dp=dp, schedule=schedule, model=model, **changes)


LAYOUTS = {"parts of the sequence": mixture(tp=2)}
MORE_LAYOUTS = {
    "a pipeline of parts": mixture(2, tp=2, args=DEEPSEEK),
    "compiled, recomputed": mixture(
        2, 1, "zbvzerobubble", compile=True, args={"num_hidden_layers": 4}, **FULL
    ),
    "sizes that no grouped product takes": mixture(
        dp=2, args={"moe_intermediate_size": 30, "hidden_size": 40, "num_local_experts": 5}
    ),
}


@pytest.mark.parametrize("config", cells(LAYOUTS, {}, MORE_LAYOUTS))
def test_every_layout_trains_and_balances_as_one_process(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path, timeout=300)


# --- what the losses are --------------------------------------------------------------------------


class Padded(Sequence):
    """Phrases of 1 to seq_len tokens, filled up with one of 0 without targets."""

    def __init__(self, seq_len: int, part: int) -> None:
        self._phrases, self._length = Phrases(seq_len, part, 500), seq_len

    def __len__(self) -> int:
        return len(self._phrases)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        sample = self._phrases[i]
        missing = self._length - len(sample["inputs"])
        fills = {"inputs": 0, "targets": IGNORE}
        return {n: nn.functional.pad(x, (0, missing), value=fills[n]) for n, x in sample.items()}


def padded(seq_len: int) -> Data:
    return Data(Padded(seq_len, 0), Padded(seq_len, 1), VOCAB, "padded phrases")


class Written:
    """The losses of a step, written down: what each router gives, and what is chosen of it."""

    def __init__(self, model: Moe) -> None:
        self.logits: dict[nn.Module, Tensor] = {}
        self.layers = [m for m in model.modules() if isinstance(m, RoutedMLP)]
        for layer in self.layers:
            layer.gate.register_forward_hook(lambda m, _, out: self.logits.update({m: out}))

    def loss(self, load: list[Tensor], real: Tensor) -> Tensor:
        """load: of each layer, the share of tokens of each expert in the step before; real: [N]."""
        total = torch.zeros(())
        for layer, shares in zip(self.layers, load, strict=True):
            logits = self.logits[layer.gate][real]
            probabilities = logits.softmax(-1).mean(0)
            total += 0.02 * len(shares) * (shares * probabilities).sum()
            total += 0.01 * logits.logsumexp(-1).square().mean()
        return total

    def counts(self, real: Tensor) -> list[Tensor]:
        scores = [self.logits[m.gate][real].softmax(-1) + m.bias for m in self.layers]
        return [each.topk(2).indices.flatten().bincount(minlength=8) for each in scores]


def gradients_of_two_steps(config: Config, worker: Worker) -> list[dict[str, Any]]:
    """Gradients of this rank's parameters, and the busiest and idlest expert."""
    found: list[dict[str, Any]] = []
    with opened(config, worker) as job:

        def keep() -> None:
            found.append({name: whole(p.grad) for name, p in job.parameters()})

        for step in (1, 2):
            record = job.step(step, before_update=keep).record
            found[-1]["loads"] = [record[n] for n in ("busiest_expert", "idlest_expert", "dropped")]
    return found


def whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def losses(pp: int = 1, dp: int = 1, data: str = "support.samples.phrases", **more: Any) -> Config:
    settings = {"lr": ConstantLr(warmup=0), "optimizer": AdamW(clip=None)}
    return mixture(pp, dp, data=Custom(data), **settings | more)


OWN = f"{__name__}.padded"
BALANCED = {"lengths, dp and recomputed": losses(dp=2, **FULL)}
MORE_BALANCED = {
    "no padding": mixture(2, 2, lr=ConstantLr(warmup=0), optimizer=AdamW(clip=None)),
    "filled up": losses(data=OWN),
    "filled up, a pipeline": losses(2, 2, OWN, **FULL),
    "filled up, recomputed with all microbatches between": losses(
        2, 1, OWN, schedule="gpipe", **FULL
    ),
    "lengths, a pipeline that defers": losses(
        2, 1, schedule="zbvzerobubble", args={"num_hidden_layers": 4}, **FULL
    ),
    "filled up, parts of the sequence": losses(dp=2, data=OWN, tp=2),
    "lengths, parts of the sequence": losses(tp=2),
    "filled up, cp": losses(dp=2, data=OWN, cp=2),
    "lengths, cp": losses(cp=2),
    "filled up, ep": losses(dp=2, data=OWN, ep=2),
    "lengths, ep over tp": losses(tp=2, ep=2),
    "lengths, compiled": losses(dp=2, compile=True),
    "filled up, compiled and recomputed": losses(dp=2, data=OWN, compile=True, **FULL),
}


@pytest.mark.parametrize("config", cells(BALANCED, MORE_BALANCED))
def test_balance_losses_are_over_the_real_tokens_of_the_global_batch(
    config: Config, tmp_path: Path
) -> None:
    """Written down in plain torch, for two steps: gradients and loads."""
    ranks = run_world(gradients_of_two_steps, config, tmp_path, timeout=300)
    sizes = {"num_hidden_layers": config.model.args["num_hidden_layers"], "vocab_size": 64}
    model = Moe(**SIZES | sizes | {"bias_rate": 0.01})
    initialize(model, initial_weights_of(resolve_model(config), config.seed), torch.device("cpu"))
    parameters = dict(model.named_parameters())
    [optimizer] = build_optimizers(parameters, model, config)
    written, data = Written(model), open_data(config)
    stream = batches(data.train, replace(config, pp=1, dp=1), dp_rank=0)
    load = [torch.full((8,), 1 / 8) for _ in written.layers]
    for step in (0, 1):
        batch = next(stream)
        logits, targets = model(batch["inputs"]), batch["targets"].flatten()
        real = targets != IGNORE  # of these data, each real token has a target
        text = nn.functional.cross_entropy(logits.flatten(0, 1), targets)
        (text + written.loss(load, real)).backward()
        counts = written.counts(real)
        loads = [each / each.double().mean() for each in counts]
        right = [max(x.max() for x in loads), min(x.min() for x in loads), 0.0]
        for rank in ranks:
            assert rank[step].pop("loads") == pytest.approx([float(x) for x in right])
        for name, mine in (item for rank in ranks for item in rank[step].items()):
            whole_gradient = parameters[name].grad
            if mine.shape != whole_gradient.shape:
                continue  # a part of tp or ep: `test_every_layout_trains_and_balances...`
            wrong = (mine - whole_gradient).norm()
            assert wrong < 1e-4 * whole_gradient.norm(), (step, name)
        for layer, each in zip(written.layers, counts, strict=True):
            layer.balance(each)
        load = [each / each.sum() for each in counts]
        optimizer.step()
        optimizer.zero_grad()


class CallsItsExperts(RoutedMLP):
    """As somebody's own, which does not call `through_experts`: its experts count all rows."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # [N, D]
        weights, chosen = self.gate(tokens).softmax(-1).topk(2)  # [N, K]
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(8, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(order))
        results = self.experts(tokens[order // 2], counts)[order.argsort()]
        return (weights.unsqueeze(1) @ results.unflatten(0, (-1, 2))).view(x.shape)


class OwnMixture(Moe):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        for layer in self.modules():
            if isinstance(layer, RoutedMLP):
                layer.__class__ = CallsItsExperts


def test_an_own_mixture_that_computes_padding_drops_no_choices(tmp_path: Path) -> None:
    """`dropped` is not below 0 where more choices are computed than real tokens make."""
    own = Custom(f"{__name__}.OwnMixture", SIZES | ALL)
    config = replace(losses(data=OWN), model=own)
    [found] = run_world(gradients_of_two_steps, config, tmp_path)
    inputs = next(batches(open_data(config).train, config, dp_rank=0))["targets"]
    assert (inputs == IGNORE).sum() > 10, "there is padding"
    assert [step["loads"][2] for step in found] == [0, 0]


@pytest.mark.grid
def test_batches_with_padding_compile_nothing_more_in_a_step_or_a_validation(
    tmp_path: Path,
) -> None:
    model = Model("moe", {**SIZES, "num_hidden_layers": 1, "vocab_size": None})
    config = of_source("data=chat", tmp_path, model=model, compile=True)
    run_world(train, config, tmp_path / "run", timeout=300)
    [compiled] = [e for e in read_jsonl(tmp_path / "run/events.jsonl") if e["event"] == "compile"]
    assert compiled["step"] == 0


@pytest.mark.slow
def test_on_skewed_text_the_busiest_expert_comes_near_the_mean_in_every_layout(
    tmp_path: Path,
) -> None:
    def trained(name: str, steps: int, rate: float = 0.001, **layout: int) -> list[dict[str, Any]]:
        settings = {"data": Custom(f"{__name__}.zipf"), "seq_len": 32}
        settings |= {"lr": ConstantLr(warmup=0), "optimizer": AdamW(lr=1e-3), "steps": steps}
        model = Model("moe", {**SIZES, "num_hidden_layers": 2, "bias_rate": rate})
        run_world(train, tiny(model=model, **settings, **layout), tmp_path / name)
        return read_jsonl(tmp_path / name / "metrics.jsonl")

    def busiest(records: list[dict[str, Any]], last: int) -> float:
        return sum(record["busiest_expert"] for record in records[-last:]) / last

    # 1.4 for a while, when the routers begin to tell frequent tokens from rare ones
    balanced = trained("balanced", 150)
    assert busiest(balanced, 50) < 1.2
    assert busiest(trained("unbalanced", 90, rate=0.0), 10) > 1.8
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


def test_recomputation_counts_tokens_once(steps: tuple) -> None:
    """Else the metric `dropped` is -1: twice as many choices were computed as made."""
    _, loads = steps
    for busiest, idlest, dropped in loads:
        assert dropped == 0 and busiest > 1 > -idlest >= 0


def test_a_skipped_step_updates_no_balance(steps: tuple) -> None:
    (first, second, third), _ = steps
    assert {"model.layers.0.mlp.bias", "model.layers.1.mlp.load"} <= first.keys()
    for name in first:
        assert first[name].abs().max() > 0
        assert torch.equal(first[name], second[name])
        assert not torch.equal(second[name], third[name])
        if name.endswith("bias"):
            bias, load = first[name], first[name.replace("bias", "load")]
            assert bias.sum().abs() < 1e-7 and bias.abs().max() < 0.02
            assert (bias * (load - load.mean())).sum() < 0  # the busy ones are chosen less


# --- what it costs: as much for many layers as for two


class Layers(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        routing = Routing(2, "softmax", True, 1.0, 1, 1, 0.01, 0.02, 0.0)
        self.layers = nn.ModuleList(RoutedMLP(8, 4, 8, 0, routing) for _ in range(number))


def balanced(number: int, skip: float | None) -> tuple[nn.Module, list[Tensor], list[int]]:
    """Layers after a step in which each counted 4 x 8 choices; these counts, and how many calls
    begin the step and end it."""
    torch.manual_seed(0)
    stage = Layers(number)
    balance = ExpertBalance(one_process(torch.device("cpu")), lambda: False, lambda _: 1, None)
    balance.on_stage(0, stage, [])
    balance.on_weights(stage)
    given = [torch.randint(0, 16, (4,)) for _ in stage.layers]
    begins, ends = CountedCalls(), CountedCalls()
    with begins, balance.training(torch.tensor(16)):
        pass
    for layer, counts in zip(stage.layers, given, strict=True):
        vars(layer.experts)["tokens_of_step"].copy_(counts)
    with ends:
        balance.after_update(None if skip is None else torch.tensor(skip))
    return stage, given, [calls.calls.total() for calls in (begins, ends)]


@pytest.mark.parametrize("skip", [None, 0.0, 1.0])
def test_many_layers_are_balanced_in_as_many_calls_as_two(skip: float | None) -> None:
    """And each as alone."""
    (_, _, two), (stage, given, many) = balanced(2, skip), balanced(24, skip)
    assert two == many and two[0] < 5 and two[1] < 40, (two, many)
    torch.manual_seed(0)
    for layer, alone, counts in zip(stage.layers, Layers(24).layers, given, strict=True):
        alone.balance(counts, None if skip is None else torch.tensor(skip))
        assert torch.equal(layer.bias, alone.bias) and torch.equal(layer.load, alone.load)
        assert bool(layer.bias.any()) == (skip != 1)
