"""What is replaced is what it replaces: a layer that a user has changed is refused, or left
whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from support.cells import slow
from support.models import LLAMA, tiny
from support.proven import assert_proven
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.user_code import Custom, Model
from titanlike.core.config.schema import Config
from titanlike.core.models.llama import Llama
from titanlike.core.torch_private.known_code import own_code
from titanlike.run.checks import problems


class Equalized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.in_features**-0.5)


class Lora(nn.Linear):
    def __init__(self, *sizes: int, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.a = nn.Parameter(torch.empty(2, self.in_features))
        self.b = nn.Parameter(torch.empty(self.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a.T @ self.b.T


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * (self.weight.abs() > 0.01))


class Clipped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-0.1, 0.1)


class Activated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x))


class BitNet(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs().mean()
        rounded = (self.weight / scale).round().clamp(-1, 1) * scale
        return F.linear(x, self.weight + (rounded - self.weight).detach())


class Called(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2


def _weight_norm(*sizes: int, **settings: Any) -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(*sizes, **settings))


def _replaced(*sizes: int, **settings: Any) -> nn.Module:
    layer = nn.Linear(*sizes, **settings)
    vars(layer)["forward"] = lambda x: F.linear(x, layer.weight).tanh()
    return layer


def _hooked(*sizes: int, **settings: Any) -> nn.Module:
    layer = nn.Linear(*sizes, **settings)
    layer.register_forward_hook(lambda module, args, output: output.tanh())
    return layer


def _backward(*sizes: int, **settings: Any) -> nn.Module:
    layer = nn.Linear(*sizes, **settings)
    layer.register_full_backward_hook(lambda module, given, got: (given[0].clamp(-1, 1),))
    return layer


LINEAR = {
    "equalized": Equalized,
    "LoRA inside": Lora,
    "masked": Masked,
    "clipped": Clipped,
    "activated": Activated,
    "BitNet": BitNet,
    "a call of its own": Called,
    "weight norm": _weight_norm,
    "a forward that is replaced": _replaced,
    "a hook": _hooked,
    "a backward hook": _backward,
}


class WithLinear(Llama):
    """One linear layer of a block is another one."""

    def __init__(self, layer: str, linear: str, **sizes: Any) -> None:
        super().__init__(**sizes)
        path, _, last = layer.rpartition(".")
        holder = self.model.layers[1].get_submodule(path)
        old: Any = getattr(holder, last)
        setattr(holder, last, LINEAR[linear](old.in_features, old.out_features, bias=False))


class WithEmbedding(Llama):
    def __init__(self, settings: dict[str, Any], **sizes: Any) -> None:
        super().__init__(**sizes)
        self.model.embed_tokens = nn.Embedding(
            sizes["vocab_size"], sizes["hidden_size"], **settings
        )


class WithHook(Llama):
    """A hook on a weight's gradient, or in a block."""

    def __init__(self, kind: str, **sizes: Any) -> None:
        super().__init__(**sizes)
        mlp: Any = self.model.layers[1].mlp
        if kind == "gradient":
            mlp.up_proj.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        elif kind == "accumulated":
            mlp.up_proj.weight.register_post_accumulate_grad_hook(
                lambda weight: weight.grad.mul_(0.5)
            )
        elif kind == "backward":
            mlp.register_full_backward_hook(lambda module, given, got: (given[0] * 0.5,))
        elif kind == "forward":
            mlp.up_proj.register_forward_hook(lambda module, args, output: output * 0.5)


class WithPrompt(Llama):
    """Vectors that are added to the embedded tokens: none of them."""

    def __init__(self, train: bool, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.prompt = nn.Parameter(torch.zeros(0, sizes["hidden_size"]), requires_grad=train)


SIZES = {**LLAMA, "num_hidden_layers": 2, "vocab_size": 64}
PLAN = {
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


def changed(name: str, **args: Any) -> Custom:
    return Custom(f"{__name__}.{name}", {**SIZES, **args})


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
