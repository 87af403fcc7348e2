"""What is replaced is what it replaces: a layer that a user has changed is refused, or left
whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from support.cells import slow
from support.changed_layers import LINEAR
from support.models import LLAMA, tiny
from support.proven import assert_proven
from titanlike.config.schema import Config, Custom, Model, Schedule
from titanlike.driver.checks import problems
from titanlike.torch_private.known_code import own_code

SIZES = {**LLAMA, "num_hidden_layers": 2, "vocab_size": 64}
PLAN = {
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


def changed(name: str, **args: Any) -> Custom:
    return Custom(f"support.changed_layers.{name}", {**SIZES, **args})


@pytest.mark.parametrize("layer", ["mlp.down_proj", *slow("mlp.up_proj")])
@pytest.mark.parametrize("linear", LINEAR)
def test_a_layer_with_custom_code_is_not_sharded(linear: str, layer: str) -> None:
    """tp would compute a plain product with a part of its weight."""
    model = changed("WithLinear", layer=layer, linear=linear)
    [problem] = problems(tiny(tp=2, model=Model(model.name, model.args, dict(PLAN))))
    assert "no rank computes for a part of its weight" in str(problem) and "tp=1" in problem.fix
    assert f"model.layers.1.{layer} has " in problem.reason


def test_torchs_own_layers_are_accepted() -> None:
    assert not any(own_code(kind(4, 4), kind) for kind in (nn.Linear, nn.Embedding))
    subclass = type("Named", (nn.Linear,), {})
    assert own_code(subclass(4, 4), nn.Linear) == ""


@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
@pytest.mark.parametrize("layout", [{}, *slow({"dp": 2}, {"pp": 2})], ids=str)
def test_a_hook_on_a_gradient_is_refused(kind: str, layout: dict[str, int]) -> None:
    """Even in one process: the weight is another tensor by then."""
    [problem] = problems(tiny(model=changed("WithHook", kind=kind), **layout))
    assert "its model.layers.1.mlp.up_proj.weight has a hook on its gradient" in problem.reason


@pytest.mark.parametrize(
    ("layout", "train", "refused"),
    [({"dp": 2}, True, True), ({"dp": 2}, False, False), ({"pp": 2}, True, False)],
)
def test_an_empty_parameter_is_refused_under_fsdp(
    layout: dict[str, int], train: bool, refused: bool
) -> None:
    found = problems(tiny(model=changed("WithPrompt", train=train), **layout))
    assert ["its prompt of shape [0, 32] has no" in problem.reason for problem in found] == [
        True
    ] * refused


@pytest.mark.parametrize(
    "settings, config, said",
    [
        ({"max_norm": 1.0}, tiny(), "an embedding with max_norm, which changes its weight"),
        ({"sparse": True}, tiny(), "an embedding with sparse, which has a gradient"),
        ({"scale_grad_by_freq": True}, tiny(dp=2), "counts ids in a microbatch of a rank"),
        (
            {"scale_grad_by_freq": True},
            tiny(pp=1, schedule=Schedule("1f1b", 4)),
            "counts ids in a microbatch",
        ),
        ({"scale_grad_by_freq": True}, tiny(), ""),
        ({"padding_idx": 3}, tiny(pp=2, dp=2), ""),
    ],
)
def test_an_embedding_option_that_sharding_breaks_is_refused(
    settings: dict[str, Any], config: Config, said: str
) -> None:
    config = replace(config, model=changed("WithEmbedding", settings=settings))
    told = "\n".join(map(str, problems(config)))
    assert said in told and bool(said) == bool(told)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, layout",
    [
        ("backward", {"pp": 2, "schedule": "zbvzerobubble"}),
        ("backward", {"compile": True}),
        ("forward", {"compile": True}),
    ],
    ids=str,
)
def test_a_hook_of_a_module_is_kept(kind: str, layout: dict[str, Any], tmp_path: Path) -> None:
    """Also where equal blocks would share a compiled graph: that block is not compiled."""
    config = tiny(**layout, model=changed("WithHook", kind=kind, num_hidden_layers=4))
    assert_proven(config, tmp_path, timeout=200)
