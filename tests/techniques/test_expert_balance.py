"""Experts: their balance over the global batch, once a step, the same in every layout; and ep,
which gives each rank a part of every layer's experts."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from support.cells import cells, slow
from support.counted_calls import CountedCalls
from support.families import hf, moe
from support.models import tiny
from support.opened import opened
from support.proven import assert_proven
from support.samples import VOCAB, Phrases
from support.skipped_step import three_steps
from support.sources import of_source
from support.world import run_world
from titanlike.core.config.groups.computation import (
    ActivationCheckpoint,
    Fsdp,
    Numerics,
    Precision,
    SelectiveActivationCheckpoint,
)
from titanlike.core.config.groups.optimization import ConstantLr
from titanlike.core.config.groups.pipeline import LoopedZeroBubbleSchedule, Schedule
from titanlike.core.config.groups.user_code import Custom, Model
from titanlike.core.config.optimizers.adamw import AdamW
from titanlike.core.config.optimizers.muon import Muon
from titanlike.core.config.schema import Config
from titanlike.core.config.validate import problems
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
from titanlike.core.training.preflight import preflight
from titanlike.core.training.train_plan import make_plan
from titanlike.planning.estimate import make_estimate
from titanlike.planning.known_hardware import shipped
from titanlike.techniques.mixture import expert_exchange
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


@pytest.mark.parametrize("config", cells(LAYOUTS, MORE_LAYOUTS))
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


@pytest.mark.slow
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


# --- ep: a rank has a part of the experts
# ----------------------------------------------------------


def of(model: Any, **layout: Any) -> Config:
    return tiny(model=model, batch_size=8, seq_len=16, steps=3, **layout)


MOE = moe(n_shared_experts=1, balance_loss=0.01, z_loss=0.001)
MANY = moe(num_local_experts=8, n_shared_experts=1, balance_loss=0.01, z_loss=0.001)
MIXTRAL = hf("mixtral", num_hidden_layers=2)
# experts are whole, and activations, too
MIXTRAL_PLAN = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.[qkv]_proj": {"colwise": 8},
    "model.layers.*.self_attn.o_proj": "rowwise",
    "lm_head": "vocab",
}
# ranks have other tokens, other experts and other shards of them
EXCHANGED = {
    "moe": of(MOE, dp=2, cp=2, ep=2, fsdp=Fsdp(2)),
    # those of tp have other experts; with and without other tokens
    "over tp": of(MOE, tp=2, ep=2),
    "over tp, whole sequences": of(MOE, tp=2, ep=2, tp_sequence=False),
}
MORE_EXCHANGED = {
    "over dp and tp, ZeRO 3": of(MANY, dp=4, tp=2, ep=4, fsdp=Fsdp(3)),
    "over dp and tp, in replicas": of(MANY, dp=4, tp=2, replicate=2, ep=4, fsdp=Fsdp(2)),
    "over dp and tp, a pipeline": of(MANY, pp=2, dp=2, tp=2, ep=4, schedule="zbh1"),
    "over dp and tp, muon": of(MANY, dp=2, tp=2, ep=4, optimizer=Muon()),
    "zbv": of(
        moe(num_hidden_layers=4, n_shared_experts=1),
        **{"pp": 2, "dp": 2, "ep": 2, "schedule": "zbvzerobubble"},
    ),
    "over cp and tp": of(MANY, cp=2, tp=2, ep=4),
    "over dp, cp and tp": of(MANY, dp=2, cp=2, tp=2, ep=8),
    "over four of tp": of(MANY, tp=4, ep=4),
    "over tp, sequences of other lengths": of(
        MOE, tp=2, ep=2, data=Custom("support.samples.phrases", {})
    ),
    "over tp, hf mixtral": of(replace(MIXTRAL, tp_plan=MIXTRAL_PLAN), dp=2, tp=2, ep=4),
    "hf mixtral": of(hf("mixtral", num_hidden_layers=2), dp=2, cp=2, ep=4),
    "hf mixtral, compiled, recomputed": of(
        hf("mixtral", num_hidden_layers=2), dp=2, ep=2, compile=True, **FULL
    ),
    "hf qwen3 moe": of(hf("qwen3_moe", num_hidden_layers=2), dp=4, ep=2, fsdp=Fsdp(3)),
}


LAST_EXCHANGED = {"over dp and tp, compiled": of(MANY, dp=2, tp=2, ep=4, compile=True, **FULL)}


@pytest.mark.parametrize("config", cells(EXCHANGED, MORE_EXCHANGED, LAST_EXCHANGED))
def test_a_mixture_trains_as_one_process_does(config: Config, tmp_path: Path) -> None:
    assert preflight(config) == []
    assert_proven(config, tmp_path, timeout=300)


def exchanges_of_a_step(config: Config, worker: Worker) -> tuple[int, list[str]]:
    """How often a rank exchanges with all others; what there is to say of its compiled blocks."""
    calls: list[Any] = []
    exchange, compiled = dist.all_to_all_single, torch.compile

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return exchange(*args, **kwargs)

    torch.compile = partial(compiled, backend="aot_eager")  # the graph's last stage takes long
    try:
        with opened(config, worker) as job:
            job.train()
            dist.all_to_all_single = counting
            job.train()
            return len(calls), job.run.compiled.notes if job.run.compiled else []
    finally:
        dist.all_to_all_single, torch.compile = exchange, compiled
        torch._dynamo.reset()


@pytest.mark.parametrize(
    "changes, of_a_layer",
    [
        # how many tokens go, to which experts, tokens, weights, results; gradients of these three
        ({}, 8),
        ({"activation_checkpoint": SelectiveActivationCheckpoint()}, 8),
        ({"activation_checkpoint": SelectiveActivationCheckpoint(), "compile": True}, 8),
        ({**FULL, "compile": True}, 10),  # tokens and weights once more
    ],
    ids=["kept", "selective", "selective, compiled", "full, compiled"],
)
def test_expert_parallel_blocks_compile_to_one_graph_with_one_all_to_all(
    changes: dict[str, Any], of_a_layer: int, tmp_path: Path
) -> None:
    """Recomputed selectively they repeat no exchange, and none waits for how many tokens come."""
    config = of(moe(), dp=2, ep=2, **changes)
    layers = config.model.args["num_hidden_layers"] * make_plan(config).microbatches
    found = run_world(exchanges_of_a_step, config, tmp_path, timeout=180)  # it compiles
    assert found == [(of_a_layer * layers, [])] * 2


class Order(TorchDispatchMode):
    """Names of a step's operators that begin an exchange, wait for it, or multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.split("::")[1]
        of_weights = name in EXCHANGES and args[0].shape[-1] == 4  # of experts: for four a token
        if name in ("mm", "expert_linear", *EXCHANGES) or name.endswith("route_tokens"):
            self.names += [] if of_weights else [name]
        return function(*args, **(kwargs or {}))


