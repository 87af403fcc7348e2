"""Estimate the memory of training on each pipeline rank, without allocating.

A rank's actions are walked through, and in each action the units of its stage, with everything in
memory at that time: parameters and optimizer state as sharded by `fsdp.zero`, gradients from the
first backward on, activations of the microbatches in flight, queued weight gradients, P2P buffers,
and the temporary memory of a unit while it runs (`UnitCosts.peaks`). FSDP adds (torch 2.13,
`_fsdp_param_group.py`):

- ZeRO 1 and 2 all-gather a whole stage, unit by unit, before its first forward.
- ZeRO 1 accumulates unsharded gradients until the end of a step, where they are reduced unit by unit.
- ZeRO 2 and 3 allocate a unit's gradients in each backward, and keep the fp32 reduce-scatter input
  until the next unit's gradients are there.
- ZeRO 3 all-gathers a unit when it runs, and keeps the buffer; in a backward also the next unit's.

With numerics=exact (`techniques/exact.py`) each microbatch allocates gradients, and complete ones are
partial sums in a binary tree: after k microbatches as many full fp32 gradients as k has bits.
Experts have one gradient for the grain of each ep rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from titanlike.core.config.schema import Config
from titanlike.core.distributed.sharding import StateBytes, compute_dtype
from titanlike.core.graph.cut import messages
from titanlike.core.graph.model_graph import ModelGraph
from titanlike.core.optim.optimizer import hidden_matrices, update_bytes
from titanlike.core.pipeline.order import Action, Order
from titanlike.planning.costs.unit_costs import UnitCosts, UnitMemory, expert_parameters

_REDUCED = 4  # bytes per gradient element in a reduction: fp32

# Muon's copies of its matrices in an update: two all-to-alls with a send and a receive buffer each
_UPDATE = 5

# A stage's receive buffers: activations before they are used, and gradients after
_MESSAGES = 2


@dataclass(frozen=True)
class MemoryParts:
    """Bytes on a rank, by purpose."""

    weights: int = 0
    optimizer: int = 0
    gradients: int = 0
    activations: int = 0  # of the microbatches in flight
    queued: int = 0  # inputs of deferred weight gradients
    messages: int = 0  # P2P buffers between stages
    gathered: int = 0  # parameters all-gathered for a whole stage
    temporary: int = 0  # of a running unit, including parameters gathered for it

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def add(self, more: Mapping[str, int]) -> MemoryParts:
        return replace(self, **{name: getattr(self, name) + size for name, size in more.items()})


class MemorySample(NamedTuple):
    """Memory of a rank during an action (None = the update) at most, and after it."""

    act: Action | None
    most: MemoryParts
    after: MemoryParts


class _Change:
    """Bytes that an action adds: `most` while it runs, `after` when it is done, also by purpose
    (`parts`)."""

    def __init__(self, most: int, **parts: int) -> None:
        self.most, self.parts, self.after = most, parts, sum(parts.values())


class Skip(NamedTuple):
    """A skip connection: a microbatch's value (or several) that bypasses stages."""

    source: int
    to: int  # a later stage, not the next
    nbytes: int
    back: int  # bytes of gradients sent back


@dataclass(frozen=True)
class StageLayout:
    """The inputs of the memory and time of stages; lists have one entry per stage."""

    stages: Sequence[Sequence[str]]  # names of their units
    deferred: Collection[int]  # stages with deferred weight gradients
    place: Sequence[int]  # pipeline rank of each stage
    zero: int
    microbatches: int
    numel: Sequence[int]  # parameters, on a tensor-parallel rank
    experts: Sequence[int]  # those of experts, sharded over ep
    received: Sequence[int]  # bytes received from the previous stage, 0 for the first
    sent: Sequence[int]  # bytes sent to the next stage; last stage: bytes of the model's output
    gathered_matrices: Sequence[int]  # parameters of matrices that Muon gathers
    # bytes of optimizer state, and of that for experts
    moments: Sequence[tuple[int, int]]
    touched: Sequence[int]  # bytes of memory traffic of the optimizer's update, unsharded
    recomputed: Sequence[Collection[str]] = ()  # names of units
    orthogonalized: Sequence[float] = ()  # FLOPs of Muon's updates
    skips: Sequence[Skip] = ()


