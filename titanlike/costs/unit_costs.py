"""The costs of a model's units: parameters, FLOPs, memory, or time on a device.

A unit's cost includes the operations between it and its neighbours (a residual, a product with a
weight) that a stage would run which begins or ends there; the last unit's includes the loss. Equal
calls (modules of one class with equal settings, on tensors of equal shapes) are evaluated once, see
`graph/node_costs.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from titanlike.costs import node_costs
from titanlike.costs.node_costs import (
    Exchanges,
    NodeOperators,
    NodePeak,
    Times,
    node_operators,
    node_times,
    peak_bytes,
)
from titanlike.distributed.collectives import Peers
from titanlike.graph.cut import cut, unit_starts
from titanlike.graph.model_graph import ModelGraph
from titanlike.graph.pytree import tree_map
from titanlike.graph.recording import Node
from titanlike.models.float8 import in_bf16
from titanlike.optim.loss import Loss
from titanlike.parallel.weight_gradients import DeferredWeightGradients

# Attributes with a module's own position, which do not change its cost
_POSITIONS = ("index", "idx", "layer_number", "layer_id")


_T = TypeVar("_T")


class CostError(ValueError):
    """A call that cannot be run alone."""


class UnitPeak(NamedTuple):
    """Bytes of a unit at the most while it runs, what it saves and is given included; without
    parameters and their gradients that were there."""

    forward: int
    first: int  # in its backward, where gradients of weights are new
    later: int  # where they are added to what is there


class _NodeMemory(NamedTuple):
    saved: int
    weights: int
    peak: NodePeak


def _unit_peak(nodes: Sequence[_NodeMemory]) -> UnitPeak:
    """Of a unit's calls, one after the other, and their backwards in reverse."""
    forward = first = later = before = 0
    after = sum(node.weights for node in nodes)
    for node in nodes:
        after -= node.weights  # gradients of the calls that come before in the backward
        forward = max(forward, before + node.peak.forward)
        before += node.saved
        first = max(first, before + node.peak.first + after)
        later = max(later, before + node.peak.later)
    return UnitPeak(forward, first, later)


@contextmanager
def _deferring(module: nn.Module) -> Iterator[None]:
    deferred = DeferredWeightGradients(module, node_costs.META)
    try:
        yield
        deferred.take()
    finally:
        deferred.undo()


@contextmanager
def _together(_: nn.Module) -> Iterator[Callable[[], object]]:
    yield lambda: None


@contextmanager
def _waiting(module: nn.Module) -> Iterator[Callable[[], object]]:
    deferred = DeferredWeightGradients(module, node_costs.META)
    try:
        yield lambda: deferred.take()()
    finally:
        deferred.undo()


