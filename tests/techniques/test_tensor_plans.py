"""Plans and models with which tensor parallelism would compute other numbers: each is refused,
before anything starts, with the module, the operation and what to write."""

from __future__ import annotations

from typing import Any

import pytest

from support.cells import slow
from support.families import llama
from support.hf_tiny import model_of
from support.models import tiny
from support.wrong_plans import FUSED, PLAN
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.schema import Config
from titanlike.core.models.llama import Attention
from titanlike.core.training.preflight import preflight
from titanlike.core.training.train_plan import make_plan


def config(plan: dict[str, Any] = PLAN, whole: bool = False, **args: str) -> Config:
    """whole: activations between layers are not divided along the sequence."""
    model = Model("support.wrong_plans.Model", args, tp_plan=plan)
    return tiny(tp=2, model=model, batch_size=8, tp_sequence=not whole)


def without(name: str) -> dict[str, Any]:
    return {pattern: style for pattern, style in PLAN.items() if pattern != name}


A = "blocks.*.attention"
IN = "its blocks.0.attention "
HEADS = "its blocks.0.attention.scale computes with a rank's part of heads or features"
SUM = f"{A}.scale: replicate_sum"
WHOLE_KEYS = without(f"{A}.[qkv]") | {f"{A}.[qv]": {"colwise": 8}}
# a plan that is wrong -> what is refused, and what to write
PLANS: dict[str, tuple[Config, str, str]] = {
    # parameters beside divided ones, or whose gradients are summed and should not be, or the
    # reverse
    "a norm of queries unnamed": (config(without(f"{A}.scale")), HEADS, SUM),
    "a norm of queries as one of whole ones": (
        config({**PLAN, f"{A}.scale": "replicate"}, whole=True),
        HEADS,
        SUM,
    ),
    "a norm of queries as one of tokens": (
        config({**PLAN, f"{A}.scale": "sequence"}),
        "is summed in some batches",
        SUM,
    ),
    "a norm between blocks unnamed": (
        config(without("blocks.*.norms.*")),
        "its blocks.0.norms.0 computes with a rank's part of the tokens",
        "blocks.*.norms.*: sequence",
    ),
    "the last norm whole": (
        config({**PLAN, "norm": "replicate"}),
        "its norm computes with a rank's part of the tokens, and the gradient of its weight is not",
        "norm: sequence",
    ),
    "the last norm summed": (
        config({**PLAN, "norm": "replicate_sum"}, whole=True),
        "its norm computes with whole activations, and the gradient of its weight is summed",
        "norm: replicate",
    ),
    "a weight added in place": (
        config({**PLAN, f"{A}.scale": "replicate"}, attention="InPlace"),
        HEADS,
        SUM,
    ),
    # matrices
    "a head that the loss does not know": (
        config({**PLAN, "logits": "colwise"}),
        "returns a rank's part of the features behind logits",
        "the style vocab",
    ),
    "q, k and v in one, divided as one": (
        config(FUSED | {f"{A}.qkv": "colwise"}, attention="Fused"),
        IN + "calls chunk: it splits a rank's part of the features",
        f"{A}.qkv: {{packed_colwise: 3}}",
    ),
    "the same through a view": (
        config(FUSED | {f"{A}.qkv": "colwise"}, attention="Viewed"),
        "calls unflatten: 3 x 4 x 8 becomes 3 x 2 x 8",
        f"{A}.qkv: {{packed_colwise: 3}}",
    ),
    "packed in too many": (
        config({**PLAN, "blocks.*.mlp.up": {"packed_colwise": 4}}),
        "its blocks.0.mlp.down takes a rank's part of the features behind blocks.0.mlp.up, of 2",
        "colwise_gather",
    ),
    # entries that are missing
    "an embedding unnamed": (
        config(without("tokens")),
        IN + "is given what is whole already: it makes 32 of 16 tokens",
        "`vocab` or `split`",
    ),
    "the end of attention unnamed": (
        config(without(f"{A}.out")),
        "its blocks.0.attention.out calls linear: it fails",
        f"{A}.out: rowwise",
    ),
    "keys whole": (config(WHOLE_KEYS), IN + "calls scaled_dot_product_attention", ""),
}
# what a model does, between its blocks or in attention | what is refused | what to write
MODELS = """
    between=bias        | the gradient of its bias is not summed        | a module of its own, which the
    between=mean        | calls mean: it reduces over                   | write tp_sequence=false
    between=cumsum      | calls cumsum: it cumulates                    | write tp_sequence=false
    between=shifted     | calls roll: it rolls over                     | write tp_sequence=false
    between=last        | calls slice: it takes a part of               | write tp_sequence=false
    between=view        | it fails: shape '[2, 16, 32]' is invalid      | write tp_sequence=false
    between=folded      | calls reshape                                 | write tp_sequence=false
    between=counted     | calls div: its other is 8, and 16 in the model| write tp_sequence=false
    between=positions   | calls arange: it counts                       | write tp_sequence=false
    between=places      | calls add: it fails:                          | write tp_sequence=false
    attention=Softmaxed | calls softmax: it takes a softmax over a rank | colwise_gather
    attention=ByHeads   | calls unflatten: 4 x 8 becomes 4 x 4, which   | x.unflatten(-1, (-1, head_dim))
    attention=Tiled     | its heads of queries and keys are in another  |
    attention=Marked    | it writes to some elements of a rank's part   |
    attention=Signed    | its blocks.0.attention calls                  |
    attention=Ranked    | calls arange: it counts as far as the rank    | sizes from the tensors
"""
WRONG = dict(PLANS)
for row in MODELS.strip().splitlines():
    change, said, fix = (part.strip() for part in row.split("|"))
    WRONG[change] = config(**dict([change.split("=")])), said, fix


