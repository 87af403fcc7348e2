"""How long each stage of a drafted layout takes on a device, and what its ranks exchange.

1. Operators of each unit (`graph/node_operators.py`) take what a roofline says, and with tensor
   parallelism the time of what their ranks exchange, for which they wait.
2. FSDP's gathers and reductions come once a step, or unit by unit beside what is computed
   (`overlap.py`), by `fsdp.zero` as in `parallel/sharding.py`.
3. Messages between stages have the sizes of the draft.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from titanlike.config.hardware import Hardware
from titanlike.config.schema import Config
from titanlike.graph.cut import messages
from titanlike.graph.node_operators import NodeOperators, Operator
from titanlike.parallel.sharding import compute_dtype
from titanlike.planning import links
from titanlike.planning.overlap import backward_seconds, forward_seconds
from titanlike.planning.roofline import Roofline, Seconds
from titanlike.planning.simulate import Duration, StageTimes
from titanlike.planning.update import orthogonalization, update_seconds
from titanlike.split.rank_memory import saved_operators
from titanlike.split.state_bytes import StateBytes
from titanlike.split.unit_costs import CostError
from titanlike.training.draft import Draft

# Of what compiled blocks of tensor-parallel ranks exchange so much is beside their products
# (`tp_async`)
_HIDDEN = 0.4


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of a unit and a microbatch. Exchanges are those of tensor-parallel ranks."""

    forward: Seconds = Seconds()
    again: Seconds = Seconds()  # where it is recomputed
    input_gradient: Seconds = Seconds()
    weight_gradient: Seconds = Seconds()
    exchanged_forward: float = 0.0
    exchanged_backward: float = 0.0
    parameters: int = 0
    exchanged_bytes: int = 0  # that a rank sends, forward and backward


@dataclass
class Traffic:
    """Bytes that a rank of a pipeline rank sends in a step."""

    messages: int = 0
    gathered: int = 0  # parameters, along shard
    reduced: int = 0  # gradients, along shard
    replicated: int = 0  # gradients, along replicate
    exchanged: int = 0  # activations, along tp


@dataclass(frozen=True)
class LayoutTimes:
    """Of a drafted layout on a device."""

    stages: list[StageTimes]
    traffic: list[Traffic]  # of each stage
    estimated: str = ""  # why units' times are guessed by parameters
    parts: list[dict[str, float]] = field(default_factory=list)  # of each stage, a microbatch's


@dataclass(frozen=True)
class Layout:
    """What of a draft decides how long its stages take."""

    stages: Sequence[Sequence[str]]  # names of their units
    recomputed: Sequence[Collection[str]]  # units of each stage
    deferred: Collection[int]  # stages whose weight gradients wait
    place: Sequence[int]  # pipeline rank of each stage
    zero: int
    microbatches: int
    numel: Sequence[int]  # parameters of each stage, of a tensor-parallel rank
    received: Sequence[int]  # bytes of the messages of each stage, 0 of the first
    sent: Sequence[int]  # and 0 of the last
    orthogonalized: Sequence[float] = ()  # FLOPs of Muon's updates, of each stage

    @classmethod
    def of(cls, config: Config, draft: Draft) -> Layout:
        graphs = draft.model_graph.graphs(draft.model_graph.fields, True)
        sizes = [[sum(t.nbytes for t in flow) for flow in messages(graph)] for graph in graphs]
        return cls(
            draft.stages,
            draft.recomputed.blocks,
            draft.deferred,
            draft.order.place,
            draft.zero,
            draft.microbatches,
            [draft.stage_numel(stage) for stage in range(draft.order.stages)],
            [0, *(received for received, _ in sizes[1:])],
            [*(sent for _, sent in sizes[:-1]), 0],
            orthogonalization(config, draft.model_graph.model, draft.stage_parameters),
        )