BEGINS, ARRIVES = ("send_tokens", "begin_return"), ("arrived", "sum_copies", "wait_tensor")
EXCHANGES = BEGINS + ARRIVES


def order_of_a_step(config: Config, worker: Worker) -> tuple[list[str], set[bool]]:
    """(operators, whether exchanges of tokens only begin, but for the results')."""
    exchange, only_begin = dist.all_to_all_single, set()

    def noted(out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.is_floating_point():
            only_begin.add(kwargs.get("async_op", False))
        return exchange(out, x, *args, **kwargs)

    warnings.filterwarnings("error", "FSDP2-wrapped module .* returned a view")
    patched = mock.patch.object(dist, "all_to_all_single", noted)
    with opened(config, worker) as job, patched, Order() as order:
        job.train()
    return order.names, only_begin


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *slow(
            {"numerics": Numerics("exact", grain=4)},
            {"schedule": LoopedZeroBubbleSchedule(microbatches=2)},
            FULL,
        ),
    ],
    ids=["copies of tokens", "numerics=exact", "weight gradients later", "recomputed"],
)
def test_a_shared_expert_is_computed_while_tokens_travel(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """And its gradient while theirs come back: three products, and then of their inputs alone, or
    of weights, too."""
    model = moe(num_hidden_layers=1, n_shared_experts=1, num_experts_per_tok=4)
    config = of(model, dp=2, ep=2, fsdp=Fsdp(1), **changes)
    for names, only_begin in run_world(order_of_a_step, config, tmp_path):
        assert only_begin == {True}
        meanwhile = Counter[tuple[str, int]]()
        for at, name in enumerate(names):
            if name in BEGINS:
                end = next(i for i in range(at, len(names)) if names[i] in ARRIVES)
                between = names[at + 1 : end]
                if names[at - 1].endswith("route_tokens"):
                    assert between.pop(0).endswith("away_route_tokens")
                assert {*between} <= {"mm"}
                meanwhile[name, len(between)] += 1
        microbatches = meanwhile["begin_return", 3 if "schedule" in changes else 6]
        assert microbatches and meanwhile == {
            ("send_tokens", 3): microbatches * (1 + ("activation_checkpoint" in changes)),
            ("send_tokens", 0): microbatches,  # gradients of results
            ("begin_return", 3 if "schedule" in changes else 6): microbatches,
        }


def queued_at_waits(config: Config, worker: Worker) -> list[int]:
    """Of each wait of the host for how many tokens come: operators that were queued behind what it
    waits for."""
    found: list[int] = []

    def noted(x: Tensor) -> Any:
        queued = CountedCalls()
        queued.__enter__()

        def wait() -> Tensor:
            queued.__exit__(None, None, None)
            found.append(queued.calls.total())
            return x

        return wait

    patched = mock.patch.object(expert_exchange, "to_host", noted)
    with opened(config, worker) as job, patched:
        job.train()
    return found


def test_the_host_waits_once_a_layer_behind_work_for_the_device(tmp_path: Path) -> None:
    """Once a microbatch, not in the recomputation; the rest of the route is made while tokens
    travel."""
    # a copy of a token for each rank, and one for each expert
    for experts_per_token, queued in {4: 8, 1: 4}.items():
        config = of(moe(num_experts_per_tok=experts_per_token), dp=2, ep=2, **FULL)
        waits = 2 * make_plan(config).microbatches
        for found in run_world(queued_at_waits, config, tmp_path / str(queued)):
            assert len(found) == waits and min(found) > queued


def casts_of_experts(config: Config, worker: Worker) -> int:
    """How often a rank casts a matrix of all its experts to bf16 in a step."""
    experts = config.model.args["num_local_experts"] // config.ep
    with opened(config, worker) as job, CountedCalls() as counted:
        job.train()
    sizes = experts * 32 * 32
    return sum(
        number
        for call, number in counted.calls.items()
        if call.written[0] == torch.bfloat16 and torch.float32 in call.read
        for shape in call.shapes
        if shape.numel() == sizes
    )


@pytest.mark.parametrize("zero", [2, 3])
def test_experts_that_are_whole_on_a_rank_are_cast_once_a_step(zero: int, tmp_path: Path) -> None:
    """Not once a microbatch and direction, with ZeRO 3; and so they are planned."""
    schedule = Schedule("1f1b", 4)
    layout = {"dp": 2, "ep": 2, "precision": Precision("bf16"), "schedule": schedule}
    config = of(moe(num_local_experts=4), fsdp=Fsdp(zero), **layout)
    assert run_world(casts_of_experts, config, tmp_path) == [2 * 3] * 2  # layers x matrices


def tokens_sent(config: Config, worker: Worker) -> int:
    """Bytes of tokens, results and their gradients that a rank sends in a step, itself included."""
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def counting(out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        of_experts = kwargs["group"].group_name == job.mesh.expert_group.group_name
        sent.append(x.nbytes if of_experts and x.is_floating_point() else 0)
        return exchange(out, x, *args, **kwargs)

    with opened(config, worker) as job, mock.patch.object(dist, "all_to_all_single", counting):
        job.train()
    return sum(sent)


def test_a_token_is_sent_once_to_each_rank_of_its_experts(tmp_path: Path) -> None:
    """Not one for each of its four experts, as with numerics=exact; and so it is planned."""
    config = of(moe(num_local_experts=8, num_experts_per_tok=4), dp=2, ep=2, fsdp=Fsdp(1))
    exact = replace(config, numerics=Numerics("exact", grain=4))
    copies, of_experts = (
        sum(run_world(tokens_sent, each, tmp_path / each.numerics.name)) for each in (config, exact)
    )
    estimate = make_estimate(config, shipped("cpu"))
    # there and back, their gradients, too; two layers; 8 x 16 tokens
    assert of_experts == 4 * 2 * 8 * 16 * 4 * 32 * 4
    assert 0.4 < copies / of_experts < 0.6
    assert 2 * estimate.traffic(0)["ep"] == pytest.approx(copies / 2, rel=0.15)


def rows_of_exchanges(config: Config, worker: Worker) -> tuple[set[int], list[str]]:
    """Elements of the rows that a rank sends of tokens, weights and gradients; the calls whose
    results have tokens and weights in a row."""
    sent: set[int] = set()
    exchange = dist.all_to_all_single

    def noted(out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.update(x.shape[1:] if x.is_floating_point() else ())
        return exchange(out, x, *args, **kwargs)

    patched = mock.patch.object(dist, "all_to_all_single", noted)
    with opened(config, worker) as job, patched, CountedCalls() as counted:
        job.train()
    both = 32 + config.model.args["num_experts_per_tok"]
    shapes = ((call.name, shape) for call in counted.calls for shape in call.shapes)
    return sent, [name for name, shape in shapes if len(shape) > 1 and shape[-1] == both]


def test_tokens_travel_beside_their_weights(tmp_path: Path) -> None:
    """In rows of their own, which no operator copies apart or adds up again."""
    config = of(moe(num_local_experts=8, num_experts_per_tok=3), dp=2, ep=2)
    for sent, joined in run_world(rows_of_exchanges, config, tmp_path):
        assert sent == {32, 3} and not joined


@pytest.mark.parametrize(
    "layout, model, reason, fix",
    [
        ({"dp": 2, "ep": 4}, MOE, "does not divide the ranks that share weights, dp = 2", "ep=2"),
        ({"dp": 3, "ep": 3}, MOE, "does not divide the 4 experts of a layer", "ep=1"),
        (
            {"dp": 2, "tp": 2, "ep": 3},
            MOE,
            "dp = 2, nor is it tp=2 times a divisor of them",
            "ep=2",
        ),
        ({"dp": 3, "tp": 2, "ep": 7}, MANY, "dp = 3, nor is it tp=2 times a divisor", "ep=6"),
        ({"dp": 4, "tp": 4, "ep": 16}, MANY, "does not divide the 8 experts of a layer", "ep=8"),
        ({"tp": 4, "ep": 2}, MOE, "nor is it tp=4 times a divisor of them", "ep=1"),
        ({"dp": 2, "ep": 2}, tiny().model, "the model has no experts", "ep=1"),
    ],
)
def test_experts_that_cannot_be_sharded_are_refused(
    layout: dict[str, int], model: Any, reason: str, fix: str
) -> None:
    config = replace(of(model, **layout), batch_size=12)
    found = problems(config, config.world_size) or preflight(config)
    [problem] = [one for one in found if one.key == "ep"]
    assert (problem.value, problem.fix) == (layout["ep"], fix)
    assert reason in problem.reason


def test_each_rank_holds_its_share_of_the_experts() -> None:
    whole, divided = (
        sum(make_plan(of(MOE, dp=4, ep=ep)).stage_parameters[0].values()) for ep in (1, 4)
    )
    experts = 2 * 3 * 4 * 32 * 32
    assert whole - divided == experts * 3 // 4
