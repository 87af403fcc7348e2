"""Values that a forward computes of sizes and buffers alone: they are known when it is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titanlike.graph.pytree import tree_map
from titanlike.graph.recording import DEVICE, Node


def constant_value(node: Node, buffers: Callable[[], dict[str, Tensor]]) -> Tensor | None:
    """The value of a recorded call, computed on the CPU; None where it depends on the batch, on
    parameters, units or random numbers. A causal mask that is compared with another is an example.
    """
    known: dict[Node, Any] = {}

    def find(use: Node) -> Any:
        if use.random or use.has_parameters or use.kind in ("input", "unit"):
            raise _Unknown
        if use not in known:
            if use.kind == "weight":
                known[use] = buffers().get(use.target)
                if known[use] is None:
                    raise _Unknown
            else:
                args, kwargs = tree_map((use.args, use.kwargs), real)
                known[use] = use.target(*args, **kwargs)
        return known[use]

    def real(leaf: Any) -> Any:
        if leaf is DEVICE:
            return torch.device("cpu")
        return find(leaf) if isinstance(leaf, Node) else leaf

    with torch.device("cpu"), torch.no_grad():
        try:
            return find(node)
        except _Unknown:
            return None


class _Unknown(Exception):
    """A value that is not known before the run."""