class RankMemory:
    """The memory of stages in a layout, for any choice of recomputed blocks."""

    def __init__(
        self,
        config: Config,
        costs: UnitCosts | None,
        tokens: int,
        order: Order,
        layout: StageLayout,
    ) -> None:
        """costs: None with split=trace; tokens: in a microbatch.

        Weights shared by several stages count in each; units that cannot be run alone count only
        with their parameters.
        """
        self.unit_costs, self.tokens, self.layout = costs, tokens, layout
        self._config, self._order = config, order
        self._computing = compute_dtype(config.precision).itemsize
        self._state = StateBytes.of(config, layout.zero)
        none, one = (StateBytes.of(config, layout.zero, moments).kept for moments in (0, 1))
        self._kept = [  # bytes of each stage's parameters and optimizer state
            none * self._in_shards(numel, experts) + (one - none) * self._in_shards(*moments)
            for numel, experts, moments in zip(
                layout.numel, layout.experts, layout.moments, strict=True
            )
        ]
        self._kept_experts = [
            config.ep_shards * (none * experts + (one - none) * moments)
            for experts, (_, moments) in zip(layout.experts, layout.moments, strict=True)
        ]
        shards = self._state.shards
        self._update = (
            self._computing * _UPDATE * max(layout.gathered_matrices) // shards if shards > 1 else 0
        )
        self._stage_changes: dict[tuple[int, frozenset[str]], dict[str, _Change]] = {}
        # changes of equal stages, of all layouts: a search evaluates the same ones repeatedly
        self._counted: dict[object, dict[str, _Change]] = {}
        mesh = config.cp, config.ep, config.ep_shards, config.exact, self._computing
        self._alike = self._state, mesh, layout.zero, layout.microbatches
        # caches the walk of each (order, rank): a search evaluates the same ones repeatedly
        self._walks: dict[tuple[int, int], tuple[Order, list[tuple[int, str]], np.ndarray]] = {}

    def with_layout(self, config: Config, order: Order, layout: StageLayout) -> RankMemory:
        """The same units and microbatches in a different layout; shares the caches."""
        other = RankMemory(config, self.unit_costs, self.tokens, order, layout)
        other._walks, other._counted = self._walks, self._counted
        return other

    def changed(self, **changes: Any) -> RankMemory:
        """A copy with changed fields of `layout`; shares the caches."""
        return self.with_layout(self._config, self._order, replace(self.layout, **changes))

    def units(self, deferred: bool = False) -> dict[str, UnitMemory]:
        """Memory of units by name; deferred: with deferred weight gradients."""
        if self.unit_costs is None:
            return {name: UnitMemory() for stage in self.layout.stages for name in stage}
        return self.unit_costs.memory(self._config, deferred)

    @property
    def unknown(self) -> str:
        """Why activations are not counted; "" = they are."""
        if self.unit_costs is None:
            return "split=trace takes its blocks apart"
        for deferred in {s in self.layout.deferred for s in range(self._order.stages)}:
            self.units(deferred)
        return self.unit_costs.unknown

    def of_rank(self, rank: int, recomputed: Sequence[Collection[str]]) -> int:
        """Peak bytes on a pipeline rank; recomputed: blocks of each stage."""
        base = sum(self._base(rank))
        key = id(self._order), rank
        if key not in self._walks:
            index: dict[tuple[int, str], int] = {}
            steps_of_rank = [
                index.setdefault((a.stage, kind), len(index)) for a, kind in self._steps(rank)
            ]
            # keeping the order alive keeps its id unique
            self._walks[key] = self._order, [*index], np.array(steps_of_rank, dtype=np.int64)
        _, kinds, steps = self._walks[key]
        if not kinds:
            return base + self._update
        stage_changes = {
            s: self._changes(s, frozenset(recomputed[s])) for s in self._order.local(rank)
        }
        changes = [stage_changes[stage][kind] for stage, kind in kinds]
        peaks = np.array([change.most for change in changes], dtype=np.int64)[steps]
        after = np.array([change.after for change in changes], dtype=np.int64)[steps]
        then = base + np.cumsum(after)
        return int(max(base, (then - after + peaks).max(), then[-1] + self._update))

    def of_ranks(self, recomputed: Sequence[Collection[str]]) -> list[int]:
        """Peak bytes on each pipeline rank, see `of_rank`."""
        return [self.of_rank(rank, recomputed) for rank in range(len(self._order.ranks))]

    def of_experts(self, rank: int) -> int:
        """Bytes of experts' parameters and optimizer state on a pipeline rank, with ep."""
        return int(sum(self._kept_experts[stage] for stage in self._order.local(rank)))

    def fit(
        self, candidates: Sequence[Sequence[str]], limit: int
    ) -> tuple[list[list[str]], list[int]]:
        """Choose the fewest blocks to recompute so that no rank exceeds `limit` bytes, all if none
        suffice.

        candidates: blocks of each stage. Returns (blocks of each stage, bytes of each rank). Ranks
        are independent. On a rank of several stages the next block is the one that frees the most
        memory: of the stage with the most microbatches in flight.
        """
        blocks: list[list[str]] = [[] for _ in candidates]
        sizes = []

        def with_one_more(stage: int) -> list[list[str]]:
            more = candidates[stage][: len(blocks[stage]) + 1]
            return [*blocks[:stage], [*more], *blocks[stage + 1 :]]

        for rank in range(len(self._order.ranks)):
            while (size := self.of_rank(rank, blocks)) > limit:
                local = self._order.local(rank)
                stages = [s for s in local if len(blocks[s]) < len(candidates[s])]
                if not stages:
                    break
                blocks = min(map(with_one_more, stages), key=lambda b: self.of_rank(rank, b))
            sizes.append(size)
        return blocks, sizes

    def memory_timeline(
        self, rank: int, recomputed: Sequence[Collection[str]]
    ) -> list[MemorySample]:
        """Memory during each action of a rank, and during the update; arguments as `of_rank`."""
        persistent, sent = self._base(rank)
        sizes = [*zip(self.layout.numel, self.layout.experts, strict=True)]
        local = (self._in_shards(*sizes[stage]) for stage in self._order.local(rank))
        weights = int(sum(self._state.weights * numel for numel in local))
        now = MemoryParts(min(weights, persistent), max(0, persistent - weights), messages=sent)
        samples = []
        for act, kind in self._steps(rank):
            change = self._changes(act.stage, frozenset(recomputed[act.stage]))[kind]
            during, now = replace(now, temporary=change.most), now.add(change.parts)
            samples.append(MemorySample(act, during if change.most > change.after else now, now))
        samples.append(MemorySample(None, replace(now, temporary=self._update), now))
        return samples

    def _steps(self, rank: int) -> Iterator[tuple[Action, str]]:
        """Yield each action of a rank with its kind. All-gathers before a stage's first action and
        reductions after its last one are yielded with that action."""
        order = self._order
        left = dict.fromkeys(order.local(rank), order.microbatches)
        forwards: set[int] = set()
        backwards: set[int] = set()
        done = dict.fromkeys(left, 0)  # microbatches whose gradients are complete
        for act in order.ranks[rank]:
            kind, stage, _ = act
            if kind == "F" and stage not in forwards:
                forwards.add(stage)
                yield act, "gather"
            elif kind in "BI" and stage not in backwards:
                backwards.add(stage)
                kind = kind if self._config.exact else "first " + kind
            if self._config.exact and kind in "BW":
                done[stage] += 1
                sums = done[stage].bit_count() - (done[stage] - 1).bit_count()
                kind = f"{kind} and {sums} sums"
            yield act, kind
            if act.kind in "BW":
                left[stage] -= 1
                if left[stage] == 0:
                    yield act, "reduce"

    def _in_shards(self, numel: int, experts: int) -> int:
        """Elements or bytes to divide by the number of shards; experts count more, having fewer
        shards."""
        return numel + (self._config.ep_shards - 1) * experts

    def _base(self, rank: int) -> tuple[int, int]:
        """Bytes of a rank's parameters and optimizer state, and of its receive buffers."""
        local = self._order.local(rank)
        received = sum(self.layout.received[stage] for stage in local)
        received += sum(skip.nbytes for skip in self.layout.skips if skip.to in local)
        return int(sum(self._kept[stage] for stage in local)), _MESSAGES * received

    def _changes(self, stage: int, recompute: frozenset[str]) -> dict[str, _Change]:
        """Memory changes by kind of a stage's actions; recompute: names of the recomputed units."""
        key, layout = (stage, recompute), self.layout
        if key not in self._stage_changes:
            table = self.units(stage in layout.deferred)
            runs = tuple((table[name], name in recompute) for name in layout.stages[stage])
            sent = layout.sent[stage]
            sent += sum(skip.nbytes for skip in layout.skips if skip.source == stage)
            alike = *self._alike, runs, layout.numel[stage], layout.experts[stage], sent
            if alike not in self._counted:
                self._counted[alike] = self._count(*alike[-4:])
            self._stage_changes[key] = self._counted[alike]
        return self._stage_changes[key]

    def _count(
        self, runs: Sequence[tuple[UnitMemory, bool]], numel: int, experts: int, sent: int
    ) -> dict[str, _Change]:
        """Compute `_changes`. runs: (unit, whether it is recomputed); sent: bytes of the outputs."""
        layout, state = self.layout, self._state
        units = [unit for unit, _ in runs]
        held = [u.kept if recomputed else u.saved for u, recomputed in runs]
        activations = sum(held) + sent
        queued = sum(unit.queued for unit in units)
        gathered = int(state.gathered * numel)
        if gathered:
            gathered -= (self._computing - 1) * sum(unit.float8 for unit in units)
        sizes = sorted(unit.parameters for unit in units)
        # buffer of a unit that is gathered while the previous one is copied out
        buffers = sorted(unit.gathered(self._computing) for unit in units)
        message = sum(buffers[-2:]) if gathered else 0
        if self._keeps_experts:
            gathered += self._computing * experts
        if self._config.precision.name == "float8" and state.shards == self._config.ep_shards > 1:
            gathered += 2 * experts  # casts for two products, beside what FSDP has
        sharded = self._in_shards(numel, experts)
        unsharded = layout.zero == 1
        gradients = state.gradient * (numel if unsharded else sharded)  # once all are allocated
        reduced = 0  # bytes to reduce the largest unit's gradients, if they are unsharded
        if state.fsdp and unsharded and sizes:
            reduced = int((_REDUCED + state.reduced_gradient) * sizes[-1])
        local = [
            u.parameters if unsharded else self._in_shards(u.parameters, u.experts) for u in units
        ]
        new = [int(state.gradient * size) for size in local]  # gradients of the first backward
        sums, parts, microbatches = 0, layout.microbatches.bit_count(), layout.microbatches
        if self._config.exact:
            new = [_REDUCED * self._of_grains(unit) for unit in units]
            sums = sum(new)  # bytes of a partial sum
            gradients = parts * sums
            reduced = 0
            if state.fsdp and unsharded and units:
                # experts' sums that remain when those of the ep ranks are added
                nodes = (microbatches * self._config.ep).bit_count()
                nodes = 1 if 1 < self._config.ep == state.shards else nodes
                # three copies of each partial sum of a unit: packed, sent and received
                largest = max(max(a * parts, b * nodes) for a, b in map(self._sent, units))
                done = (parts * self._config.ep - nodes) * experts
                reduced = max(0, _REDUCED * (3 * largest - done))
        first, later = self._backward(runs, new), self._backward(runs, [])
        backward = {"activations": -activations}
        return {
            "gather": _Change(gathered + message, gathered=gathered),
            "F": _Change(self._forward(units, held, activations), activations=activations),
            "first I": _Change(first, **backward, gradients=sum(new), queued=queued),
            "I": _Change(later, **backward, queued=queued),
            "first B": _Change(first, **backward, gradients=sum(new)),
            "B": _Change(later, **backward),
            "W": _Change(0, queued=-queued),
            **{
                f"{kind} and {more} sums": _Change(
                    largest,
                    **({"queued": -queued} if kind == "W" else backward),
                    gradients=more * sums,
                )
                for kind, largest in (("B", first), ("W", sum(new)))
                for more in range(2 - microbatches.bit_length(), 2)
                if self._config.exact
            },
            "reduce": _Change(
                reduced,
                gathered=-gathered,
                gradients=int(state.reduced_gradient * sharded - gradients),
            ),
        }

    def _of_grains(self, unit: UnitMemory) -> int:
        """Elements of a unit's gradients after a backward; with numerics=exact experts have
        gradients for each ep rank's grain."""
        return (
            self._in_shards(unit.parameters, unit.experts)
            if self._config.exact
            else unit.parameters
        )

    def _sent(self, unit: UnitMemory) -> tuple[int, int]:
        """(elements, elements of experts) of a unit's gradients that FSDP ranks communicate with
        numerics=exact. With ep experts are separate, and not sent by a rank that has the grains of
        all."""
        if self._config.ep == 1:
            return unit.parameters, 0
        alone = self._state.shards == self._config.ep
        return unit.parameters - unit.experts, 0 if alone else unit.experts

    def _held(self, unit: UnitMemory) -> int:
        """Bytes of the reduction buffer of a unit's gradients, kept after its backward."""
        if not self._state.fsdp or self.layout.zero == 1:
            return 0
        others, experts = self._sent(unit) if self._config.exact else (unit.parameters, 0)
        return _REDUCED * (others + self._config.ep * experts)

    def _gathered(self, unit: UnitMemory) -> int:
        """Bytes of a unit's parameters that are all-gathered when it runs."""
        gathers = self._state.fsdp and self.layout.zero == 3
        kept = self._computing * unit.experts if self._keeps_experts else 0
        return unit.gathered(self._computing) - kept if gathers else 0

    @property
    def _keeps_experts(self) -> bool:
        """Whether ranks have all shards of their experts, and keep them cast during a step."""
        return self.layout.zero == 3 and self._state.shards == self._config.ep_shards > 1

    def _forward(self, units: Sequence[UnitMemory], held: Sequence[int], activations: int) -> int:
        """Bytes that a forward adds at most; held: bytes saved by each unit for the backward."""
        now, peak = 0, activations
        message = self._held(units[0]) if units else 0
        for unit, saved in zip(units, held, strict=True):
            peak = max(peak, now + unit.peak.forward + 2 * self._gathered(unit) + message)
            now += saved
        return peak

    def _backward(self, runs: Sequence[tuple[UnitMemory, bool]], new: Sequence[int]) -> int:
        """Bytes that a backward adds at most; new: bytes of each unit's gradients, empty unless it
        is the first."""
        state = self._state
        allocates = bool(new) or (state.fsdp and self.layout.zero > 1) or self._computing < _REDUCED
        now = peak = 0  # relative to the begin
        held = self._held(runs[0][0]) if runs else 0
        for index in range(len(runs) - 1, -1, -1):
            unit, recompute = runs[index]
            before = runs[index - 1][0] if index else UnitMemory()  # its backward comes next
            now -= unit.kept if recompute else unit.saved
            running = unit.peak.first if allocates else unit.peak.later
            if self._config.exact:
                running += _REDUCED * (self._of_grains(unit) - unit.parameters)
            if recompute:
                running = max(running, unit.peak.forward)
            gathered = self._gathered(unit) + self._gathered(before)
            peak = max(peak, now + running + gathered + held)
            waits, held = held, self._held(unit)
            if held:  # gradients, reduction buffer, and result
                reduced = self._computing + _REDUCED + _REDUCED / state.shards
                reduced *= unit.parameters
                if self._config.exact:  # the previous reduction is still in progress
                    reduced = waits + 2 * held
                peak = max(peak, now + int(reduced) + self._gathered(before))
            now += unit.queued + (new[index] if new else 0)
        return peak


