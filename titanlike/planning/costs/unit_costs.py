"""The costs of a model's units: parameters, FLOPs, memory, operators, or seconds on a device.

A unit's cost includes the operations between it and its neighbours (a residual, a matmul with a
weight) that a stage would run if it began or ended there; the last unit's includes the loss. Each
call is run alone (`node_costs.py`), and equal calls (modules of one class with equal settings, on
tensors of equal shapes) only once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from titanlike.core.config.schema import Config
from titanlike.core.distributed.placement import experts_of, in_bf16, in_float8
from titanlike.core.graph.cut import cut, unit_starts
from titanlike.core.graph.loss import Loss
from titanlike.core.graph.model_graph import ModelGraph
from titanlike.core.graph.recording import Node, tree_map
from titanlike.planning.costs.node_costs import NodeCosts, Times, UnitPeak, count, node_times

if TYPE_CHECKING:  # imported where a layout has them
    from titanlike.core.distributed.collectives import GroupInfo

# Attributes that hold a module's position, which does not change its cost
_POSITIONS = ("index", "idx", "layer_number", "layer_id")

_T = TypeVar("_T")


class CostError(ValueError):
    """A call that cannot be run alone."""


class UnitMemory(NamedTuple):
    """Parameters of a unit, and bytes per microbatch without parameters."""

    parameters: int = 0
    experts: int = 0  # parameters of experts
    saved: int = 0  # for the backward
    kept: int = 0  # for the backward, if the unit is recomputed
    queued: int = 0  # for deferred weight gradients
    peak: UnitPeak = UnitPeak(0, 0, 0)
    float8: int = 0  # parameters that FSDP gathers in float8

    def gathered(self, itemsize: int) -> int:
        """Bytes of the parameters as FSDP gathers them; itemsize: of those not in float8."""
        return itemsize * (self.parameters - self.float8) + self.float8


def expert_parameters(model: nn.Module, config: Config) -> dict[str, nn.Parameter]:
    """Parameters sharded over ep, by name; empty without ep."""
    experts = experts_of(model).items() if config.ep > 1 else ()
    return {f"{path}.{name}": p for path, part in experts for name, p in part.named_parameters()}


class UnitCosts:
    """The calls of each unit in the training forward of one microbatch, and their costs.

    All methods except `memory` raise CostError for a call that cannot be run alone.
    """

    def __init__(
        self,
        model_graph: ModelGraph,
        targets: Tensor,
        loss: Loss,
        peers: Mapping[str, GroupInfo] | None = None,
    ) -> None:
        """targets: of one microbatch, on meta; peers: axis -> group in which modules communicate
        activations, which is counted as well."""
        self.model, self.microbatch_size = model_graph.model, model_graph.microbatch_size
        self.names = [unit.name for unit in model_graph.units]
        self.unknown = ""  # why `memory` knows only parameters
        recording = model_graph.recording(model_graph.fields, True)
        end = model_graph.last_stage(cut(recording, [list(recording.starts)])[0]).nodes[-1]
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
        self._peers = peers or {}
        # with context parallelism attention reads more tokens than a unit's inputs have
        self._parts = model_graph.sequence_parts
        self._counted: dict[Hashable, list[list[NodeCosts]]] = {}
        self._memory: dict[Hashable, dict[str, UnitMemory]] = {}
        self.model.train()

    def parameter_table(self, size: Callable[[nn.Parameter], int]) -> np.ndarray:
        """[start, stop] -> summed `size` of the parameters of units start ... stop - 1. A tied
        weight that several of these units use counts once."""
        units = [{id(p): size(p) for p in self._parameters(calls)} for calls in self._calls]
        table = np.zeros((len(units) + 1, len(units) + 1), dtype=np.int64)
        for start in range(len(units)):
            seen: set[int] = set()
            total = 0
            for stop, parameters in enumerate(units[start:], start + 1):
                total += sum(size for key, size in parameters.items() if key not in seen)
                seen.update(parameters)
                table[start, stop] = total
        return table

    def flops(self) -> list[int]:
        """FLOPs per unit, forward and backward of a microbatch: matmuls, convolutions and attention
        (causal attention counted in full)."""
        return [sum(node.flops for node in nodes) for nodes in self._counts(False)]

    def saved_bytes(self) -> list[int]:
        """Bytes per unit that a microbatch saves for the backward."""
        return [sum(node.saved for node in nodes) for nodes in self._counts(False)]

    def memory(self, config: Config, deferred: bool) -> dict[str, UnitMemory]:
        """Memory of a microbatch in each unit: its calls one after the other, and their backwards
        in reverse. For units that cannot be run alone only parameters are known.

        deferred: with deferred weight gradients of linear layers, whose inputs are copied per layer
        if units are compiled.
        """
        save = config.activation_checkpoint.saved  # operators such as "aten.mm"
        tensorwise = getattr(config.precision, "recipe", "") == "tensorwise"
        # ranks over which FSDP gathers weights in float8, see `techniques/low_precision/float8.py`; 1 = it gathers none so
        shards = config.shards if tensorwise and not config.fsdp.cpu_offload else 1
        key = tuple(save), deferred, config.compile, config.ep > 1, shards
        if key in self._memory:
            return self._memory[key]
        experts = {id(p) for p in expert_parameters(self.model, config).values()}
        layers: list[Any] = [m for m in self.model.modules() if in_float8(m)]
        float8 = {id(m.weight) for m in layers if shards > 1 and len(m.weight) % shards == 0}
        units = []
        try:
            saved_of, nodes_of = self._counts(False), self._counts(deferred)
        except CostError as error:
            self.unknown = str(error)
            saved_of = nodes_of = [[NodeCosts()] * len(calls) for calls in self._calls]
        for calls, saved, nodes in zip(self._calls, saved_of, nodes_of, strict=True):
            sizes = {id(p): p.numel() for p in self._parameters(calls)}
            sizes_of_experts = (size for key, size in sizes.items() if key in experts)
            in_float8_too = sum(size for key, size in sizes.items() if key in float8)
            parameters = ({id(p): p.nbytes for p in self._parameters([call])} for call in calls)
            weights = [sum(sizes.values()) for sizes in parameters]
            forward = first = later = before = kept_bytes = 0
            after = sum(weights)
            for call, node, at_once, weight in zip(calls, nodes, saved, weights, strict=True):
                after -= weight  # bytes of gradients of later calls, whose backward comes first
                forward = max(forward, before + node.peak.forward)
                before += at_once.saved
                kept_bytes += at_once.kept(save) if call.kind == "unit" else at_once.saved
                first = max(first, before + node.peak.first + after)
                later = max(later, before + node.peak.later)
            queued = sum(node.queued[config.compile] for node in nodes)
            peak = UnitPeak(forward, first, later)
            counted = () if self.unknown else (before, kept_bytes, queued, peak)
            unit = UnitMemory(sum(sizes.values()), sum(sizes_of_experts), *counted)
            units.append(unit._replace(float8=in_float8_too))
        return self._memory.setdefault(key, dict(zip(self.names, units, strict=True)))

    def operators(self) -> list[list[NodeCosts]]:
        """Costs of each call of each unit on the first rank of each axis, with weight gradients
        separate; equal calls share one object. float8 linear layers are counted in bf16."""
        with in_bf16(self.model.modules()) as layers:
            return self._counts(True, bool(layers))

    def times(self, device: torch.device, deferred: bool, repeats: int = 15) -> list[Times]:
        """Measured seconds of each unit and microbatch, see `node_times`; deferred: with deferred
        weight gradients.

        Functions between units without matmuls count as free.
        """

        def measured(node: Node) -> Times:
            between = node.kind == "function" and node is not self._end
            if between and count(node, self.model, False).flops == 0:
                return 0.0, 0.0, 0.0
            return node_times(node, self.model, device, deferred, repeats)

        call_times = self._costs(measured, (0.0, 0.0, 0.0))
        sums = ([sum(part) for part in zip(*calls, strict=True)] for calls in call_times)
        return [(forward, inputs, weights) for forward, inputs, weights in sums]

    @property
    def signature(self) -> str:
        """A hash of what is computed; measured times are valid for equal hashes."""
        keys = [[self._key(node) for node in calls] for calls in self._calls]
        return hashlib.blake2b(f"{self._parts}{keys}".encode(), digest_size=16).hexdigest()

    def _parameters(self, calls: Sequence[Node]) -> Iterator[nn.Parameter]:
        for node in calls:
            if node.kind == "unit":
                yield from self.model.get_submodule(node.target).parameters()
            values = (use.value for use in node.input_nodes)
            yield from (value for value in values if isinstance(value, nn.Parameter))

    def _counts(self, deferred: bool, in_bf16: bool = False) -> list[list[NodeCosts]]:
        """Counts of each unit's calls; in_bf16: while float8 layers compute in bf16."""
        key = deferred, in_bf16
        if key not in self._counted:
            cost = partial(count, model=self.model, deferred=deferred, peers=self._peers)
            self._counted[key] = self._costs(cost, NodeCosts())
        return self._counted[key]

    def _costs(self, cost: Callable[[Node], _T], free: _T) -> list[list[_T]]:
        """Costs of each unit's calls, computed once for equal calls."""
        costs: dict[str, _T] = {}
        for node in (node for calls in self._calls for node in calls):
            key = self._key(node)
            if key not in costs:
                # getting an item of a tuple or dict is free
                on_tensors = all(use.value is not None for use in node.input_nodes)
                try:
                    costs[key] = cost(node) if on_tensors else free
                except Exception as error:  # of any kind, from the user's model
                    name = getattr(node.target, "__name__", node.target)
                    text = (str(error).strip().splitlines() or [""])[0]
                    raise CostError(
                        f"{name} alone raised {type(error).__name__}: {text}"
                    ) from error
        return [[costs[self._key(node)] for node in calls] for calls in self._calls]

    def _key(self, node: Node) -> str:
        """A key that is equal for calls of equal cost."""
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
    return leaf if plain else type(leaf).__name__  # a repr may have addresses


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
