"""Weights in float8 are cast once a step, whatever gathers and recomputes them; a layer that tp divides
rounds as the full one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.cells import cells, slow
from support.families import moe
from support.models import tiny
from support.records import numbers
from support.world import run_world
from support.wrong_plans import PLAN
from titanlike.core.config.groups.computation import (
    ActivationCheckpoint,
    Float8Precision,
    Fsdp,
)
from titanlike.core.config.groups.jobs import Validation
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.schema import Config
from titanlike.core.distributed.collectives import GroupInfo
from titanlike.core.distributed.mesh import open_mesh
from titanlike.core.distributed.placement import DIVIDED
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.core.models.llama import rotary_table
from titanlike.core.models.registry import build_model, resolve_model
from titanlike.core.training.loop import train
from titanlike.core.training.train_plan import make_plan
from titanlike.techniques.low_precision import float8
from titanlike.techniques.low_precision.float8_linear import cast_weights
from titanlike.techniques.tp import gathered

FLOAT8 = Float8Precision(min_features=16)

FULL = ActivationCheckpoint("full")
ONCE = {"zero 3, recomputed": tiny(dp=2, fsdp=Fsdp(3), activation_checkpoint=FULL, layers=2)}
ONCE_TOO = {
    "one process": tiny(layers=2),
    "zero 2": tiny(dp=2, fsdp=Fsdp(2), layers=2),
    "replicas": tiny(dp=2, replicate=2, layers=2),
    "hsdp, tp": tiny(dp=4, replicate=2, tp=2, layers=2),
    "zbv": tiny(pp=2, dp=2, schedule="zbvzerobubble", layers=4),
}
LAYERS = 7  # of a block


@pytest.mark.parametrize("config", cells(ONCE, ONCE_TOO))
def test_a_weight_is_cast_once_a_step(config: Config, tmp_path: Path) -> None:
    """However many microbatches go forward and backward."""
    seen = run_world(counting_casts, config_of_casts(config), tmp_path, True)
    assert seen == [2 * 2 * LAYERS] * config.world_size  # 2 steps, and 2 blocks on each rank


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("config", cells({}, ONCE | ONCE_TOO))
def test_casting_weights_once_gives_the_losses_of_casting_in_each_matmul(
    config: Config, recipe: str, tmp_path: Path
) -> None:
    config = config_of_casts(config, recipe)
    counts = [
        run_world(counting_casts, config, tmp_path / name, name == "once")
        for name in ("once", "each")
    ]
    whole = config.dp == config.replicate
    assert (counts[0][0] < counts[1][0] / 3) == (whole or recipe == "tensorwise")
    assert numbers(tmp_path / "once") == numbers(tmp_path / "each")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_layer_with_a_cast_weight_compiles_with_and_without_gradients(recipe: str) -> None:
    """As in training and in validation: one that does not would leave its block uncompiled."""
    config = tiny(layers=1, precision=replace(FLOAT8, recipe=recipe))
    model = build_model(resolve_model(config), "cpu")
    float8.use_float8(model, config, torch.device("cpu"))
    layer: Any = model.get_submodule("model.layers.0.mlp.up_proj")
    torch.manual_seed(0)
    nn.init.normal_(layer.weight)
    cast_weights([layer], None)
    x = torch.randn(4, 16, 32)
    torch._dynamo.reset()
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(x), layer(x))


EXPERTS_ONCE = {"zero 3, recomputed": {"dp": 2, "fsdp": Fsdp(3), "activation_checkpoint": FULL}}
EXPERTS_ONCE_TOO: dict[str, dict[str, Any]] = {
    "one process": {},
    "ep of all ranks, zero 2": {"dp": 2, "ep": 2, "fsdp": Fsdp(2)},
    "zero 2": {"dp": 2, "fsdp": Fsdp(2)},
    "ep, zero 3": {"dp": 4, "ep": 2, "fsdp": Fsdp(3)},
    "ep, zbv": {"dp": 4, "ep": 2, "pp": 2, "schedule": "zbvzerobubble"},
}


def experts_config(layout: dict[str, Any]) -> Config:
    model = moe(num_hidden_layers=2 * layout.get("pp", 1))
    return config_of_casts(tiny(model=model, batch_size=16, **layout))


@pytest.mark.parametrize("layout", cells(EXPERTS_ONCE, EXPERTS_ONCE_TOO))
def test_matrices_of_experts_are_cast_once_a_step(layout: dict[str, Any], tmp_path: Path) -> None:
    """For products of both directions."""
    config = experts_config(layout)
    seen = run_world(counting_casts, config, tmp_path, True, "experts")
    assert seen == [2 * 2 * 3 * 2] * config.world_size  # 2 steps, 2 blocks on each rank


@pytest.mark.slow
@pytest.mark.parametrize("layout", cells({}, EXPERTS_ONCE | EXPERTS_ONCE_TOO))
def test_casting_experts_once_gives_the_losses_of_casting_in_each_matmul(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("once", "each"):
        config = experts_config(layout), tmp_path / name
        run_world(counting_casts, *config, name == "once", "experts")
    assert numbers(tmp_path / "once") == numbers(tmp_path / "each")


def config_of_casts(config: Config, recipe: str = "tensorwise") -> Config:
    if config.pp == 1:
        config = replace(config, schedule=Schedule("1f1b", 4))
    # no weight has a multiple of 24 rows, as tokens have
    changes = {"steps": 2, "seq_len": 24, "validation": Validation(every=0)}
    return replace(config, precision=replace(FLOAT8, recipe=recipe), **changes)


def counting_casts(config: Config, worker: Worker, once: bool, of: str = "linear") -> int:
    """Casts of weights, or of this rank's parts of them, in a run; of: linear layers or experts."""
    from titanlike.techniques.low_precision import float8_experts, float8_linear

    counted, module = 0, {"linear": float8_linear, "experts": float8_experts}[of]
    right = module.to_fp8_saturated

    def counting(x: Tensor, kind: torch.dtype) -> Tensor:
        nonlocal counted
        is_weight = x.dim() == 2 and x.shape[0] % 24 != 0 if of == "linear" else x.dim() == 3
        counted += is_weight and not x.is_meta
        return right(x, kind)

    module.to_fp8_saturated = counting
    if not once:
        float8.Float8.on_weights = lambda self, stage: None
    train(config, worker)
    return counted


