"""The most memory that a recorded node takes while it runs, alone and on meta."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.costs.fused_attention import FusedAttention
from titanlike.costs.node_cost import META, Call, empty_like, module_of
from titanlike.graph.recording import Node
from titanlike.torch_private.operators import TorchDispatchMode
from titanlike.torch_private.tensors import storage_id, tree_leaves


@dataclass(frozen=True)
class NodePeak:
    """Bytes of storages, without those of parameters."""

    forward: int  # at the most in its forward, its inputs and its result included
    # In its backward, at the most, beyond what was in memory at its begin: gradients of activations,
    first: int  # and of weights, which are new
    later: int  # and of weights one at a time, which is added to what is there


def peak_bytes(
    node: Node, model: nn.Module, changed: Callable[[nn.Module], AbstractContextManager[Any]]
) -> NodePeak:
    """changed: within it the node's module runs as it will in a backward."""
    module = module_of(node, model)
    call = Call(node, module, META, empty_like)
    weights = [*call.weights, *(module.parameters() if module is not None else ())]
    weights = [weight for weight in weights if weight.requires_grad]
    with changed(nn.Module() if module is None else module):
        forward, first = _run(call)
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        try:
            _, later = _run(call)
        finally:
            for weight in weights:
                weight.grad = None
    return NodePeak(forward, first, later)


def _run(call: Call) -> tuple[int, int]:
    """(most in the forward, most in the backward beyond what there was at its begin)."""
    with Live() as live, FusedAttention():
        results = call.forward()
        forward, begin = live.peak, live.now
        if results:
            live.peak = begin
            torch.autograd.backward(results, [torch.empty_like(result) for result in results])
        backward = live.peak - begin
    for tensor in (*call.inputs, *call.weights):
        tensor.grad = None
    return forward, backward


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that exist, of those made within it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        key, storage = storage_id(tensor), tensor.untyped_storage()
        if key not in self._known:
            self._known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes
