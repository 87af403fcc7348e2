"""The memory that training takes on each pipeline rank, estimated: nothing is allocated.

A rank's actions are walked through, and in each the units of its stage, with what is in memory then:
parameters and optimizer state as `fsdp.zero` shards them, gradients from the first backward on,
activations of the microbatches in flight, queued weight gradients, messages, and what a unit takes
while it runs (`UnitCosts.peaks`). What FSDP holds besides (torch 2.13, `_fsdp_param_group.py`):

- ZeRO 1 and 2 gather a whole stage, unit by unit, before its first forward.
- ZeRO 1 accumulates whole gradients to the end of a step, where they are reduced unit by unit.
- ZeRO 2 and 3 make a unit's gradients anew in each backward, and keep the message that reduces them,
  in fp32, until the next unit's are made.
- ZeRO 3 gathers a unit when it runs, and keeps the message; in a backward, the next unit's.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from titanlike.config.schema import Config, Muon, TraceSplit
from titanlike.costs.unit_costs import CostError, UnitCosts, UnitPeak
from titanlike.distributed.placement import experts_of
from titanlike.distributed.sharding import StateBytes, compute_dtype
from titanlike.graph.cut import messages
from titanlike.graph.model_graph import ModelGraph
from titanlike.optim.loss import Loss
from titanlike.parallel.activation_checkpoint import saved_operators
from titanlike.pipeline.order import Act, Order

_REDUCED = 4  # bytes of a gradient in a message that reduces it: fp32

# Muon's copies of its matrices at an update: each is sent, received, and sent and received recompute
_UPDATE = 5

# What a stage was sent is under way before it is used, and what it sends back after that
_MESSAGES = 2


@dataclass(frozen=True)
class _Unit:
    """Bytes of a microbatch, without parameters, and the number of those."""

    parameters: int = 0
    experts: int = 0  # of the parameters, those of experts
    saved: int = 0  # for the backward
    kept: int = 0  # for the backward where it is recomputed
    queued: int = 0  # for deferred weight gradients
    peak: UnitPeak = UnitPeak(0, 0, 0)


@dataclass(frozen=True)
class _Change:
    """Bytes that an action adds: at the most while it runs, and when it is done."""

    most: int
    after: int


@dataclass(frozen=True)
class MemoryParts:
    """Bytes on a rank, by what they are."""

    weights: int = 0
    optimizer: int = 0
    gradients: int = 0
    activations: int = 0  # of the microbatches in flight
    queued: int = 0  # for weight gradients that wait
    messages: int = 0  # between stages
    gathered: int = 0  # parameters of whole stages
    temporary: int = 0  # what a unit takes while it runs, with what is gathered for it alone

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def add(self, other: MemoryParts) -> MemoryParts:
        return MemoryParts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class MemorySample(NamedTuple):
    """Memory of a rank during an action (None = the update), and when it is done."""

    act: Act | None
    most: MemoryParts
    after: MemoryParts


def _parts(changes: Mapping[str, _Change]) -> dict[str, MemoryParts]:
    """What the actions of a stage leave in memory, by what it is."""
    activations, queued = changes["F"].after, -changes["W"].after
    gradients = changes["first I"].after - changes["I"].after
    gathered = changes["gather"].after
    backward = MemoryParts(activations=-activations)
    first = replace(backward, gradients=gradients)
    return {
        "gather": MemoryParts(gathered=gathered),
        "F": MemoryParts(activations=activations),
        "first I": replace(first, queued=queued),
        "I": replace(backward, queued=queued),
        "first B": first,
        "B": backward,
        "W": MemoryParts(queued=-queued),
        "reduce": MemoryParts(gathered=-gathered, gradients=changes["reduce"].after + gathered),
    }


class RankMemory:
    """Of stages that are known, for any choice of blocks that are recomputed."""

    def __init__(
        self,
        config: Config,
        model_graph: ModelGraph,
        targets: Tensor,
        loss: Loss,
        order: Order,
        zero: int,
        parameters: Sequence[Mapping[str, int]],
        deferred: Collection[int] = (),
    ) -> None:
        """targets: of a microbatch, on meta; loss: of what the model returns; parameters: of each
        stage, name -> elements; deferred: stages whose weight gradients wait.

        Units that cannot be run alone count only with their parameters.
        """
        self.tokens = targets.numel()  # of a microbatch
        self.unit_costs = None  # where units are not whole
        self.unknown = "split=trace takes its blocks apart"  # why activations are not counted
        if not isinstance(config.split, TraceSplit):
            self.unit_costs = UnitCosts(model_graph, targets, loss)
            self.unknown = ""
        self._computing = compute_dtype(config).itemsize
        self._deferred = frozenset(deferred)
        hidden: set[str] = set()
        if isinstance(config.optimizer, Muon):
            from titanlike.optim.muon import hidden_matrices

            hidden = hidden_matrices(model_graph.model, config.optimizer)
        by_muon = [sum(stage[name] for name in hidden & stage.keys()) for stage in parameters]
        numel = [sum(stage.values()) for stage in parameters]
        self._of_experts = {
            f"{path}.{name}": parameter
            for path, experts in experts_of(model_graph.model).items()
            for name, parameter in experts.named_parameters()
            if config.ep > 1  # else FSDP has them with their block
        }
        own = [
            sum(stage[name] for name in self._of_experts.keys() & stage.keys())
            for stage in parameters
        ]
        self._kinds = KnownKinds()  # of copies of this, too
        self._arrange(config, order, zero, model_graph.stages, numel, by_muon, own)
        self._units = functools.cache(functools.partial(self._count_units, config))
        for stage in range(order.stages):
            self._units(stage in self._deferred)  # finds out what is unknown
        graphs = model_graph.graphs(model_graph.fields, True)
        flows = [[sum(t.nbytes for t in flow) for flow in messages(graph)] for graph in graphs]
        self._received = [0, *(received for received, _ in flows[1:])]
        self._sent = [sent for _, sent in flows]

    def _arrange(
        self,
        config: Config,
        order: Order,
        zero: int,
        stages: Sequence[Sequence[str]],
        parameters: Sequence[int],
        by_muon: Sequence[int],
        experts: Sequence[int],
    ) -> None:
        """stages: names of their units; parameters, by_muon, experts: how many each has, updates by Muon,
        and has of experts, of which a rank has a part, which is sharded over fewer ranks."""
        self._order, self._stages, self._parameters = order, stages, [*parameters]
        self._zero, self._state = zero, StateBytes.of(config, zero)
        muon = StateBytes.of(config, zero, True).kept
        self._ep, self._experts = config.ep, [*experts]
        self._kept = [  # bytes of each stage's parameters and optimizer state
            self._state.kept * (self._in_shards(numel, of_experts) - own) + muon * own
            for numel, own, of_experts in zip(self._parameters, by_muon, experts, strict=True)
        ]
        shards = self._state.shards
        self._update = self._computing * _UPDATE * max(by_muon) // shards if shards > 1 else 0
        self._known: dict[tuple[int, bool, frozenset[str]], dict[str, _Change]] = {}

    def with_layout(
        self,
        config: Config,
        order: Order,
        zero: int,
        stages: Sequence[Sequence[str]],
        deferred: Collection[int],
        message: int,
        by_muon: bool = False,
    ) -> RankMemory:
        """The same units and microbatches in another layout; message: bytes between any two stages;
        by_muon: whether Muon updates what is in blocks. Weights of several stages count in each."""
        other = copy.copy(self)
        other._deferred = frozenset(deferred)
        units = other._units(False)
        numel = [sum(units[name].parameters for name in names) for names in stages]
        experts = [sum(units[name].experts for name in names) for names in stages]
        muon = numel if by_muon else [0] * len(numel)
        other._arrange(config, order, zero, stages, numel, muon, experts)
        other._received = [0, *([message] * (len(stages) - 1))]
        other._sent = [*([message] * (len(stages) - 1)), 0]
        return other

    def with_recompute(self, config: Config) -> RankMemory:
        """The same, where blocks are recomputed as another config says."""
        other = copy.copy(self)
        other._units = functools.cache(functools.partial(self._count_units, config))
        other._known = {}
        return other

    def unit_parameters(self) -> dict[str, tuple[int, int]]:
        """Of each unit, and of its experts."""
        return {name: (u.parameters, u.experts) for name, u in self._units(False).items()}

    def activations(self, stage: int, recomputed: Collection[str]) -> tuple[int, int]:
        """Bytes of a microbatch of a stage from F on, and of what waits between I and W."""
        changes = self._changes(stage, frozenset(recomputed))
        return changes["F"].after, -changes["W"].after

    def with_deferred(self, stages: Collection[int]) -> RankMemory:
        """The same, where the weight gradients of these stages wait."""
        other = copy.copy(self)
        other._deferred = frozenset(stages)
        return other

    def of_rank(self, rank: int, recomputed: Sequence[Collection[str]]) -> int:
        """Bytes on a pipeline rank; recomputed: blocks of each stage."""
        base = sum(self._base(rank))
        kinds, at = self._kinds(self._order, rank)
        if not kinds:
            return base + self._update
        changes = {s: self._changes(s, frozenset(recomputed[s])) for s in self._local(rank)}
        each = [changes[stage][kind] for stage, kind in kinds]
        most = np.array([change.most for change in each], dtype=np.int64)[at]
        after = np.array([change.after for change in each], dtype=np.int64)[at]
        then = base + np.cumsum(after)
        return int(max(base, (then - after + most).max(), then[-1] + self._update))

    def memory_timeline(
        self, rank: int, recomputed: Sequence[Collection[str]]
    ) -> list[MemorySample]:
        """What is in memory during each action of a rank, and in the update; arguments as `of_rank`."""
        kept, sent = self._base(rank)
        weights = int(sum(self._state.weights * self._parameters[s] for s in self._local(rank)))
        parts = MemoryParts(min(weights, kept), max(0, kept - weights), messages=sent)
        found = []
        known: dict[tuple[int, str], MemoryParts] = {}  # that actions leave, by what it is
        for act, kind in steps(self._order, rank):
            changes = self._changes(act.stage, frozenset(recomputed[act.stage]))
            change = changes[kind]
            at_most = replace(parts, temporary=change.most)
            if (act.stage, kind) not in known:
                known |= {(act.stage, name): own for name, own in _parts(changes).items()}
            parts = parts.add(known[act.stage, kind])
            found.append(MemorySample(act, at_most if change.most > change.after else parts, parts))
        found.append(MemorySample(None, replace(parts, temporary=self._update), parts))
        return found

    def _in_shards(self, numel: int, experts: int) -> int:
        """What counts for parameters whose shards a rank keeps: experts' have fewer shards."""
        return numel + (self._ep - 1) * experts

    def _local(self, rank: int) -> tuple[int, ...]:
        return self._order.local(rank)

    def _base(self, rank: int) -> tuple[int, int]:
        """Bytes of a rank's parameters and optimizer state, and of messages that are under way."""
        local = self._local(rank)
        received = sum(self._received[stage] for stage in local)
        return int(sum(self._kept[stage] for stage in local)), _MESSAGES * received

    def of_ranks(self, recomputed: Sequence[Collection[str]]) -> list[int]:
        """As `of_rank`, of each pipeline rank."""
        return [self.of_rank(rank, recomputed) for rank in range(len(self._order.ranks))]

    def _count_units(self, config: Config, deferred: bool) -> dict[str, _Unit]:
        """By name; deferred: for stages whose weight gradients wait."""
        names = [name for stage in self._stages for name in stage]
        costs = self.unit_costs
        if costs is None:
            return dict.fromkeys(names, _Unit())
        of_experts = {id(parameter) for parameter in self._of_experts.values()}
        own = costs.parameter_sizes(nn.Parameter.numel)
        experts = costs.parameter_sizes(lambda p: p.numel() if id(p) in of_experts else 0)
        try:
            saved, peaks = costs.saved_bytes(), costs.peaks(deferred)
            kept = costs.recomputed_bytes(saved_operators(config))
            queued = costs.queued_bytes(config.compile) if deferred else [0] * len(names)
        except CostError as error:
            self.unknown = str(error)
            rows = zip(names, own, experts, strict=True)
            return {name: _Unit(size, of_experts) for name, size, of_experts in rows}
        rows = zip(own, experts, saved, kept, queued, peaks, strict=True)
        return dict(zip(names, (_Unit(*row) for row in rows), strict=True))

    def _changes(self, stage: int, recompute: frozenset[str]) -> dict[str, _Change]:
        """Of a stage's actions by their kind; recompute: names of the units that are recomputed."""
        deferred = stage in self._deferred
        key = stage, deferred, recompute
        if key in self._known:
            return self._known[key]
        units = [self._units(deferred)[name] for name in self._stages[stage]]
        runs = [
            (unit, name in recompute) for unit, name in zip(units, self._stages[stage], strict=True)
        ]
        first, later = self._backward(runs, stage, True), self._backward(runs, stage, False)
        numel, state = self._parameters[stage], self._state
        gathered = int(state.gathered * numel)
        sizes = sorted(unit.parameters for unit in units)
        largest = sizes[-1] if sizes else 0
        # of a unit that is gathered while the one before is copied to its place
        message = self._computing * sum(sizes[-2:]) if gathered else 0
        reduced = int((_REDUCED + state.reduced_gradient) * largest) if self._whole else 0
        sharded = self._in_shards(numel, self._experts[stage])
        before = numel if self._zero == 1 else sharded
        after = int(state.reduced_gradient * sharded - state.gradient * before)
        queued = sum(unit.queued for unit in units)
        self._known[key] = {
            "gather": _Change(gathered + message, gathered),
            "F": self._forward(runs, stage),
            **{"first I": first, "I": later},
            "first B": _Change(first.most, first.after - queued),  # I and W
            "B": _Change(later.most, later.after - queued),
            "W": _Change(0, -queued),
            "reduce": _Change(reduced, after - gathered),
        }
        return self._known[key]

    @property
    def _whole(self) -> bool:
        """Whether FSDP accumulates whole gradients to the end of a step."""
        return self._state.fsdp and self._zero == 1

    def _held(self, unit: _Unit) -> int:
        """Bytes of the message with a unit's gradients, kept after its backward."""
        return _REDUCED * unit.parameters if self._state.fsdp and self._zero > 1 else 0

    def _gathered(self, unit: _Unit) -> int:
        """Bytes of a unit that is gathered when it runs."""
        return self._computing * unit.parameters if self._state.fsdp and self._zero == 3 else 0

    def _forward(self, runs: Sequence[tuple[_Unit, bool]], stage: int) -> _Change:
        now = most = 0
        held = self._held(runs[0][0]) if runs else 0
        for unit, recompute in runs:
            most = max(most, now + unit.peak.forward + 2 * self._gathered(unit) + held)
            now += unit.kept if recompute else unit.saved
        now += self._sent[stage]
        return _Change(max(most, now), now)

    def _backward(self, runs: Sequence[tuple[_Unit, bool]], stage: int, first: bool) -> _Change:
        """first: of a step, so that gradients are new."""
        state = self._state
        anew = first or (state.fsdp and self._zero > 1) or self._computing < _REDUCED
        now = most = 0  # beyond the begin
        held = self._held(runs[0][0]) if runs else 0
        for at in range(len(runs) - 1, -1, -1):
            unit, recompute = runs[at]
            before = runs[at - 1][0] if at else _Unit()  # whose backward comes next
            now -= unit.kept if recompute else unit.saved
            running = unit.peak.first if anew else unit.peak.later
            if recompute:
                running = max(running, unit.peak.forward)
            gathered = self._gathered(unit) + self._gathered(before)
            most = max(most, now + running + gathered + held)
            held = self._held(unit)
            if held:  # gradients, message, and what comes of it
                reduced = self._computing + _REDUCED + _REDUCED / state.shards
                most = max(most, now + int(reduced * unit.parameters) + self._gathered(before))
            whole = self._zero == 1
            numel = unit.parameters if whole else self._in_shards(unit.parameters, unit.experts)
            now += unit.queued + (int(state.gradient * numel) if first else 0)
        now -= self._sent[stage]
        return _Change(most, now)


