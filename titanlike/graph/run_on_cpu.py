"""Units whose forward meta tensors cannot run: on the CPU, to find the shapes of their results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.graph.hidden_values import tensors
from titanlike.graph.pytree import tree_flatten, tree_map


def run_on_cpu(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sized_by_values: list[Tensor],
) -> Any:
    """Call a copy of a meta module on the CPU: meta arguments in, meta results out.

    A mixture of experts, for example, branches on which tokens an expert gets. One unit at a time
    fits in memory; its weights are random, and only shapes and dtypes are used. Raises what the
    module raises. Results whose shape depends on values are added to `sized_by_values`.
    """

    others = wanted(module, args, kwargs)

    def to_meta(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        result = torch.empty_like(leaf, device="meta")
        return DependsOn.apply(result, *others) if leaf.requires_grad else result

    real = copy.deepcopy(module).to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(0)  # of the CPU alone: all ranks find the same
        result = tree_map(_call(real, args, kwargs, 0.02), to_meta)
        found, given = tensors(result), tensors(args, kwargs)
        uncertain = {id(tensor) for tensor in sized_by_values}
        known = {tensor.shape for tensor in given if id(tensor) not in uncertain}
        unknown = {tensor.shape for tensor in given} - known
        if any(tensor.shape not in known for tensor in found):  # rarely: it runs again
            repeated = [
                again for std in (1.0, 3.0) if (again := _call_again(real, args, kwargs, std))
            ]
            for tensor, *again in zip(found, *repeated, strict=False):
                if tensor.shape in unknown or any(tensor.shape != one.shape for one in again):
                    sized_by_values.append(tensor)
    return result


def _call_again(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], std: float
) -> list[Tensor]:
    """The tensors that it returns; none where it does not take such values."""
    try:
        return tensors(_call(module, args, kwargs, std))
    except Exception:  # whatever a forward raises: of large numbers an index may be made
        return []


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], std: float) -> Any:
    """With random values of that size."""
    fill = partial(_fill, std=std)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            fill(tensor)
        real_args, real_kwargs = tree_map((args, kwargs), partial(_to_cpu, fill=fill))
    return module(*real_args, **real_kwargs)


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


def _fill(tensor: Tensor, std: float) -> None:
    """Values that most modules accept: floats, index 0, True."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.normal_(0, std)
    else:
        tensor.fill_(tensor.dtype == torch.bool)


def _to_cpu(leaf: Any, fill: Callable[[Tensor], None]) -> Any:
    if isinstance(leaf, torch.device) and leaf.type == "meta":
        return torch.device("cpu")
    if not isinstance(leaf, Tensor):
        return leaf
    tensor = torch.empty_like(leaf, device="cpu")
    fill(tensor)
    return tensor.requires_grad_(leaf.requires_grad)
