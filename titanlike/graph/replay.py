"""Run a recorded forward, node by node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.graph.pytree import tree_map
from titanlike.graph.recording import DEVICE, Node, Recording


def replay(recording: Recording, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """What the model returns; batch: on meta."""
    values: dict[Node, Any] = {}

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return values[leaf]
        return torch.device("meta") if leaf is DEVICE else leaf

    for node in recording.nodes:
        if node.kind == "input":
            values[node] = batch[node.target]
        elif node.kind == "weight":
            path, _, last = node.target.rpartition(".")
            values[node] = getattr(model.get_submodule(path), last)
        else:
            function = model.get_submodule(node.target) if node.kind == "unit" else node.target
            args, kwargs = tree_map((node.args, node.kwargs), real)
            values[node] = function(*args, **kwargs)
    return tree_map(recording.output, real)