@pytest.mark.parametrize("name", WRONG)
def test_a_tp_plan_that_changes_results_is_refused(name: str) -> None:
    case, wrong, fix = WRONG[name]
    problem = str(preflight(case)[0])
    assert wrong in problem and fix in problem and problem.startswith("model.tp_plan: "), problem


def test_a_built_in_tp_plan_is_refused_by_the_users_key() -> None:
    model = Model("support.wrong_plans.Planned")
    (problem,) = preflight(tiny(tp=2, model=model, batch_size=8))
    assert problem.key == "tp" and "replicate_sum" in problem.fix


RIGHT = {
    "written out": config(),
    "written out, whole": config(whole=True),
    "fused": config(FUSED, whole=True, attention="Fused"),
    "fused, through a view": config(FUSED, attention="Viewed"),
    "products of matrices": config(attention="Products"),
    "positions that are divided": config({**PLAN, "places": "split"}, between="places"),
    "complex numbers, by a table that is kept": config(attention="Rotated"),
    "each layer gathers": config(without(A)),
    "whole logits": config({**PLAN, "logits": "colwise_gather"}, whole=True),
    **{name: config(whole=True, between=name) for name in ("mean", "view", "positions", "bias")},
}


FIRST = [
    "written out, whole",
    "fused, through a view",
    "positions that are divided",
    "whole logits",
]


@pytest.mark.parametrize("name", [*FIRST, *slow(*(name for name in RIGHT if name not in FIRST))])
def test_correct_tp_plans_are_accepted(name: str) -> None:
    assert not preflight(RIGHT[name])


def test_a_scaling_embedding_of_transformers_is_sharded() -> None:
    assert not preflight(tiny(tp=2, model=model_of("gemma2"), seq_len=32))


@pytest.mark.parametrize("tp, kv_heads, sequence", [(2, 4, True), (4, 2, True), (4, 1, False)])
def test_built_in_tp_plans_are_correct(tp: int, kv_heads: int, sequence: bool) -> None:
    model = llama(vocab_size=97, num_key_value_heads=kv_heads)
    assert not preflight(tiny(tp=tp, model=model, tp_sequence=sequence))


def test_equal_blocks_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = Attention.forward
    monkeypatch.setattr(Attention, "forward", lambda *args: calls.append(args) or forward(*args))
    make_plan(tiny(tp=2, model=llama(vocab_size=97, num_hidden_layers=6)))
    # whole, divided with and without the sequence, and recorded in training and in evaluation
    assert len(calls) == 5


def test_a_forward_that_meta_tensors_cannot_run_is_not_compared_and_says_so() -> None:
    tensor = make_plan(config(attention="Looking")).transforms["tp"].sharding
    assert tensor is not None and "item()" in tensor.unchecked
    (problem,) = preflight(config(without(f"{A}.scale"), attention="Looking"))
    assert "scale has parameters besides q and k, which are divided" in str(problem)
    assert SUM in problem.fix
