"""Plans and models with which tensor parallelism would compute other numbers: each is refused, before
anything starts, with the module, the operation and what to write."""

from __future__ import annotations

from typing import Any

import pytest

from support.models import tiny
from support.wrong_plans import FUSED, PLAN
from titanlike.config.keys import Model
from titanlike.config.schema import Config
from titanlike.models import llama
from titanlike.training.draft import draft, preflight


def config(
    plan: dict[str, Any] | None = None,
    *,
    between: str = "nothing",
    attention: str = "Attention",
    **changes: Any,
) -> Config:
    args = {"attention": attention, "between": between}
    model = Model("support.wrong_plans.Model", args, tp_plan=PLAN if plan is None else plan)
    return tiny(tp=2, model=model, batch_size=8, **changes)


def without(*names: str, plan: dict[str, Any] = PLAN) -> dict[str, Any]:
    return {pattern: style for pattern, style in plan.items() if pattern not in names}


ATTENTION, NORMS = "blocks.*.attention", "blocks.*.norms.*"
SCALE, QKV, OUT = f"{ATTENTION}.scale", f"{ATTENTION}.qkv", f"{ATTENTION}.out"
UP, DOWN = "blocks.*.mlp.up", "blocks.*.mlp.down"
PLAIN = FUSED | {QKV: "colwise"}
LATER = {"tp_sequence": False}
LENGTH = "write tp_sequence=false"
Told = tuple[Config, str, str]  # what is refused, where and what is wrong, what to write
WRONG: dict[str, Told] = {
    # parameters beside divided ones, or whose gradients are summed and should not be, or the reverse
    "a norm of queries unnamed": (
        config(without(SCALE)),
        "its blocks.0.attention.scale computes with a rank's part of heads or features, and the "
        "gradient of its weight is not summed",
        f"{SCALE}: replicate_sum",
    ),
    "a norm of queries as one of whole ones": (
        config({**PLAN, SCALE: "replicate"}, **LATER),
        "its blocks.0.attention.scale computes with a rank's part of heads or features",
        f"{SCALE}: replicate_sum",
    ),
    "a norm of queries as one of tokens": (
        config({**PLAN, SCALE: "sequence"}),
        "is summed in some batches",
        f"{SCALE}: replicate_sum",
    ),
    "a norm between blocks unnamed": (
        config(without(NORMS)),
        "its blocks.0.norms.0 computes with a rank's part of the tokens",
        f"{NORMS}: sequence",
    ),
    "the last norm whole": (
        config({**PLAN, "norm": "replicate"}),
        "its norm computes with a rank's part of the tokens, and the gradient of its weight is not",
        "norm: sequence",
    ),
    "the last norm summed": (
        config({**PLAN, "norm": "replicate_sum"}, **LATER),
        "its norm computes with whole activations, and the gradient of its weight is summed",
        "norm: replicate",
    ),
    "a parameter of the model itself": (
        config(between="bias"),
        "the gradient of its bias is not summed",
        "a module of its own, which the plan names: sequence",
    ),
    # operations over what a rank has a part of
    "a mean over tokens": (config(between="mean"), "calls mean: it reduces over", LENGTH),
    "a sum from the first token": (config(between="cumsum"), "calls cumsum: it cumulates", LENGTH),
    "tokens shifted": (config(between="shifted"), "calls roll: it rolls over", LENGTH),
    "the last token": (config(between="last"), "calls slice: it takes a part of", LENGTH),
    "a softmax over heads": (
        config(attention="Softmaxed"),
        "its blocks.0.attention calls softmax: it takes a softmax over a rank's part of the features "
        "behind blocks.0.attention.q",
        "colwise_gather",
    ),
    "heads of another size": (
        config(attention="ByHeads"),
        "its blocks.0.attention calls unflatten: 4 x 8 becomes 4 x 4, which a rank's part of the "
        "features behind blocks.0.attention.q cannot be",
        "x.unflatten(-1, (-1, head_dim))",
    ),
    "keys in another order": (
        config(attention="Tiled"),
        "its blocks.0.attention calls scaled_dot_product_attention: its heads of queries and keys are "
        "in another order",
        "",
    ),
    "a mark on the first head": (
        config(attention="Marked"),
        "it writes to some elements of a rank's part of a tensor of constants",
        "",
    ),
    "signs of heads": (config(attention="Signed"), "its blocks.0.attention calls ", ""),
    "a weight added in place": (
        config({**PLAN, SCALE: "replicate"}, attention="InPlace"),
        "its blocks.0.attention.scale computes with a rank's part of heads or features",
        f"{SCALE}: replicate_sum",
    ),
    "heads counted from 0": (
        config(attention="Ranked"),
        "its blocks.0.attention calls arange: it counts as far as the rank's part",
        "sizes from the tensors",
    ),
    "a head that the loss does not know": (
        config({**PLAN, "logits": "colwise"}),
        "returns a rank's part of the features behind logits",
        "the style vocab",
    ),
    # packed matrices
    "q, k and v in one, divided as one": (
        config(PLAIN, attention="Fused"),
        "its blocks.0.attention calls chunk: it splits a rank's part of the features",
        f"{QKV}: {{packed_colwise: 3}}",
    ),
    "the same through a view": (
        config(PLAIN, attention="Viewed"),
        "calls unflatten: 3 x 4 x 8 becomes 3 x 2 x 8",
        f"{QKV}: {{packed_colwise: 3}}",
    ),
    "packed in too many": (
        config({**PLAN, UP: {"packed_colwise": 4}}),
        "its blocks.0.mlp.down takes a rank's part of the features behind blocks.0.mlp.up, of 2",
        "colwise_gather",
    ),
    # lengths that are written in
    "a view with a length": (
        config(between="view"),
        "calls view: it fails: shape '[2, 16, 32]' is invalid",
        LENGTH,
    ),
    "a view that folds features": (config(between="folded"), "calls reshape", LENGTH),
    "a division by the length": (
        config(between="counted"),
        "calls div: its other is 8, and 16 in the model",
        LENGTH,
    ),
    "positions of tokens": (config(between="positions"), "calls arange: it counts", LENGTH),
    "positions that are added": (
        config(between="places"),
        "calls add: it fails: ",
        LENGTH,
    ),
    # entries that are missing
    "an embedding unnamed": (
        config(without("tokens")),
        "its blocks.0.attention is given what is whole already: it makes 32 of 16 tokens",
        "`vocab` or `split`",
    ),
    "the end of attention unnamed": (
        config(without(OUT)),
        "its blocks.0.attention.out calls linear: it fails",
        f"{OUT}: rowwise",
    ),
    "keys whole": (
        config(without(f"{ATTENTION}.[qkv]") | {f"{ATTENTION}.[qv]": {"colwise": 8}}),
        "its blocks.0.attention calls scaled_dot_product_attention",
        "",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_would_compute_other_numbers_is_refused(name: str) -> None:
    case, wrong, fix = WRONG[name]
    problem = str(preflight(case)[0])
    assert wrong in problem and fix in problem and problem.startswith("model.tp_plan: "), problem


def test_a_plan_that_is_not_the_users_is_refused_by_the_key_that_is() -> None:
    model = Model("support.wrong_plans.Planned")
    (problem,) = preflight(tiny(tp=2, model=model, batch_size=8))
    assert problem.key == "tp" and "replicate_sum" in problem.fix


RIGHT = {
    "written out": config(),
    "written out, whole": config(**LATER),
    "fused": config(FUSED, attention="Fused", **LATER),
    "fused, through a view": config(FUSED, attention="Viewed"),
    "products of matrices": config(attention="Products"),
    "positions that are divided": config({**PLAN, "places": "split"}, between="places"),
    "complex numbers, by a table that is kept": config(attention="Rotated"),
    "each layer gathers": config(without(ATTENTION)),
    "whole logits": config({**PLAN, "logits": "colwise_gather"}, **LATER),
    **{name: config(between=name, **LATER) for name in ("mean", "view", "positions", "bias")},
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_plans_are_not_refused(name: str) -> None:
    assert not preflight(RIGHT[name])


@pytest.mark.parametrize("tp, kv_heads, sequence", [(2, 4, True), (4, 2, True), (4, 1, False)])
def test_our_own_plans_are_right(tp: int, kv_heads: int, sequence: bool) -> None:
    sizes = {"dim": 32, "heads": 4, "kv_heads": kv_heads, "ffn_dim": 64, "vocab_size": 97}
    assert not preflight(tiny(tp=tp, model=Model("llama", sizes), tp_sequence=sequence))


def test_equal_blocks_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = llama.Attention.forward
    monkeypatch.setattr(
        llama.Attention, "forward", lambda *args: calls.append(args) or forward(*args)
    )
    sizes = {"dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 97, "layers": 6}
    draft(tiny(tp=2, model=Model("llama", sizes)))
    # whole, divided with and without the sequence, and recorded in training and in evaluation
    assert len(calls) == 5


def test_a_forward_that_meta_tensors_cannot_run_is_not_compared_and_says_so() -> None:
    tensor = draft(config(attention="Looking")).tensor
    assert tensor is not None and "item()" in tensor.unchecked
    (problem,) = preflight(config(without(SCALE), attention="Looking"))
    assert "scale has parameters beside q and k, which are divided" in str(problem)
    assert f"{SCALE}: replicate_sum" in problem.fix