def unit_times(config: Config, draft: Draft, roofline: Roofline) -> dict[str, UnitTimes]:
    """By the names of the units. Raises CostError where they cannot be run alone."""
    memory = draft.memory()
    if memory.unit_costs is None:
        raise CostError(memory.unknown)
    like = None if draft.tensor is None else draft.tensor.like
    calls = memory.unit_costs.operators(like)
    numel = memory.unit_costs.parameter_table(lambda parameter: parameter.numel())
    blocks = {unit.name for unit in draft.model_graph.units if unit.block}
    tp = links.link(config, "tp", roofline.hardware)
    save = saved_operators(config)
    names = [name for stage in draft.stages for name in stage]
    known: dict[tuple[tuple[int, ...], bool], UnitTimes] = {}  # of equal calls

    def seconds(exchanged: Sequence[int]) -> float:
        visible = 1 - _HIDDEN * config.tp_async
        return visible * tp.gather(exchanged[0], exchanged[1]) if config.tp > 1 else 0.0

    def times(nodes: Sequence[NodeOperators], block: bool) -> UnitTimes:
        total, exchanged = [Seconds()] * 4, [0.0, 0.0]
        sent = 0
        for node in nodes:
            found = (
                roofline.seconds(node.forward, block),
                roofline.again(node, save),
                roofline.seconds(node.input_gradient, block),
                roofline.seconds(node.weight_gradient, block, weights=True),
            )
            total = [a + b for a, b in zip(total, found, strict=True)]
            both = node.exchanged_forward, node.exchanged_backward
            exchanged = [a + seconds(b) for a, b in zip(exchanged, both, strict=True)]
            sent += sum(part[0] for part in both) * (config.tp - 1) // config.tp
        return UnitTimes(*total, *exchanged, exchanged_bytes=sent)

    found = {}
    for at, (name, nodes) in enumerate(zip(names, calls, strict=True)):
        key = tuple(map(id, nodes)), name in blocks
        if key not in known:
            known[key] = times(nodes, name in blocks)
        own = known[key]
        found[name] = UnitTimes(**{**vars(own), "parameters": int(numel[at, at + 1])})
    return found


def guessed_times(config: Config, draft: Draft, roofline: Roofline) -> dict[str, UnitTimes]:
    """Of stages whose units cannot be run alone: by their parameters, all in a first unit."""
    tokens, itemsize = draft.memory().tokens, compute_dtype(config).itemsize
    found = {}
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
    """With seconds that were measured; of what runs again the share that was estimated."""
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


def layout_times(
    config: Config,
    draft: Draft,
    hardware: Hardware,
    measured: Sequence[Sequence[float]] | None = None,
) -> LayoutTimes:
    """measured: seconds of each unit: forward, input gradients, weight gradients."""
    roofline, estimated = Roofline.of(config, hardware), ""
    try:
        units = unit_times(config, draft, roofline)
        units = units if measured is None else as_measured(units, measured)
    except CostError as error:
        units, estimated = guessed_times(config, draft, roofline), str(error)
    return stage_times(config, Layout.of(config, draft), hardware, units, estimated)


def stage_times(
    config: Config,
    layout: Layout,
    hardware: Hardware,
    units: Mapping[str, UnitTimes],
    estimated: str = "",
) -> LayoutTimes:
    """units: of each, on this device, in microbatches of the layout."""
    shape = _Shape(config, layout, hardware)
    stages, traffic, parts = [], [], []
    for stage, names in enumerate(layout.stages):
        own = [(units[name], name in layout.recomputed[stage]) for name in names]
        times, moved = shape.stage(stage, own)
        stages.append(times)
        traffic.append(moved)
        parts.append(_parts(own))
    return LayoutTimes(stages, traffic, estimated, parts)


def _parts(own: Sequence[tuple[UnitTimes, bool]]) -> dict[str, float]:
    """Seconds of a microbatch by what they are, forward and backward."""
    both = [u.forward + u.input_gradient + u.weight_gradient for u, _ in own]
    products, device = sum(b.products for b in both), sum(b.device for b in both)
    again = sum(u.again.device + u.exchanged_forward for u, recomputed in own if recomputed)
    exchanged = sum(u.exchanged_forward + u.exchanged_backward for u, _ in own)
    return {
        "matrix products": products,
        "other operators": device - products,
        "recomputation": again,
        "tp exchanges": exchanged,
    }


