"""Running a unit on the CPU to see the shapes of what it returns, where meta tensors do not do.

A mixture of experts asks which tokens an expert gets, and meta tensors have no answer. One unit at a
time is small enough to be tried with random weights; only shapes and dtypes are looked at.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.graph.pytree import tree_map


def run_on_cpu(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module on meta returns for arguments on meta: on meta again.

    Raises what it raises on the CPU.
    """
    real = copy.deepcopy(module).to_empty(device="cpu")
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for tensor in [*real.parameters(), *real.buffers()]:
            _fill(tensor)
        told = [tree_map(part, _on_cpu) for part in (args, kwargs)]
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        result = real(*told[0], **told[1])
    return tree_map(result, _on_meta)


def _fill(tensor: Tensor) -> None:
    """Values that most modules can work with: small numbers, the first id, yes."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.normal_(0, 0.02)
    else:
        tensor.fill_(tensor.dtype == torch.bool)


def _on_cpu(leaf: Any) -> Any:
    if isinstance(leaf, torch.device) and leaf.type == "meta":
        return torch.device("cpu")
    if not isinstance(leaf, Tensor):
        return leaf
    tensor = torch.empty_like(leaf, device="cpu")
    _fill(tensor)
    return tensor.requires_grad_(leaf.requires_grad)


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_like(leaf, device="meta").requires_grad_(leaf.requires_grad)