# --- what tp gathers ----------------------------------------------------------------------------

TP = {"tp": tiny(tp=2, layers=2)}
TP_TOO = {
    "zbv, recomputed": tiny(
        pp=2, tp=2, schedule="zbvzerobubble", layers=4, activation_checkpoint=FULL
    ),
}
TP_REST = {
    "cp, hsdp": tiny(dp=2, replicate=2, tp=2, cp=2, layers=2),
    "own": tiny(tp=2, model=Model("support.wrong_plans.Model", {}, PLAN)),
    "compiled": tiny(tp=2, layers=2, compile=True),
}


@pytest.mark.parametrize("config", cells(TP, TP_TOO, TP_REST))
def test_tp_gathers_in_float8_what_float8_layers_alone_take(config: Config, tmp_path: Path) -> None:
    """Half of bf16's bytes, with the bits of casting what was gathered; the head stays in bf16."""
    config = replace(config_of_casts(config), batch_size=8)
    before, after = (
        run_world(gathering, config, tmp_path / str(cast), cast, timeout=900)
        for cast in (False, True)
    )
    if not config.compile:  # which gathers elsewhere if not in float8
        for (all_of_them, none), (head, inputs) in zip(before, after, strict=True):
            assert none == 0 and head + 2 * inputs == all_of_them >= 4 * head
    # a compiled norm is rounded to float8 without being rounded to bf16 before
    rel = 1e-3 if config.compile else 0.0
    losses = [read_jsonl(tmp_path / str(cast) / "metrics.jsonl") for cast in (False, True)]
    for one, other in zip(*losses, strict=True):
        for key in ("loss", "grad_norm"):
            assert other[key] == pytest.approx(one[key], rel=rel, abs=0)


def gathering(config: Config, worker: Worker, cast: bool) -> tuple[int, int]:
    """Bytes of this rank in all-gathers of inputs, in both directions: bf16's, and float8's.

    cast: in float8.
    """
    sent, begin = [0, 0], gathered._begin_rows

    def counting(x: Tensor, *more: Any, **given: Any) -> Any:
        sent[x.itemsize == 1] += 0 if x.is_meta else x.nbytes
        return begin(x, *more, **given)

    gathered._begin_rows = counting
    if not cast:
        gathered._shared_scaling = lambda *_: None
    train(config, worker)
    return sent[0], sent[1]


