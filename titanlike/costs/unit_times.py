"""How long each unit of a drafted model takes on a device, for a microbatch.

Operators (`graph/node_operators.py`) take what a roofline says. What ranks exchange inside of a unit
(tp, cp, ep) takes the time of their link, for which they wait; but a ring sends keys and values on
while it attends with others, and compiled blocks hide a part of what tp exchanges (`tp_async`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from titanlike.config.hardware import Hardware
from titanlike.config.schema import Config
from titanlike.costs import links
from titanlike.costs.node_operators import Exchanges, NodeOperators, Operator
from titanlike.costs.roofline import Roofline, Seconds
from titanlike.costs.unit_costs import CostError
from titanlike.distributed.collectives import Exchanged
from titanlike.distributed.sharding import compute_dtype
from titanlike.parallel.activation_checkpoint import keeps, saved_operators
from titanlike.parallel.expert_parallel import SEND_TOKENS
from titanlike.training.draft import Draft

# Of what compiled blocks of tensor-parallel ranks exchange so much is beside their products
# (`tp_async`)
_HIDDEN = 0.4


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of a unit and a microbatch, and what a rank sends to those with whom it computes."""

    forward: Seconds = Seconds()
    again: Seconds = Seconds()  # where it is recomputed
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
                roofline.again(node, save),
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
        again = forward * unit.again.device / (unit.forward.device or 1.0)
        products = unit.forward.products / (unit.forward.device or 1.0)
        found[name] = replace(
            unit,
            forward=Seconds(forward, forward * products),
            again=Seconds(again),
            input_gradient=Seconds(inputs, inputs * products),
            weight_gradient=Seconds(weights, weights),
        )
    return found
