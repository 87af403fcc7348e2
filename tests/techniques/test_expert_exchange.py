"""Experts over the ranks of `ep`: tokens travel to them and back, and all trains as one process does."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from support.cells import cells, slow
from support.counted_calls import CountedCalls
from support.families import hf, moe
from support.models import tiny
from support.opened import opened
from support.proven import assert_proven
from support.world import run_world
from titanlike.core.config.groups.computation import (
    ActivationCheckpoint,
    Fsdp,
    Numerics,
    Precision,
    SelectiveActivationCheckpoint,
)
from titanlike.core.config.groups.pipeline import LoopedZeroBubbleSchedule, Schedule
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.optimizers.muon import Muon
from titanlike.core.config.schema import Config
from titanlike.core.config.validate import problems
from titanlike.core.launch.worker import Worker
from titanlike.core.training.preflight import preflight
from titanlike.core.training.train_plan import make_plan
from titanlike.planning.estimate import make_estimate
from titanlike.planning.known_hardware import shipped
from titanlike.techniques.mixture import expert_exchange

FULL = {"activation_checkpoint": ActivationCheckpoint("full")}


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


@pytest.mark.parametrize("config", cells(EXCHANGED, MORE_EXCHANGED, LAST_EXCHANGED, most=1))
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
        *slow(({**FULL, "compile": True}, 10)),  # tokens and weights once more
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