def planned_memory(
    config: Config,
    model_graph: ModelGraph,
    targets: Tensor,
    costs: UnitCosts | None,
    order: Order,
    zero: int,
    parameters: Sequence[Mapping[str, int]],
    deferred: Collection[int] = (),
) -> RankMemory:
    """Estimate the memory of a plan's stages.

    targets: of a microbatch, on meta; costs: None with split=trace; parameters: of each stage, name
    -> elements; deferred: stages with deferred weight gradients.
    """
    model = model_graph.model
    experts, each = expert_parameters(model, config), update_bytes(config.optimizer, model)
    state_bytes, touched = ({name: sizes[way] for name, sizes in each.items()} for way in (0, 1))
    hidden = hidden_matrices(model, config.optimizer)

    def sizes(names: Collection[str], each: Mapping[str, int] | None = None) -> list[int]:
        return [
            sum(n * (each[name] if each else 1) for name, n in stage.items() if name in names)
            for stage in parameters
        ]

    flows: list[list[int]] = []
    skips: list[Skip] = []
    for stage, graph in enumerate(model_graph.graphs(model_graph.fields, True)):
        received, sent = messages(graph)
        adjacent = len(received) - len(graph.skips_in), len(sent) - len(graph.skips_out)
        both = received[: adjacent[0]], sent[: adjacent[1]]
        flows.append([sum(t.nbytes for t in flow) for flow in both])
        for to, tensor in zip(graph.skips_out, sent[adjacent[1] :], strict=True):
            back = tensor.nbytes if tensor.requires_grad else 0
            skips.append(Skip(stage, to, tensor.nbytes, back))
    layout = StageLayout(
        stages=model_graph.stages,
        deferred=frozenset(deferred),
        place=order.stage_to_rank,
        zero=zero,
        microbatches=order.microbatches,
        numel=[sum(stage.values()) for stage in parameters],
        experts=sizes(experts),
        received=[0, *(received for received, _ in flows[1:])],
        sent=[sent for _, sent in flows],
        gathered_matrices=sizes(hidden),
        moments=[*zip(sizes(state_bytes, state_bytes), sizes(experts, state_bytes), strict=True)],
        touched=sizes(touched, touched),
        skips=skips,
    )
    return RankMemory(config, costs, targets.numel(), order, layout)