class _Shape:
    """What is common to the stages of a layout."""

    def __init__(self, config: Config, layout: Layout, hardware: Hardware) -> None:
        self.config, self.layout, self.hardware = config, layout, hardware
        self.state = StateBytes.of(config, layout.zero)
        self.bandwidth, self.latency = links.message(config, hardware)
        self.itemsize = compute_dtype(config).itemsize
        self.shard = links.link(config, "shard", hardware)
        self.replicas = links.link(config, "replicate", hardware)

    def reduction(self, numel: int, count: int) -> float:
        """Seconds in which gradients are summed, in fp32."""
        if not self.state.fsdp:
            return 0.0
        one = self.shard.gather(4 * numel, count)
        return one + self.replicas.all_reduce(4 * numel / self.shard.size, count)

    def duration(self, seconds: float, launches: float, again: float, waiting: float) -> Duration:
        device = self.hardware
        host = launches * device.host_seconds + device.action_seconds
        return Duration(seconds, host, again, waiting)

    def orthogonalized(self, stage: int) -> float:
        flops = self.layout.orthogonalized
        return flops[stage] / self.state.shards if flops else 0.0

    def message(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0

    def stage(
        self, stage: int, own: Sequence[tuple[UnitTimes, bool]]
    ) -> tuple[StageTimes, Traffic]:
        layout, zero = self.layout, self.layout.zero
        numel, count = layout.numel[stage], max(1, len(own))
        sharded = self.state.fsdp and self.shard.size > 1
        each = sharded and zero == 3
        gathers = [self.shard.gather(self.itemsize * u.parameters) if each else 0 for u, _ in own]
        reduced = [
            self.reduction(u.parameters, 1) if self.state.fsdp and zero > 1 else 0.0 for u, _ in own
        ]
        forward = [u.forward.device + u.exchanged_forward for u, _ in own]
        again = [u.again.device + u.exchanged_forward if on else 0.0 for u, on in own]
        deferred = stage in layout.deferred
        weights = [u.weight_gradient.device for u, _ in own]
        inputs = [u.input_gradient.device + u.exchanged_backward for u, _ in own]
        whole = [a + b + c for a, b, c in zip(again, inputs, weights, strict=True)]
        halves = [a + b for a, b in zip(again, inputs, strict=True)] if deferred else whole
        exchanged = sum(u.exchanged_forward for u, _ in own)
        launched = [
            sum(getattr(u, part).launches for u, on in own if on or part != "again")
            for part in ("forward", "again", "input_gradient", "weight_gradient")
        ]
        all_forward = forward_seconds(forward, gathers)
        all_backward = backward_seconds(whole[::-1], gathers[::-1], reduced[::-1])
        repeated, sent_back = sum(again), sum(u.exchanged_backward for u, _ in own)
        waiting = all_backward - sum(whole) + sent_back
        times = StageTimes(
            forward=self.duration(
                all_forward, launched[0], 0.0, exchanged + all_forward - sum(forward)
            ),
            backward=self.duration(all_backward, sum(launched[1:]), repeated, waiting),
            input_gradient=self.duration(
                sum(halves), sum(launched[1 : 3 if deferred else 4]), repeated, sent_back
            ),
            weight_gradient=self.duration(sum(weights), launched[3], 0.0, 0.0)
            if deferred
            else Duration(0.0, self.hardware.action_seconds),
            sends_forward=self.message(layout.sent[stage]),
            sends_backward=self.message(layout.received[stage]),
            gather=self.shard.gather(self.itemsize * numel, count) if sharded and zero < 3 else 0.0,
            reduce=self.reduction(numel, count) if zero == 1 else 0.0,
            update=update_seconds(
                self.config, numel / self.state.shards, self.orthogonalized(stage), self.hardware
            ),
        )
        return times, self._traffic(own, numel, stage)

    def _traffic(self, own: Sequence[tuple[UnitTimes, bool]], numel: int, stage: int) -> Traffic:
        config, layout, m = self.config, self.layout, self.layout.microbatches
        exchanged = m * sum(u.exchanged_bytes for u, _ in own)
        moved = Traffic(messages=m * self._messages(stage), exchanged=exchanged)
        if not self.state.fsdp:
            return moved
        shards, replicas = self.shard.size, config.replicate
        part = numel * (shards - 1) // shards
        gathers, reductions = (2 * m if layout.zero == 3 else 1), (1 if layout.zero == 1 else m)
        moved.gathered = gathers * self.itemsize * part
        moved.reduced = reductions * 4 * part
        moved.replicated = reductions * 2 * (replicas - 1) * 4 * numel // (replicas * shards)
        return moved

    def _messages(self, stage: int) -> int:
        """Bytes that a stage sends to others, forward and backward of a microbatch."""
        layout, place, sent = self.layout, self.layout.place, 0
        if stage and place[stage - 1] != place[stage]:
            sent += layout.received[stage]
        if stage + 1 < len(place) and place[stage + 1] != place[stage]:
            sent += layout.sent[stage]
        return sent
