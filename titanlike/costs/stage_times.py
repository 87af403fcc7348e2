"""How long the units and stages of a planned layout take on a device, and what its ranks exchange.

1. Operators (`node_costs.py`) take what a roofline says. What ranks exchange inside of a unit (tp,
   cp, ep) takes the time of their link, for which they wait; but a ring sends keys and values on
   while it attends with others, and compiled blocks hide a part of what tp exchanges (`tp_async`).
2. FSDP's gathers and reductions come once a step, or unit by unit beside what is computed
   (`overlapped_seconds`), by `fsdp.zero` as in `parallel/sharding.py`; those of experts are by
   themselves, among fewer ranks.
3. Messages between stages have the sizes of the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from titanlike.config.schema import AdamW, Config, Float8Precision, Hardware, Muon, Sgd
from titanlike.costs.known_hardware import link_of, message_link, overlapped_seconds, sharded
from titanlike.costs.node_costs import ATTENTION, NodeCosts, Operator, Operators
from titanlike.costs.rank_memory import StageLayout
from titanlike.costs.simulate import Duration, StageTimes
from titanlike.costs.unit_costs import CostError
from titanlike.distributed import collectives
from titanlike.distributed.sharding import StateBytes, compute_dtype
from titanlike.optim.muon import hidden_matrices
from titanlike.parallel.activation_checkpoint import keeps
from titanlike.parallel.expert_parallel import SEND_TOKENS
from titanlike.training.train_plan import TrainPlan

# Of what operators that are no products read and write, and of their launches, compiled code leaves
# so much: a chain of them becomes one kernel.
_FUSED_BYTES, _FUSED_LAUNCHES = 0.6, 0.25

# To multiply in float8, an operand is read for its largest value, and written in a byte
_CAST_BYTES = 5
_CAST_BYTES_COMPILED = 2  # its values are read where they are made

# Of what compiled blocks of tensor-parallel ranks exchange so much is beside their products
# (`tp_async`)
_HIDDEN = 0.4

_CLIP = 12  # bytes a parameter: the norm reads gradients, clipping reads and writes them


@dataclass(frozen=True)
class Seconds:
    """Seconds of a device, those of them in products and attention, and operators that are
    launched."""

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
        recipe = precision.recipe if isinstance(precision, Float8Precision) else None
        float8, weights = recipe is not None, recipe not in (None, "rowwise_with_gw_hp")
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
            if not any(fnmatchcase(operator.name, pattern) for pattern in without):
                one = self._one(operator, block, weights)
                total += Seconds(count * one.device, count * one.products, count * one.launches)
        return total

    def _one(self, operator: Operator, block: bool, weights: bool) -> Seconds:
        device = self.hardware
        rate = device.memory_bandwidth * device.memory_efficiency
        memory = operator.bytes / rate
        if not operator.flops and operator.name != ATTENTION:
            if self.compiled and block:
                kernels = _FUSED_LAUNCHES * device.kernel_seconds
                return Seconds(_FUSED_BYTES * memory + kernels, 0.0, _FUSED_LAUNCHES)
            return Seconds(memory + device.kernel_seconds, 0.0, 1)
        peak = device.tf32_flops if self.tf32 else device.fp32_flops
        peak = device.bf16_flops if operator.itemsize <= 2 else peak
        share = device.attention_efficiency
        if operator.name != ATTENTION:
            share = device.matmul_efficiency
            for size in operator.sizes or ():
                share *= size / (size + device.matmul_half)
        seconds = max(operator.flops / (peak * share), memory)
        float8 = self.float8 and block and (self.float8_weights or not weights)
        if float8 and operator.sizes is not None:
            rows, columns, summed = operator.sizes
            each = _CAST_BYTES_COMPILED if self.compiled else _CAST_BYTES
            cast = each * (rows + columns) * summed
            seconds = operator.flops / (device.fp8_flops * share) + cast / rate
        seconds += device.kernel_seconds
        return Seconds(seconds, seconds, 1)


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
    def computes(self) -> Seconds:
        """Forward and backward, without recomputation."""
        return self.forward + self.input_gradient + self.weight_gradient

    @property
    def exchanged_forward(self) -> float:
        return sum(self.waits_forward.values())

    @property
    def exchanged_recompute(self) -> float:
        return sum(s for axis, s in self.waits_forward.items() if axis not in self.kept)

    @property
    def exchanged_backward(self) -> float:
        return sum(self.waits_backward.values())


def unit_times(config: Config, plan: TrainPlan, roofline: Roofline) -> dict[str, UnitTimes]:
    """Times by the names of the units. Raises CostError where they cannot be run alone."""
    memory = plan.memory()
    if memory.unit_costs is None:
        raise CostError(memory.unknown)
    calls = memory.unit_costs.operators(plan.peers)
    numel = memory.unit_parameters()
    blocks = {unit.name for unit in plan.model_graph.units if unit.block}
    exchanges = _Exchanges(config, plan, roofline.hardware)
    save = config.activation_checkpoint.saved
    kept = frozenset({"ep"} if keeps(SEND_TOKENS, save) else ())
    names = [name for stage in plan.stages for name in stage]
    of_calls: dict[tuple[tuple[int, ...], bool], UnitTimes] = {}  # of equal calls

    def times(nodes: Sequence[NodeCosts], block: bool) -> UnitTimes:
        forward = recompute = inputs = weights = Seconds()
        waits: tuple[Any, Any] = Counter(), Counter()
        sent: tuple[Any, Any] = Counter(), Counter()
        for node in nodes:
            forward += roofline.seconds(node.forward, block)
            recompute += roofline.seconds(node.forward, True, without=save)
            inputs += roofline.seconds(node.input_gradient, block)
            weights += roofline.seconds(node.weight_gradient, block, weights=True)
            ways = (
                (node.exchanged_forward, node.forward),
                (node.exchanged_backward, node.input_gradient),
            )
            for way, (exchanged, operators) in enumerate(ways):
                attention = {o: count for o, count in operators.items() if o.name == ATTENTION}
                attends = roofline.seconds(attention, True).device
                waits[way].update(
                    {
                        axis: exchanges.seconds(axis, collectives.Traffic(*values), attends)
                        for axis, values in exchanged.items()
                    }
                )
                sent[way].update({axis: values[0] for axis, values in exchanged.items()})
        return UnitTimes(forward, recompute, inputs, weights, 0, 0, *waits, *sent, kept)

    table: dict[str, UnitTimes] = {}
    for name, nodes in zip(names, calls, strict=True):
        key = tuple(map(id, nodes)), name in blocks
        if key not in of_calls:
            of_calls[key] = times(nodes, name in blocks)
        table[name] = replace(of_calls[key], parameters=numel[name][0], experts=numel[name][1])
    return table


class _Exchanges:
    """How long what is exchanged takes, by the way each axis does it."""

    def __init__(self, config: Config, plan: TrainPlan, hardware: Hardware) -> None:
        context = getattr(plan.peers.get("cp"), "method", None)
        self._links = {axis: link_of(config, axis, hardware) for axis in plan.peers}
        self._rates = {axis: link.bandwidth for axis, link in self._links.items()}
        for axis, link in self._links.items():
            if axis == "ep" or (axis == "cp" and context == "ulysses"):
                self._rates[axis] = link.to_all
            elif axis == "cp" and context == "ring":
                self._rates[axis] = link.to_next
        self._visible = 1 - _HIDDEN * config.tp_async
        # the first block of a ring is of keys that are there, before anything is sent
        self._beside = 1 - 1 / config.cp

    def seconds(self, axis: str, sent: collectives.Traffic, attention: float) -> float:
        """Seconds for which a rank waits; attention: seconds in which it attends."""
        rate = self._rates[axis]
        seconds = self._links[axis].sent(sent.nbytes, sent.messages, rate)
        hidden = min(sent.beside / rate, self._beside * attention)
        return (seconds - hidden) * (self._visible if axis == "tp" else 1.0)


def _guessed_times(config: Config, plan: TrainPlan, roofline: Roofline) -> dict[str, UnitTimes]:
    """Times of units that cannot be run alone: by the parameters of stages, all in a first unit."""
    tokens, itemsize = plan.memory().tokens, compute_dtype(config).itemsize
    table: dict[str, UnitTimes] = {}
    for stage, names in enumerate(plan.stages):
        numel = plan.stage_numel(stage)
        product = {Operator("aten.mm", 2 * numel * tokens, itemsize * numel, itemsize): 1}
        seconds = roofline.seconds(product, True)
        table |= {name: UnitTimes() for name in names}
        if names:
            table[names[0]] = UnitTimes(seconds, seconds, seconds, seconds, parameters=numel)
    return table


def as_measured(
    units: Mapping[str, UnitTimes], measured: Sequence[Sequence[float]]
) -> dict[str, UnitTimes]:
    """Times with seconds that were measured (forward, backward, weight gradients that wait); of
    what runs again the share that was estimated."""
    table = {}
    for (name, unit), (forward, inputs, weights) in zip(units.items(), measured, strict=True):
        recompute = forward * unit.recompute.device / (unit.forward.device or 1.0)
        products = unit.forward.products / (unit.forward.device or 1.0)
        table[name] = replace(
            unit,
            forward=Seconds(forward, forward * products),
            recompute=Seconds(recompute),
            input_gradient=Seconds(inputs, inputs * products),
            weight_gradient=Seconds(weights, weights),
        )
    return table


# --- the stages of a layout -----------------------------------------------------------------------


@dataclass
class Traffic:
    """Bytes that a rank of a pipeline rank sends in a step."""

    messages: int = 0
    gathered: int = 0  # parameters, along shard
    reduced: int = 0  # gradients, along shard
    replicated: int = 0  # gradients, along replicate
    expert_gathered: int = 0  # parameters of experts, along expert_shard
    expert_reduced: int = 0
    # activations inside of layers, along
    tp: int = 0
    cp: int = 0
    ep: int = 0


@dataclass(frozen=True)
class LayoutTimes:
    """Times of the stages of a layout on a device."""

    stages: list[StageTimes]
    traffic: list[Traffic]  # of each stage
    estimated: str = ""  # why units' times are guessed by parameters
    parts: list[dict[str, float]] = field(default_factory=list)  # of each stage, a microbatch's


def layout_times(
    config: Config,
    plan: TrainPlan,
    hardware: Hardware,
    measured: Sequence[Sequence[float]] | None = None,
) -> LayoutTimes:
    """measured: seconds of each unit: forward, input gradients, weight gradients."""
    roofline, estimated = Roofline.of(config, hardware), ""
    try:
        units = unit_times(config, plan, roofline)
        units = units if measured is None else as_measured(units, measured)
    except CostError as error:
        units, estimated = _guessed_times(config, plan, roofline), str(error)
    graph, parameters = plan.model_graph, plan.stage_parameters
    layout = replace(
        plan.memory().layout,
        recomputed=plan.recomputed.blocks,
        orthogonalized=_orthogonalization(config, graph.model, parameters),
    )
    return stage_times(config, layout, hardware, units, estimated)


def stage_times(
    config: Config,
    layout: StageLayout,
    hardware: Hardware,
    units: Mapping[str, UnitTimes],
    estimated: str = "",
) -> LayoutTimes:
    """units: of each, on this device, in microbatches of the layout."""
    shape = _Shape(config, layout, hardware)
    times = LayoutTimes([], [], estimated, [])
    for stage, names in enumerate(layout.stages):
        runs = [(units[name], name in layout.recomputed[stage]) for name in names]
        times.stages.append(shape.stage(stage, runs))
        times.traffic.append(shape.traffic(stage, runs))
        times.parts.append(_parts(runs))
    return times


def _parts(runs: Sequence[tuple[UnitTimes, bool]]) -> dict[str, float]:
    """Seconds of a microbatch by what they are, forward and backward."""
    both = [unit.computes for unit, _ in runs]
    products, device = sum(b.products for b in both), sum(b.device for b in both)
    recompute = sum(
        u.recompute.device + u.exchanged_recompute for u, recomputed in runs if recomputed
    )
    exchanged: Counter[str] = Counter()
    for unit, _ in runs:
        exchanged.update(unit.waits_forward)
        exchanged.update(unit.waits_backward)
    return {
        "matrix products": products,
        "other operators": device - products,
        "recomputation": recompute,
        **{f"{axis} exchanges": seconds for axis, seconds in exchanged.items()},
    }


class _Shape:
    """What is common to the stages of a layout."""

    def __init__(self, config: Config, layout: StageLayout, hardware: Hardware) -> None:
        self.config, self.layout, self.hardware = config, layout, hardware
        self.state = StateBytes.of(config, layout.zero)
        self.bandwidth, self.latency = message_link(config, hardware)
        self.itemsize = compute_dtype(config).itemsize
        self.shard = link_of(config, "shard", hardware)
        self.expert_shard = link_of(config, "expert_shard", hardware)
        both = self.shard, self.expert_shard
        self.gathers = [sharded(link, hardware.gather_bandwidth) for link in both]
        self.reductions = [sharded(link, hardware.reduce_bandwidth) for link in both]
        self.replicas = link_of(config, "replicate", hardware)

    def gather(self, numel: int, experts: int, count: int) -> float:
        """Seconds in which parameters are gathered; experts: how many of them are of experts."""
        shard, expert_shard = self.gathers
        dense = shard.gather(self.itemsize * (numel - experts), count)
        return dense + expert_shard.gather(self.itemsize * experts, count if experts else 0)

    def reduction(self, numel: int, experts: int, count: int) -> float:
        """Seconds in which gradients are summed, in fp32."""
        seconds = 0.0
        for size, shard in zip((numel - experts, experts), self.reductions, strict=True):
            if size and self.state.fsdp:
                seconds += shard.gather(4 * size, count)
                seconds += self.replicas.all_reduce(4 * size / shard.size, count)
        return seconds

    def stage(self, stage: int, runs: Sequence[tuple[UnitTimes, bool]]) -> StageTimes:
        layout, zero, device = self.layout, self.layout.zero, self.hardware
        numel, experts, count = layout.numel[stage], layout.experts[stage], max(1, len(runs))
        sharded = self.state.fsdp and self.shard.size > 1
        gathers, reduced = [0.0 for _ in runs], [0.0 for _ in runs]
        if sharded and zero == 3:
            gathers = [self.gather(u.parameters, u.experts, 1) for u, _ in runs]
        if zero > 1:
            reduced = [self.reduction(u.parameters, u.experts, 1) for u, _ in runs]
        deferred = stage in layout.deferred
        forward = [u.forward.device + u.exchanged_forward for u, _ in runs]
        recompute = [u.recompute.device + u.exchanged_recompute if on else 0.0 for u, on in runs]
        inputs = [u.input_gradient.device + u.exchanged_backward for u, _ in runs]
        weights = [u.weight_gradient.device for u, _ in runs]
        whole = [a + b + c for a, b, c in zip(recompute, inputs, weights, strict=True)]
        halves = [a + b for a, b in zip(recompute, inputs, strict=True)] if deferred else whole
        if device.runs_ahead:
            all_forward = overlapped_seconds(forward, gathers)
            all_backward = overlapped_seconds(whole[::-1], gathers[::-1], reduced[::-1])
        else:  # a core that computes sends, too
            all_forward = sum(forward) + sum(gathers)
            all_backward = sum(whole) + sum(gathers) + sum(reduced)
        exchanged = sum(u.exchanged_forward for u, _ in runs)
        sent_back = sum(u.exchanged_backward for u, _ in runs)
        recomputed = sum(recompute)
        launched = [
            sum(getattr(u, part).launches for u, on in runs if on or part != "recompute")
            for part in ("forward", "recompute", "input_gradient", "weight_gradient")
        ]

        def host(launches: float) -> float:
            return launches * device.host_seconds + device.action_seconds

        in_forward, in_recompute, in_inputs, in_weights = launched
        in_backward = in_recompute + in_inputs + in_weights
        in_halves = in_recompute + in_inputs if deferred else in_backward
        waits_forward = exchanged + all_forward - sum(forward)
        waits_backward = all_backward - sum(whole) + sent_back
        later = Duration(sum(weights), host(in_weights)) if deferred else Duration(0.0, host(0))
        return StageTimes(
            forward=Duration(all_forward, host(in_forward), 0.0, waits_forward),
            backward=Duration(all_backward, host(in_backward), recomputed, waits_backward),
            input_gradient=Duration(sum(halves), host(in_halves), recomputed, sent_back),
            weight_gradient=later,
            sends_forward=self._message(layout.sent[stage] if stage + 1 < len(layout.sent) else 0),
            sends_backward=self._message(layout.received[stage]),
            skips_forward=tuple(
                (skip.to, self._message(skip.nbytes))
                for skip in layout.skips
                if skip.source == stage
            ),
            skips_backward=tuple(
                (skip.source, self._message(skip.back))
                for skip in layout.skips
                if skip.to == stage and skip.back
            ),
            gather=self.gather(numel, experts, count) if sharded and zero < 3 else 0.0,
            reduce=self.reduction(numel, experts, count) if zero == 1 else 0.0,
            update=self._update(stage),
        )

    def _message(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0

    def _update(self, stage: int) -> float:
        """Seconds of the optimizer's update of what a rank has of a stage."""
        config, device, flops = self.config, self.hardware, 0.0
        experts, shards = self.layout.experts[stage], self.state.shards
        numel = (self.layout.numel[stage] - experts) / shards + experts / self.expert_shard.size
        if self.layout.orthogonalized:
            flops = self.layout.orthogonalized[stage] / shards
        match config.optimizer:
            case Sgd(momentum=momentum):
                touched = 12 + (8 if momentum > 0 else 0)
            case AdamW(state_dtype="bf16"):
                touched = 20
            case _:
                touched = 28
        touched += _CLIP if getattr(config.optimizer, "clip", None) is not None else 4
        seconds = numel * touched / (device.memory_bandwidth * device.memory_efficiency)
        if config.fsdp.cpu_offload:  # gradients to the host, parameters back; its memory is slower
            seconds = numel * (8 + touched) / device.host_bandwidth
        return seconds + flops / (device.bf16_flops * device.matmul_efficiency)

    def traffic(self, stage: int, runs: Sequence[tuple[UnitTimes, bool]]) -> Traffic:
        config, layout, m = self.config, self.layout, self.layout.microbatches
        place, moved = layout.place, Traffic()
        if stage and place[stage - 1] != place[stage]:
            moved.messages += m * layout.received[stage]
        if stage + 1 < len(place) and place[stage + 1] != place[stage]:
            moved.messages += m * layout.sent[stage]
        for source, to, nbytes, back in layout.skips:
            if place[source] != place[to]:
                moved.messages += m * (nbytes * (source == stage) + back * (to == stage))
        for unit, recomputed in runs:
            for axis, nbytes in unit.sent_forward.items():
                times = 1 + (recomputed and axis not in unit.kept)
                nbytes = nbytes * times + unit.sent_backward.get(axis, 0)
                setattr(moved, axis, getattr(moved, axis) + m * nbytes)
        if not self.state.fsdp:
            return moved
        replicas, experts = config.replicate, layout.experts[stage]
        gathers, reductions = (2 * m if layout.zero == 3 else 1), (1 if layout.zero == 1 else m)

        def sent(numel: int, ranks: int) -> int:
            moved.replicated += reductions * 2 * (replicas - 1) * 4 * numel // (replicas * ranks)
            return numel * (ranks - 1) // ranks

        part = sent(layout.numel[stage] - experts, self.shard.size)
        moved.gathered, moved.reduced = gathers * self.itemsize * part, reductions * 4 * part
        part = sent(experts, self.expert_shard.size)
        moved.expert_gathered = gathers * self.itemsize * part
        moved.expert_reduced = reductions * 4 * part
        return moved


def _orthogonalization(
    config: Config, model: nn.Module, stages: Sequence[Mapping[str, int]]
) -> list[float]:
    """FLOPs of Muon's Newton-Schulz iterations (optim/muon.py) on each stage's matrices.

    stages: of each the names of its parameters.
    """
    flops = [0.0] * len(stages)
    if isinstance(config.optimizer, Muon):
        hidden = hidden_matrices(model, config.optimizer)
        for stage, names in enumerate(stages):
            for name in hidden & names.keys():
                *_, rows, columns = model.get_parameter(name).shape
                small, large = sorted((rows, columns))
                # x x^T, its square, and their product with x
                each = 4 * small * small * large + 2 * small**3
                flops[stage] += config.optimizer.ns_steps * each
    return flops
