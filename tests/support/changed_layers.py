"""Layers, embeddings and hooks that change what torch's own compute, in a small model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from titanlike.models.llama import Llama


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