class UnitCosts:
    """The calls of each unit in the training forward of one microbatch, and their costs."""

    def __init__(self, model_graph: ModelGraph, targets: Tensor, loss: Loss) -> None:
        """targets: of one microbatch, on meta."""
        self.model, self.microbatch_size = model_graph.model, model_graph.microbatch_size
        recording = model_graph.recording(model_graph.fields, True)
        end = model_graph.last_stage(cut(recording, [recording.units])[0]).nodes[-1]
        if end.chunked_head is not None:  # the head and the loss are one call
            replaced = {end.chunked_head.head, *end.chunked_head.epilogue}
            next(node for node in end.input_nodes if node.target == "targets").value = targets
        else:
            replaced = set()
            end = Node("function", loss.total, (recording.output, Node("input", "", value=targets)))

        def is_call(node: Node) -> bool:
            return node.kind in ("unit", "function") and node not in replaced

        edges = [*unit_starts(recording), len(recording.nodes)]
        self._calls = [list(filter(is_call, recording.nodes[a:b])) for a, b in pairwise(edges)]
        self._calls[-1].append(end)
        self._end = end
        self._keys: dict[Node, str] = {}
        # attention is of other tokens than those that a unit is called with
        self._parts = model_graph.sequence_parts
        self._found: dict[Hashable, Any] = {}  # what was counted already, of each call
        self.model.train()

    def parameter_table(self, size: Callable[[nn.Parameter], int]) -> np.ndarray:
        """[start, stop] -> size of the parameters of units start ... stop - 1.

        A weight that several of these units use (a tied weight) counts once.
        """
        own = [{id(p): size(p) for p in self._parameters(calls)} for calls in self._calls]
        table = np.zeros((len(own) + 1, len(own) + 1), dtype=np.int64)
        for start in range(len(own)):
            seen: set[int] = set()
            total = 0
            for stop, parameters in enumerate(own[start:], start + 1):
                total += sum(size for key, size in parameters.items() if key not in seen)
                seen.update(parameters)
                table[start, stop] = total
        return table

    def parameter_sizes(self, size: Callable[[nn.Parameter], int]) -> list[int]:
        """Of the parameters of each unit."""
        own = ({id(p): p for p in self._parameters(calls)} for calls in self._calls)
        return [sum(map(size, parameters.values())) for parameters in own]

    def flops(self) -> list[int]:
        """FLOPs of each unit, forward and backward of a microbatch. Raises CostError."""
        return self._sums(lambda node: node_costs.flops(node, self.model))

    def saved_bytes(self) -> list[int]:
        """Bytes of each unit that a microbatch saves for the backward. Raises CostError."""
        return [sum(calls) for calls in self._saved()]

    def _saved(self) -> list[list[int]]:
        return self._once("saved", lambda node: node_costs.saved_bytes(node, self.model), 0)

    def recomputed_bytes(self, save: Sequence[str]) -> list[int]:
        """As `saved_bytes`, where a unit is recomputed but for the results of the operators `save`.
        Raises CostError."""

        def kept(node: Node) -> int:
            if node.kind == "unit":
                return node_costs.recomputed_bytes(node, self.model, save)
            return node_costs.saved_bytes(node, self.model)

        return self._sums(kept)

    def queued_bytes(self, compiled: bool) -> list[int]:
        """Bytes of each unit that wait for deferred weight gradients of a microbatch; compiled: of
        blocks that are. Raises CostError."""

        def queued(node: Node) -> int:
            return node_costs.queued_bytes(node, self.model, compiled)

        return [sum(calls) for calls in self._once(("queued", compiled), queued, 0)]

    def peaks(self, deferred: bool) -> list[UnitPeak]:
        """The most that each unit takes while it runs. Raises CostError.

        deferred: weight gradients of linear layers are not computed in the backward.
        """
        changed = _deferring if deferred else nullcontext  # of a module

        def peak(node: Node) -> NodePeak:
            return peak_bytes(node, self.model, changed)

        found = self._once(("peaks", deferred), peak, NodePeak(0, 0, 0))
        units = zip(self._calls, self._saved(), found, strict=True)
        return [
            _unit_peak([*map(_NodeMemory, saved, map(self._weight_bytes, nodes), peaks)])
            for nodes, saved, peaks in units
        ]

    def operators(self, peers: Mapping[str, Peers]) -> list[list[NodeOperators]]:
        """What each call of each unit computes, as it is on the first rank of each axis, on meta; those of
        equal calls are one object. Linear layers in float8 are counted in bf16. Raises CostError.
        """

        def exchanged() -> Exchanges:
            return {axis: ranks.exchanged for axis, ranks in peers.items()}

        def cost(node: Node) -> NodeOperators:
            with in_bf16(self.model.modules() if node.kind == "unit" else ()):
                return node_operators(node, self.model, _waiting, exchanged)

        return self._once("operators", cost, NodeOperators({}, {}, {}))

    def nanoseconds(self, device: torch.device) -> list[int]:
        """Measured times of each unit, forward and backward of a microbatch. Raises CostError."""
        return [round(1e9 * sum(times)) for times in self.times(device, False)]

    def times(self, device: torch.device, deferred: bool, repeats: int = 15) -> list[Times]:
        """Measured seconds of each unit and a microbatch, see `node_times`; deferred: where weight
        gradients wait, for which layers are replaced. Raises CostError.

        Functions between units without matrix products count as free.
        """

        def measured(node: Node) -> Times:
            between = node.kind == "function" and node is not self._end
            if between and node_costs.flops(node, self.model) == 0:
                return 0.0, 0.0, 0.0
            return node_times(
                node, self.model, device, _waiting if deferred else _together, repeats
            )

        found = self._costs(measured, (0.0, 0.0, 0.0))
        sums = [[sum(part) for part in zip(*calls, strict=True)] for calls in found]
        return [(forward, inputs, weights) for forward, inputs, weights in sums]

    @property
    def signature(self) -> str:
        """A hash of what is computed: measured times are valid for an equal one."""
        keys = [[self._key(node) for node in calls] for calls in self._calls]
        return hashlib.blake2b(f"{self._parts}{keys}".encode(), digest_size=16).hexdigest()

    def _weight_bytes(self, node: Node) -> int:
        return sum({id(p): p.nbytes for p in self._parameters([node])}.values())

    def _parameters(self, calls: Sequence[Node]) -> Iterator[nn.Parameter]:
        for node in calls:
            if node.kind == "unit":
                yield from self.model.get_submodule(node.target).parameters()
            values = (use.value for use in node.input_nodes)
            yield from (value for value in values if isinstance(value, nn.Parameter))

    def _sums(self, cost: Callable[[Node], int]) -> list[int]:
        """Sum of each unit's calls."""
        return [sum(costs) for costs in self._costs(cost, 0)]

    def _once(self, what: Hashable, cost: Callable[[Node], _T], free: _T) -> list[list[_T]]:
        """As `_costs`, of what is asked for again and again."""
        if what not in self._found:
            self._found[what] = self._costs(cost, free)
        return self._found[what]

    def _costs(self, cost: Callable[[Node], _T], free: _T) -> list[list[_T]]:
        """Of each unit's calls; of equal calls once."""
        known: dict[str, _T] = {}
        for node in (node for calls in self._calls for node in calls):
            key = self._key(node)
            if key not in known:
                # getting an item of a tuple or dict is free
                on_tensors = all(use.value is not None for use in node.input_nodes)
                try:
                    known[key] = cost(node) if on_tensors else free
                except Exception as error:  # of any kind, from the user's model
                    name = getattr(node.target, "__name__", node.target)
                    text = (str(error).strip().splitlines() or [""])[0]
                    raise CostError(
                        f"{name} alone raised {type(error).__name__}: {text}"
                    ) from error
        return [[known[self._key(node)] for node in calls] for calls in self._calls]

    def _key(self, node: Node) -> str:
        """Equal for calls of equal cost."""
        if node not in self._keys:
            target: Hashable = getattr(node.target, "__name__", str(node.target))
            if node.kind == "unit":
                target = _settings(self.model.get_submodule(node.target))
            arguments = tree_map([list(node.args), node.kwargs], _describe)
            chunk = None if node.chunked_head is None else node.chunked_head.chunk
            is_end = node is self._end
            self._keys[node] = repr((target, arguments, node.grad_enabled, chunk, is_end))
        return self._keys[node]


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, Node):
        value = leaf.value
        return value if value is None else (tuple(value.shape), value.dtype, value.requires_grad)
    plain = leaf is None or isinstance(leaf, (bool, int, float, str, slice, torch.dtype))
    return leaf if plain else type(leaf).__name__  # without addresses, which differ between runs


def _settings(module: nn.Module) -> Hashable:
    """Classes, plain attributes and shapes of a module and its submodules."""
    parts = []
    for part in module.modules():
        named = ((key, value) for key, value in vars(part).items() if not key.endswith(_POSITIONS))
        plain = sorted(item for item in named if isinstance(item[1], (bool, int, float, str)))
        parts.append((type(part).__module__, type(part).__qualname__, plain))
    tensors = [*module.named_parameters(), *module.named_buffers()]
    shapes = [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors]
    return repr((parts, shapes))
