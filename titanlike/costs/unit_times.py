"""How long each unit of a drafted model takes on a device, for a microbatch.

Operators (`graph/node_operators.py`) take what a roofline says. What ranks exchange inside of a unit
(tp, cp, ep) takes the time of their link, for which they wait; but a ring sends keys and values on
while it attends with others, and compiled blocks hide a part of what tp exchanges (`tp_async`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from titanlike.config.hardware import Hardware
from titanlike.config.schema import Config, Float8Precision
from titanlike.costs import links
from titanlike.costs.node_costs import ATTENTION, Exchanges, NodeOperators, Operator, Operators
from titanlike.costs.unit_costs import CostError
from titanlike.distributed.collectives import Exchanged
from titanlike.distributed.sharding import compute_dtype
from titanlike.parallel.activation_checkpoint import keeps, saved_operators
from titanlike.parallel.expert_parallel import SEND_TOKENS
from titanlike.training.draft import Draft

# Of what operators that are no products read and write, and of their launches, compiled code leaves
# so much: a chain of them becomes one kernel.
_FUSED_BYTES, _FUSED_LAUNCHES = 0.6, 0.25

# To multiply in float8, an operand is read for its largest value, and written in a byte
_CAST_BYTES = 5
_CAST_BYTES_COMPILED = 2  # its values are read where they are made


@dataclass(frozen=True)
class Seconds:
    """Of some operators: device, of it in products and attention, and how many are launched."""

    device: float = 0.0
    products: float = 0.0
    launches: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        device, products = self.device + other.device, self.products + other.products
        return Seconds(device, products, self.launches + other.launches)


@dataclass(frozen=True)
class Roofline:
    """A device, and what of a config decides how fast it computes."""

    hardware: Hardware
    compiled: bool = False  # blocks are
    tf32: bool = False
    float8: bool = False  # products of blocks are
    float8_weights: bool = True  # and those that give weight gradients

    @classmethod
    def of(cls, config: Config, hardware: Hardware) -> Roofline:
        precision = config.precision
        float8 = isinstance(precision, Float8Precision)
        weights = isinstance(precision, Float8Precision) and (
            precision.recipe != "rowwise_with_gw_hp"
        )
        return cls(hardware, config.compile, config.matmul_precision != "highest", float8, weights)

    def seconds(
        self,
        operators: Operators,
        block: bool,
        *,
        weights: bool = False,
        without: Sequence[str] = (),
    ) -> Seconds:
        """block: of a block; weights: gradients of weights; without: patterns of operators whose
        results are there already."""
        total = Seconds()
        for operator, count in operators.items():
            if without and any(fnmatchcase(operator.name, pattern) for pattern in without):
                continue
            one = self._one(operator, block, weights)
            total += Seconds(count * one.device, count * one.products, count * one.launches)
        return total

    def attention(self, operators: Operators) -> float:
        """Seconds of fused attention among them."""
        found = {operator: n for operator, n in operators.items() if operator.name == ATTENTION}
        return self.seconds(found, True).device

    def recompute(self, node: NodeOperators, save: Sequence[str]) -> Seconds:
        """Of a forward that runs again in the backward, but for the operators `save`."""
        return self.seconds(node.forward, True, without=save)

    def _one(self, operator: Operator, block: bool, weights: bool) -> Seconds:
        device = self.hardware
        memory = operator.bytes / (device.memory_bandwidth * device.memory_efficiency)
        if operator.name == ATTENTION:
            reached = self._peak(operator) * device.attention_efficiency
            seconds = max(operator.flops / reached, memory) + device.kernel_seconds
            return Seconds(seconds, seconds, 1)
        if operator.flops:
            float8 = self.float8 and block and operator.sizes is not None
            if float8 and (self.float8_weights or not weights):
                seconds = self._float8(operator)
            else:
                reached = self._peak(operator) * self._share(operator)
                seconds = max(operator.flops / reached, memory)
            seconds += device.kernel_seconds
            return Seconds(seconds, seconds, 1)
        if self.compiled and block:
            kernels = _FUSED_LAUNCHES * device.kernel_seconds
            return Seconds(_FUSED_BYTES * memory + kernels, 0.0, _FUSED_LAUNCHES)
        return Seconds(memory + device.kernel_seconds, 0.0, 1)

    def _float8(self, operator: Operator) -> float:
        device = self.hardware
        assert operator.sizes is not None
        rows, columns, summed = operator.sizes
        each = _CAST_BYTES_COMPILED if self.compiled else _CAST_BYTES
        cast = each * (rows + columns) * summed
        seconds = operator.flops / (device.fp8_flops * self._share(operator))
        return seconds + cast / (device.memory_bandwidth * device.memory_efficiency)

    def _peak(self, operator: Operator) -> float:
        if operator.itemsize <= 2:
            return self.hardware.bf16_flops
        return self.hardware.tf32_flops if self.tf32 else self.hardware.fp32_flops

    def _share(self, operator: Operator) -> float:
        share, half = self.hardware.matmul_efficiency, self.hardware.matmul_half
        for size in operator.sizes or ():
            share *= size / (size + half)
        return share


# --- how long each unit of a drafted model takes on a device, for a microbatch --------------------


# Of what compiled blocks of tensor-parallel ranks exchange so much is beside their products
# (`tp_async`)
_HIDDEN = 0.4


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of a unit and a microbatch, and what a rank sends to those with whom it computes."""

    forward: Seconds = Seconds()
    recompute: Seconds = Seconds()  # where it is recomputed
    input_gradient: Seconds = Seconds()
    weight_gradient: Seconds = Seconds()
    parameters: int = 0
    experts: int = 0  # of the parameters, those of experts
    # by axis: seconds for which ranks wait, and bytes that are sent
    waits_forward: Mapping[str, float] = field(default_factory=dict)
    waits_backward: Mapping[str, float] = field(default_factory=dict)
    sent_forward: Mapping[str, int] = field(default_factory=dict)
    sent_backward: Mapping[str, int] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()  # axes whose exchanges of the forward are not repeated

    @property
    def exchanged_forward(self) -> float:
        return sum(self.waits_forward.values())

    @property
    def exchanged_again(self) -> float:
        return sum(s for axis, s in self.waits_forward.items() if axis not in self.kept)

    @property
    def exchanged_backward(self) -> float:
        return sum(self.waits_backward.values())


