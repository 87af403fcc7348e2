"""Run one unit on the CPU to find the shapes of its outputs, where meta tensors cannot.

A mixture of experts branches on which tokens an expert gets, which meta tensors do not know. One
unit at a time fits in memory; its weights are random, and only shapes and dtypes are used.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.graph.pytree import tree_map


def run_on_cpu(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a copy of a meta module on the CPU: meta arguments in, meta results out.

    Raises what the module raises.
    """
    real = copy.deepcopy(module).to_empty(device="cpu")
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for tensor in [*real.parameters(), *real.buffers()]:
            _fill(tensor)
        real_args, real_kwargs = tree_map(args, _to_cpu), tree_map(kwargs, _to_cpu)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        result = real(*real_args, **real_kwargs)
    return tree_map(result, _to_meta)


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


def _to_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_like(leaf, device="meta").requires_grad_(leaf.requires_grad)