@pytest.mark.parametrize(
    ("attention", "alone"), [("Attention", True), ("Scaling", False), ("Beside", False)]
)
def test_what_another_operation_takes_is_gathered_as_it_is(attention: str, alone: bool) -> None:
    model = Model("support.wrong_plans.Model", {"attention": attention}, PLAN)
    tp = make_plan(tiny(tp=2, model=model, batch_size=8)).transforms["tp"]
    names = {"blocks.0.attention", "blocks.1.attention"}
    assert tp.sharding.only_layers == (names if alone else set())


@pytest.mark.parametrize("hooked", ["", "self_attn", "self_attn.k_proj"])
def test_a_hook_is_given_what_is_gathered_as_it_is(
    hooked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(tiny(tp=2, layers=1, precision=FLOAT8))
    block: Any = plan.model_graph.model.get_submodule("model.layers.0")
    if hooked:
        block.get_submodule(hooked).register_forward_pre_hook(lambda *_: None)
    seen, begin = [], gathered._begin_rows
    monkeypatch.setattr(
        gathered, "_begin_rows", lambda x, *a, **k: seen.append(x.dtype) or begin(x, *a)
    )
    with torch.device("meta"):
        x = torch.empty(2, 8, 32, dtype=torch.bfloat16, requires_grad=True)
        block(x, rotary_table(torch.arange(16), 8, 1e4), None)
    float8_dtype = torch.float8_e4m3fn
    assert seen == [torch.bfloat16 if hooked else float8_dtype, float8_dtype]


# --- divided layers -----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", *slow("rowwise", "rowwise_with_gw_hp")])
def test_a_tp_sharded_layer_rounds_like_the_full_layer(recipe: str, tmp_path: Path) -> None:
    """Results and gradients are parts of those of the whole layer, or parts of their sums; the
    largest elements are on one rank."""
    config = tiny(tp=2, precision=replace(FLOAT8, recipe=recipe))
    differences = run_world(divided_layers, config, tmp_path)
    assert max(map(max, differences)) < 1e-6, differences


def divided_layers(config: Config, worker: Worker) -> list[float]:
    """Relative differences of both ways to divide a layer, and of tokens that cp divides."""
    torch.manual_seed(0)
    weight, x, gradient = torch.randn(32, 48), torch.randn(16, 48), torch.randn(16, 32)
    weight[:16, :24] *= 4
    x[:, :24] *= 4
    gradient[:, 16:] *= 4
    mesh = open_mesh(config, worker)
    ranks = GroupInfo(2, mesh.layer_part, mesh.axes.get_group("tp"))

    def mine(tensor: Tensor, at: int) -> Tensor:
        return tensor.chunk(2, at)[ranks.rank].contiguous()

    recipe = config.precision.recipe
    out, of_x, of_weight = multiplied(recipe, weight, x, gradient)
    outputs = multiplied(recipe, mine(weight, 0), x, mine(gradient, 1), (ranks, None))
    inputs = multiplied(recipe, mine(weight, 1), mine(x, 1), gradient, (None, ranks))
    tokens = multiplied(recipe, weight, mine(x, 0), mine(gradient, 0), tokens=ranks)
    dist.all_reduce(outputs[1])
    dist.all_reduce(inputs[0])
    dist.all_reduce(tokens[2])
    pairs = [*zip(outputs, (mine(out, 1), of_x, mine(of_weight, 0)), strict=True)]
    pairs += zip(inputs, (out, mine(of_x, 1), mine(of_weight, 1)), strict=True)
    pairs += zip(tokens, (mine(out, 0), mine(of_x, 0), of_weight), strict=True)
    return [float((got - right).norm() / right.norm()) for got, right in pairs]


def multiplied(
    recipe: str,
    weight: Tensor,
    x: Tensor,
    gradient: Tensor,
    divided: Any = (None, None),
    tokens: GroupInfo | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(results, gradient of x, of the weight) of a layer in float8."""
    from torchao.float8 import Float8LinearConfig

    from titanlike.techniques.low_precision.float8_linear import convert

    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    convert(layer, replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True))
    layer.weight = nn.Parameter(weight)
    vars(layer)[DIVIDED] = divided
    layer.tokens = tokens
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(gradient)
    return out.detach(), x.grad, layer.weight.grad