class _Exchanges:
    """How long what is exchanged takes, by the way each axis does it."""

    def __init__(self, config: Config, draft: Draft, hardware: Hardware) -> None:
        context = getattr(draft.peers.get("cp"), "method", None)
        self._links = {axis: links.link(config, axis, hardware) for axis in draft.peers}
        self._rates = {axis: link.bandwidth for axis, link in self._links.items()}
        for axis in self._rates:
            if axis == "ep" or (axis == "cp" and context == "ulysses"):
                self._rates[axis] = self._links[axis].to_all
            elif axis == "cp" and context == "ring":
                self._rates[axis] = self._links[axis].to_next
        self._visible = 1 - _HIDDEN * config.tp_async
        # the first block of a ring is of keys that are there, before anything is sent
        self._beside = 1 - 1 / config.cp

    def seconds(self, exchanged: Exchanges, attention: float) -> dict[str, float]:
        """By axis, those for which a rank waits; attention: seconds in which it attends."""
        found = {}
        for axis, values in exchanged.items():
            sent, link, rate = Exchanged(*values), self._links[axis], self._rates[axis]
            seconds = link.sent(sent.nbytes, sent.messages, rate)
            hidden = min(sent.beside / rate, self._beside * attention)
            found[axis] = (seconds - hidden) * (self._visible if axis == "tp" else 1.0)
        return found


def unit_times(config: Config, draft: Draft, roofline: Roofline) -> dict[str, UnitTimes]:
    """By the names of the units. Raises CostError where they cannot be run alone."""
    memory = draft.memory()
    if memory.unit_costs is None:
        raise CostError(memory.unknown)
    calls = memory.unit_costs.operators(draft.peers)
    numel = memory.unit_parameters()
    blocks = {unit.name for unit in draft.model_graph.units if unit.block}
    exchanges, save = _Exchanges(config, draft, roofline.hardware), saved_operators(config)
    kept = frozenset({"ep"} if keeps(SEND_TOKENS, save) else ())
    names = [name for stage in draft.stages for name in stage]
    known: dict[tuple[tuple[int, ...], bool], UnitTimes] = {}  # of equal calls

    def times(nodes: Sequence[NodeOperators], block: bool) -> UnitTimes:
        total = [Seconds()] * 4
        waits: tuple[Any, Any] = Counter(), Counter()
        sent: tuple[Any, Any] = Counter(), Counter()
        for node in nodes:
            found = (
                roofline.seconds(node.forward, block),
                roofline.recompute(node, save),
                roofline.seconds(node.input_gradient, block),
                roofline.seconds(node.weight_gradient, block, weights=True),
            )
            total = [a + b for a, b in zip(total, found, strict=True)]
            ways = (
                (node.exchanged_forward, node.forward),
                (node.exchanged_backward, node.input_gradient),
            )
            for way, (exchanged, operators) in enumerate(ways):
                attends = roofline.attention(operators)
                waits[way].update(exchanges.seconds(exchanged, attends))
                sent[way].update({axis: values[0] for axis, values in exchanged.items()})
        forward, backward, inputs, weights = total
        return UnitTimes(forward, backward, inputs, weights, 0, 0, *waits, *sent, kept)

    found: dict[str, UnitTimes] = {}
    for name, nodes in zip(names, calls, strict=True):
        key = tuple(map(id, nodes)), name in blocks
        if key not in known:
            known[key] = times(nodes, name in blocks)
        found[name] = replace(known[key], parameters=numel[name][0], experts=numel[name][1])
    return found


def guessed_times(config: Config, draft: Draft, roofline: Roofline) -> dict[str, UnitTimes]:
    """Of stages whose units cannot be run alone: by their parameters, all in a first unit."""
    tokens, itemsize = draft.memory().tokens, compute_dtype(config).itemsize
    found: dict[str, UnitTimes] = {}
    for stage, names in enumerate(draft.stages):
        numel = draft.stage_numel(stage)
        product = {Operator("aten.mm", 2 * numel * tokens, itemsize * numel, itemsize): 1}
        each = roofline.seconds(product, True)
        found |= {name: UnitTimes() for name in names}
        if names:
            found[names[0]] = UnitTimes(each, each, each, each, parameters=numel)
    return found


def as_measured(
    units: Mapping[str, UnitTimes], measured: Sequence[Sequence[float]]
) -> dict[str, UnitTimes]:
    """With seconds that were measured (forward, backward, weight gradients that wait); of what runs
    again the share that was estimated."""
    found = {}
    for (name, unit), (forward, inputs, weights) in zip(units.items(), measured, strict=True):
        recompute = forward * unit.recompute.device / (unit.forward.device or 1.0)
        products = unit.forward.products / (unit.forward.device or 1.0)
        found[name] = replace(
            unit,
            forward=Seconds(forward, forward * products),
            recompute=Seconds(recompute),
            input_gradient=Seconds(inputs, inputs * products),
            weight_gradient=Seconds(weights, weights),
        )
    return found
