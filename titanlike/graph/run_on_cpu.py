"""Units whose forward meta tensors cannot run: on the CPU, to find the shapes of their results."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.graph.hidden_values import tensors
from titanlike.graph.pytree import tree_flatten, tree_map


def run_on_cpu(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a copy of a meta module on the CPU: meta arguments in, meta results out.

    A mixture of experts, for example, branches on which tokens an expert gets. One unit at a time
    fits in memory; its weights are random, and only shapes and dtypes are used. Raises what the
    module raises.
    """

    others = wanted(module, args, kwargs)

    def to_meta(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        result = torch.empty_like(leaf, device="meta")
        return DependsOn.apply(result, *others) if leaf.requires_grad else result

    real = copy.deepcopy(module).to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        for tensor in [*real.parameters(), *real.buffers()]:
            _fill(tensor)
        real_args, real_kwargs = tree_map((args, kwargs), _to_cpu)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return tree_map(real(*real_args, **real_kwargs), to_meta)


def wanted(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Arguments and parameters of a module that want gradients."""
    given = tensors(*tree_flatten((args, kwargs))[0])
    return [tensor for tensor in [*given, *module.parameters()] if tensor.requires_grad]


class DependsOn(torch.autograd.Function):
    """The same tensor, with a place in the autograd graph behind `others`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise AssertionError("a recorded forward has no backward")


def _fill(tensor: Tensor) -> None:
    """Values that most modules accept: small floats, index 0, True."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.normal_(0, 0.02)
    else:
        tensor.fill_(tensor.dtype == torch.bool)


def _to_cpu(leaf: Any) -> Any:
    if isinstance(leaf, torch.device) and leaf.type == "meta":
        return torch.device("cpu")
    if not isinstance(leaf, Tensor):
        return leaf
    tensor = torch.empty_like(leaf, device="cpu")
    _fill(tensor)
    return tensor.requires_grad_(leaf.requires_grad)