# --- what a pipeline rank does in a step, as far as it changes its memory -------------------------


Kinds = tuple[list[tuple[int, str]], np.ndarray]


def steps(order: Order, rank: int) -> Iterator[tuple[Act, str]]:
    """Each action of a rank, with its kind. The gathers before a stage's first action and the reductions
    behind its last are of the same action."""
    left = dict.fromkeys(order.local(rank), order.microbatches)
    forwards: set[int] = set()
    backwards: set[int] = set()
    for act in order.ranks[rank]:
        kind, stage, _ = act
        if kind == "F" and stage not in forwards:
            forwards.add(stage)
            yield act, "gather"
        elif kind in "BI" and stage not in backwards:
            backwards.add(stage)
            kind = "first " + kind
        yield act, kind
        if act.kind in "BW":
            left[stage] -= 1
            if left[stage] == 0:
                yield act, "reduce"


class KnownKinds:
    """Of ranks of orders, each walked once: a search asks for the same again and again."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Order, Kinds]] = {}

    def __call__(self, order: Order, rank: int) -> Kinds:
        """(stages and kinds of the steps, each once; which of these each step is)."""
        key = id(order), rank
        if key not in self._known:
            index: dict[tuple[int, str], int] = {}
            at = [
                index.setdefault((act.stage, kind), len(index)) for act, kind in steps(order, rank)
            ]
            # with the order, so that no later one has its id
            self._known[key] = order, ([*index], np.array(at, dtype=np.int64))
        return self._known[key][1]
