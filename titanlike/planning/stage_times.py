"""Times of the units and stages of a planned layout on a device, and what its ranks communicate.

1. Operators (`node_costs.py`) take the time of a roofline. Communication inside a unit (tp, cp, ep)
   takes the time of its link and is exposed, except that ring attention overlaps sends of keys and
   values with attention, tp's second all-gather overlaps matmuls, and compiled blocks hide part of
   tp's communication (`tp_async`).
2. FSDP's all-gathers and reductions run once per step, or unit by unit overlapped with compute
   (`overlapped_seconds`), depending on `fsdp.zero` as in `core/distributed/sharding.py`; those of experts
   are separate, among fewer ranks.
3. P2P transfers between stages have the sizes of the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property
from itertools import chain, product
from typing import Any, NamedTuple

from torch import nn

from titanlike.core.config.groups.computation import ScaledPrecision
from titanlike.core.config.groups.hardware import Hardware
from titanlike.core.config.groups.user_code import CustomOptimizer
from titanlike.core.config.schema import Config
from titanlike.core.distributed import collectives
from titanlike.core.distributed.sharding import StateBytes, compute_dtype
from titanlike.core.optim.optimizer import hidden_matrices
from titanlike.core.pipeline.order import Order
from titanlike.core.training.train_plan import TrainPlan
from titanlike.planning.costs.node_costs import (
    ATTENTION,
    EXPERTS_PRODUCT,
    NodeCosts,
    Operator,
    Operators,
    attention_share,
)
from titanlike.planning.costs.rank_memory import StageLayout
from titanlike.planning.costs.simulate import Duration, Simulation, StageTimes, simulate
from titanlike.planning.costs.unit_costs import CostError
from titanlike.planning.known_hardware import (
    Link,
    axes,
    link_of,
    message_link,
    overlapped_seconds,
    sharded,
)
from titanlike.techniques.activation_checkpoint import keeps
from titanlike.techniques.mixture.expert_exchange import SEND_TOKENS

# Fractions of memory traffic and launches of operators other than matmuls that remain in compiled
# code, where a chain of them becomes one kernel.
_FUSED_BYTES, _FUSED_LAUNCHES = 0.34, 0.25

# Fraction of their inputs and outputs that these access: one logit per token; zeros
_FEW_LOGITS = {"aten.nll_loss_forward": 0.0, "aten.nll_loss_backward": 0.5}

# A float8 matmul reads each operand for its largest value, and writes it in one byte per element;
# mxfp8 needs one pass for that, and half of its operands transposed.
_CAST_BYTES = 5
_CAST_BYTES_COMPILED = 3  # the kernel that computes the values finds the largest

# Fraction of tp's communication in compiled blocks that overlaps with matmuls (`tp_async`)
_HIDDEN = 0.4

# Fraction of the input gradients' matmuls and attention that overlaps what tp gathers in the backward
_OF_COLUMNS = 0.5

TRAFFIC = {  # kind, see `LayoutTimes.traffic` -> (title in plans, axis)
    "messages": ("pipeline messages", "pp"),
    "gathered": ("all-gathers of parameters", "shard"),
    "reduced": ("reduce-scatters of gradients", "shard"),
    "replicated": ("all-reduces of gradients", "replicate"),
    "expert_gathered": ("all-gathers of experts", "expert_shard"),
    "expert_reduced": ("reduce-scatters of experts", "expert_shard"),
    "tp": ("activations of tp", "tp"),
    "cp": ("keys, values, heads of cp", "cp"),
    "ep": ("tokens of experts", "ep"),
}

_TITLES = {  # fields of `Seconds`, as plans show them
    "matmuls": "matrix products",
    "experts": "products of experts",
    "attention": "attention",
    "casts": "casts to float8",
    "memory": "other operators",
    "kernels": "fixed time of kernels",
}

_AGREEMENTS = 2  # small all-reduces per step: loss, gradient norm
_CLIP = 12  # bytes per parameter: the norm reads gradients, clipping reads and writes them

# Bytes per parameter that numerics=exact reads and writes to pack gradients for an all-to-all and
# sum the received ones; and to sum the squares of the norm pairwise
_LAID_OUT, _HALVES = 24, 16


class Seconds(NamedTuple):
    """Seconds on a device by what it does, and number of kernel launches."""

    matmuls: float = 0.0
    experts: float = 0.0  # their matmuls
    attention: float = 0.0
    casts: float = 0.0  # of operands to float8
    memory: float = 0.0  # operators that memory bandwidth bounds
    kernels: float = 0.0  # fixed time of each kernel
    launches: float = 0.0

    @property
    def device(self) -> float:
        return sum(self[:-1])

    @property
    def products(self) -> float:
        return self.matmuls + self.experts + self.attention + self.casts

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        return Seconds(*(a + times * b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Roofline:
    """A device, and the config's settings that decide how fast it computes."""

    hardware: Hardware
    compiled: bool = False  # whether blocks are compiled
    tf32: bool = False
    scaled: ScaledPrecision | None = None  # if matmuls of blocks are float8 or mxfp8
    cast_once: bool = False  # their weights, once a step; experts' are in any case

    @classmethod
    def of(cls, config: Config, hardware: Hardware) -> Roofline:
        precision, tf32 = config.precision, config.matmul_precision != "highest"
        scaled = precision if isinstance(precision, ScaledPrecision) else None
        once = config.shards == 1 or getattr(scaled, "recipe", "") == "tensorwise"
        once = once and not config.fsdp.cpu_offload  # as techniques/low_precision/float8.py
        return cls(hardware, config.compile, tf32, scaled, once)

    def seconds(
        self,
        operators: Operators,
        block: bool,
        *,
        weights: bool = False,
        without: Sequence[str] = (),
    ) -> Seconds:
        """Time of operators. block: whether in a block; weights: whether they compute weight
        gradients; without: patterns of operators that are not run, as recomputation finds their
        results saved."""
        total = Seconds()
        for operator, count in operators.items():
            if not any(fnmatchcase(operator.name, pattern) for pattern in without):
                total = total.plus(self._operator(operator, block, weights), count)
        return total

    def _operator(self, operator: Operator, block: bool, weights: bool) -> Seconds:
        """Time of one call: the longer of its FLOPs' and its bytes', and that of its launch."""
        device = self.hardware
        rate = device.memory_bandwidth * device.memory_efficiency
        memory = operator.bytes / rate * _FEW_LOGITS.get(operator.name, 1.0)
        launch = {"kernels": device.kernel_seconds, "launches": 1.0}
        if operator.name == ATTENTION:
            efficiency = device.attention_efficiency
            if operator.sizes and device.runs_ahead:  # on a GPU
                efficiency *= attention_share(*operator.sizes[1:])
            compute = operator.flops / (self._peak(operator.itemsize) * efficiency)
            return Seconds(attention=max(compute, memory), **launch)
        if operator.flops:
            return self._matmul(operator, memory, block, weights)._replace(**launch)
        if not (self.compiled and block):
            return Seconds(memory=memory, **launch)
        fused = {name: _FUSED_LAUNCHES * each for name, each in launch.items()}
        return Seconds(memory=_FUSED_BYTES * memory, **fused)

    def _peak(self, itemsize: int) -> float:
        """FLOP/s of matmuls of elements of 2 (bf16) or 4 bytes (fp32)."""
        fp32 = self.hardware.tf32_flops if self.tf32 else self.hardware.fp32_flops
        return self.hardware.bf16_flops if itemsize <= 2 else fp32

    def _matmul(self, operator: Operator, memory: float, block: bool, weights: bool) -> Seconds:
        """Time of a matmul and the casts of its operands to float8 or mxfp8, without their launch;
        memory: seconds to read and write its bytes; block, weights: see `seconds`."""
        device, peak = self.hardware, self._peak(operator.itemsize)
        of_experts = operator.name.startswith(EXPERTS_PRODUCT)
        efficiency = (of_experts and device.expert_efficiency) or device.matmul_efficiency
        for size in operator.sizes or ():  # small matmuls reach less of the peak
            efficiency *= size / (size + device.matmul_half)
        kind, compute = "experts" if of_experts else "matmuls", operator.flops / (peak * efficiency)
        scaled = self.scaled if block and operator.sizes is not None else None
        mxfp8 = scaled is not None and scaled.name == "mxfp8"  # which leaves experts in bf16
        if scaled is None or (mxfp8 and of_experts) or (weights and not scaled.weight_gradients):
            return Seconds(**{kind: max(compute, memory)})
        rows, columns, inner = operator.sizes or (0, 0, 0)
        rate = device.memory_bandwidth * device.memory_efficiency
        mxfp8_peak = device.mxfp8_flops or self._peak(4)  # emulated in fp32
        compute *= peak / (mxfp8_peak if mxfp8 else device.fp8_flops)
        # results are in bf16, and a tile's are written after its multiplication: DeepGEMM has 1,297
        # TFLOP/s for weights [4096, 7168] on H800, and 1,099 for [7168, 2048], not 2% less
        compute += operator.groups * rows * columns * operator.itemsize / rate
        cast_bytes = _CAST_BYTES_COMPILED if self.compiled else _CAST_BYTES  # per element
        # of [rows, inner] and [inner, columns] the second may be a weight that was cast before
        operand_rows = rows + (columns if weights or not (self.cast_once or of_experts) else 0)
        casts = operator.groups * cast_bytes * operand_rows * inner / rate
        return Seconds(**{kind: compute}, casts=casts)


@dataclass(frozen=True)
class UnitTimes:
    """Times of a unit per microbatch, and what a rank communicates inside the unit."""

    forward: Seconds = Seconds()
    recompute: Seconds = Seconds()  # added if it is recomputed
    input_gradient: Seconds = Seconds()
    weight_gradient: Seconds = Seconds()
    parameters: int = 0
    experts: int = 0  # parameters of experts
    float8: int = 0  # parameters that FSDP gathers in float8
    # in the forward, in recomputation, in the backward; by axis:
    waits: Sequence[Mapping[str, float]] = ({}, {}, {})  # seconds of exposed communication
    sent: Sequence[Mapping[str, int]] = ({}, {}, {})  # bytes

    @property
    def computes(self) -> Seconds:
        """Forward and backward, without recomputation."""
        return self.forward.plus(self.input_gradient).plus(self.weight_gradient)

    @cached_property
    def exchanged(self) -> list[float]:
        """Seconds of exposed communication: in the forward, in recomputation, in the backward."""
        return [sum(waits.values()) for waits in self.waits]


def unit_times(config: Config, plan: TrainPlan, roofline: Roofline) -> dict[str, UnitTimes]:
    """Times by unit name. Raises CostError if a unit cannot be run alone."""
    memory = plan.memory()
    if memory.unit_costs is None:
        raise CostError(memory.unknown)
    calls = memory.unit_costs.operators()
    units = memory.units()
    blocks = {unit.name for unit in plan.model_graph.units if unit.block}
    save = config.activation_checkpoint.saved
    # axes without communication in recomputation
    saved_axes = {"ep"} if keeps(SEND_TOKENS, save) else ()
    links, rates = {axis: link_of(config, axis, roofline.hardware) for axis in plan.peers}, {}
    for axis, link in links.items():
        way = str(getattr(plan.peers["cp"], "method", "")) if axis == "cp" else axis
        by_way = {"ep": link.to_all, "ulysses": link.to_all, "ring": link.to_next}
        rates[axis] = by_way.get(way, link.bandwidth)

    def waited(axis: str, sent: collectives.Traffic, attention: float, matmuls: float) -> float:
        """Seconds of exposed communication; attention, matmuls: seconds of these meanwhile, of
        matmuls with attention."""
        seconds = links[axis].sent(sent.nbytes, sent.messages, rates[axis])
        # a ring's first block attends to local keys while the first send is in progress
        compute = (1 - 1 / config.cp) * attention
        if axis == "tp":  # compiled blocks wait for what they gather before they multiply
            compute = 0.0 if config.compile else _OF_COLUMNS * matmuls
        seconds -= min(sent.beside / rates[axis], compute)
        return seconds * (1 - _HIDDEN * config.tp_async if axis == "tp" else 1.0)

    cached: dict[tuple[tuple[int, ...], bool], UnitTimes] = {}  # cache by equal calls

    def times(nodes: Sequence[NodeCosts], block: bool) -> UnitTimes:
        forward = recompute = inputs = weights = Seconds()
        waits: list[Any] = [Counter(), Counter(), Counter()]
        sent: list[Any] = [Counter(), Counter(), Counter()]
        for node in nodes:
            forward = forward.plus(roofline.seconds(node.forward, block))
            recompute = recompute.plus(roofline.seconds(node.forward, True, without=save))
            inputs = inputs.plus(roofline.seconds(node.input_gradient, block))
            of_weights = roofline.seconds(node.weight_gradient, block, weights=True)
            weights = weights.plus(of_weights)
            ways = (
                (0, node.exchanged_forward, node.forward),
                (2, node.exchanged_backward, node.input_gradient),
            )
            for way, exchanged, operators in ways:
                attention = {o: count for o, count in operators.items() if o.name == ATTENTION}
                attends = roofline.seconds(attention, True).device
                matmuls = roofline.seconds(operators, block).products
                for axis, values in exchanged.items():
                    traffic = collectives.Traffic(*values)
                    waits[way][axis] += waited(axis, traffic, attends, matmuls)
                    sent[way][axis] += traffic.nbytes
        for by_way_of_step in (waits, sent):
            by_way_of_step[1] = {
                axis: each for axis, each in by_way_of_step[0].items() if axis not in saved_axes
            }
        return UnitTimes(forward, recompute, inputs, weights, waits=waits, sent=sent)

    table: dict[str, UnitTimes] = {}
    for (name, unit), nodes in zip(units.items(), calls, strict=True):
        key = tuple(map(id, nodes)), name in blocks
        if key not in cached:
            cached[key] = times(nodes, name in blocks)
        sizes: dict[str, Any] = {"parameters": unit.parameters, "experts": unit.experts}
        table[name] = replace(cached[key], **sizes, float8=unit.float8)
    return table


def _guessed_times(config: Config, plan: TrainPlan, roofline: Roofline) -> dict[str, UnitTimes]:
    """Estimate times of stages from their parameters, if units cannot be run alone."""
    tokens, itemsize = plan.memory().tokens, compute_dtype(config.precision).itemsize
    table = {name: UnitTimes() for names in plan.stages for name in names}
    for stage, names in enumerate(plan.stages):
        numel = plan.stage_numel(stage)
        product = {Operator("aten.mm", 2 * numel * tokens, itemsize * numel, itemsize): 1}
        seconds = roofline.seconds(product, True)
        times = UnitTimes(seconds, seconds, seconds, seconds, parameters=numel)
        table |= dict.fromkeys(names[:1], times)
    return table


def layout_times(config: Config, plan: TrainPlan, hardware: Hardware) -> LayoutTimes:
    """Times of a plan's stages."""
    roofline, estimated = Roofline.of(config, hardware), ""
    try:
        units = unit_times(config, plan, roofline)
    except CostError as error:
        units, estimated = _guessed_times(config, plan, roofline), str(error)
    graph, parameters = plan.model_graph, plan.stage_parameters
    layout = replace(
        plan.memory().layout,
        recomputed=plan.recomputed.blocks,
        orthogonalized=_orthogonalization(config, graph.model, parameters),
    )
    return LayoutTimes(config, layout, hardware, units, estimated)


class LayoutTimes:
    """Times of a layout's stages on a device, and what its ranks send."""

    def __init__(
        self,
        config: Config,
        layout: StageLayout,
        hardware: Hardware,
        units: Mapping[str, UnitTimes],
        estimated: str = "",
    ) -> None:
        """units: times by name, on this device with this microbatch size; estimated: why they are
        guessed from parameters."""
        self.config, self.layout, self.hardware = config, layout, hardware
        self.state = StateBytes.of(config, layout.zero)
        self.bandwidth, self.latency = message_link(config, hardware)
        self.itemsize = compute_dtype(config.precision).itemsize
        self.shard = link_of(config, "shard", hardware)
        self.expert_shard = link_of(config, "expert_shard", hardware)
        both = self.shard, self.expert_shard
        self.gathers = [sharded(link, hardware.gather_bandwidth) for link in both]
        self.reductions = [sharded(link, hardware.reduce_bandwidth) for link in both]
        self.replicas = link_of(config, "replicate", hardware)
        self.units, self.estimated = units, estimated
        self._sums: _Sums | None = None
        if config.exact:
            axes = config.dp, config.replicate, config.ep
            self._sums = _partial_sums(*axes, layout.microbatches, layout.zero)
        self._runs = [  # per stage: (unit, whether it is recomputed)
            [(units[name], name in recomputed) for name in names]
            for names, recomputed in zip(layout.stages, layout.recomputed, strict=True)
        ]
        self.stages = [self._stage(stage) for stage in range(len(layout.stages))]

    def simulate(self, order: Order) -> Simulation:
        """Simulate a step in an order of these stages."""
        links = (link_of(self.config, axis, self.hardware) for axis in axes(self.config))
        agree = 2 * _AGREEMENTS * sum(link.latency for link in links)
        return simulate(order, self.stages, runs_ahead=self.hardware.runs_ahead, agree=agree)

    def parts(self, stage: int) -> dict[str, float]:
        """Break down a stage's seconds per microbatch (forward and backward) into kinds of
        operators, recomputation and the collectives of each axis."""
        runs, exchanged, total = self._runs[stage], Counter[str](), Seconds()
        for unit, _ in runs:
            total = total.plus(unit.computes)
            exchanged.update(unit.waits[0])
            exchanged.update(unit.waits[2])
        return {
            **{title: getattr(total, kind) for kind, title in _TITLES.items()},
            "recomputation": sum(u.recompute.device + u.exchanged[1] for u, on in runs if on),
            **{f"{axis} exchanges": seconds for axis, seconds in exchanged.items()},
        }

    def _gather(self, numel: int, experts: int, float8: int, count: int) -> float:
        """Seconds to all-gather parameters; experts, float8: how many of them belong to experts,
        and are gathered in float8."""
        shard, expert_shard = self.gathers
        nbytes = self.itemsize * (numel - experts) - (self.itemsize - 1) * float8
        dense = shard.gather(nbytes, count)
        return dense + expert_shard.gather(self.itemsize * experts, count if experts else 0)

    def _reduction(self, numel: int, experts: int, count: int) -> float:
        """Seconds to reduce-scatter gradients among the shards of a replica, in fp32."""
        if not self.state.fsdp:
            return 0.0
        sizes = numel - experts, experts
        if self._sums is not None:
            links = self.shard, self.expert_shard
            return sum(
                self._exchange(link, sums * 4 * size, count)
                for sums, size, link in zip(self._sums[1:3], sizes, links, strict=True)
                if size
            )
        links = zip(sizes, self.reductions, strict=True)
        return sum(link.gather(4 * size, count) for size, link in links if size)

    def _exchange(self, link: Link, nbytes: float, count: int) -> float:
        """Seconds of an all-to-all of gradients, including packing and summing."""
        if link.size == 1:
            return 0.0
        rate = link.bandwidth if link.inside else link.to_all
        memory = self.hardware.memory_bandwidth * self.hardware.memory_efficiency
        sent = nbytes * (link.size - 1) / link.size
        return link.sent(sent, count, rate) + _LAID_OUT / 4 * nbytes / memory

    def _replication(self, numel: int, experts: int, count: int) -> float:
        """Seconds to all-reduce gradients among replicas, once per step."""
        if not self.state.fsdp or self.replicas.size == 1:
            return 0.0
        parts = 4 * (numel - experts) / self.shard.size, 4 * experts / self.expert_shard.size
        if self._sums is None:
            return sum(self.replicas.all_reduce(part, count) for part in parts if part)
        nodes = self._sums.replica
        return sum(
            self._exchange(self.replicas, nodes * part, count) + self.replicas.gather(part, count)
            for part in parts
            if part
        )

    def _stage(self, stage: int) -> StageTimes:
        layout, zero, device = self.layout, self.layout.zero, self.hardware
        runs = self._runs[stage]
        numel, experts, count = layout.numel[stage], layout.experts[stage], max(1, len(runs))
        float8 = sum(unit.float8 for unit, _ in runs)
        sharded = self.state.fsdp and self.shard.size > 1
        gathers, reduced = [0.0 for _ in runs], [0.0 for _ in runs]
        if sharded and zero == 3:
            gathers = [self._gather(u.parameters, u.experts, u.float8, 1) for u, _ in runs]
        once = zero == 1 and (self._sums is None or self._sums.times == 1)
        if not once:
            reduced = [self._reduction(u.parameters, u.experts, 1) for u, _ in runs]
        deferred = stage in layout.deferred
        forward = [u.forward.device + u.exchanged[0] for u, _ in runs]
        recompute = [u.recompute.device + u.exchanged[1] if on else 0.0 for u, on in runs]
        inputs = [u.input_gradient.device + u.exchanged[2] for u, _ in runs]
        weights = [u.weight_gradient.device for u, _ in runs]
        full_backward = [a + b + c for a, b, c in zip(recompute, inputs, weights, strict=True)]
        halves = (
            [a + b for a, b in zip(recompute, inputs, strict=True)] if deferred else full_backward
        )
        if device.runs_ahead:
            all_forward = overlapped_seconds(forward, gathers)
            all_backward = overlapped_seconds(full_backward[::-1], gathers[::-1], reduced[::-1])
        else:  # CPU cores do not overlap communication with compute
            all_forward = sum(forward) + sum(gathers)
            all_backward = sum(full_backward) + sum(gathers) + sum(reduced)
        recomputed = sum(recompute)

        def host(*parts: str) -> float:
            """Host seconds to launch these parts (fields of `UnitTimes`) of all units of the stage."""
            launched = ((u, part) for u, on in runs for part in parts if on or part != "recompute")
            launches = sum(getattr(unit, part).launches for unit, part in launched)
            return launches * device.host_seconds + device.action_seconds

        backward = host("recompute", "input_gradient", "weight_gradient")
        at_once = host("recompute", "input_gradient") if deferred else backward
        deferred_host = host("weight_gradient") if deferred else host()
        skips = [skip for skip in layout.skips if skip.source == stage]
        skips_back = [skip for skip in layout.skips if skip.to == stage and skip.back]
        return StageTimes(
            forward=Duration(all_forward, host("forward")),
            backward=Duration(all_backward, backward, recomputed),
            input_gradient=Duration(sum(halves), at_once, recomputed),
            weight_gradient=Duration(sum(weights) if deferred else 0.0, deferred_host),
            sends_forward=self._message(layout.sent[stage] if stage + 1 < len(layout.sent) else 0),
            sends_backward=self._message(layout.received[stage]),
            skips_forward=tuple((skip.to, self._message(skip.nbytes)) for skip in skips),
            skips_backward=tuple((skip.source, self._message(skip.back)) for skip in skips_back),
            gather=self._gather(numel, experts, float8, count) if sharded and zero < 3 else 0.0,
            reduce=self._replication(numel, experts, count)
            + (self._reduction(numel, experts, count) if once else 0.0),
            update=self._update(stage),
        )

    def _message(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0

    def _update(self, stage: int) -> float:
        """Seconds of the optimizer's update of a rank's shard of a stage."""
        config, device, flops = self.config, self.hardware, 0.0
        experts, shards = self.layout.experts[stage], self.state.shards
        numel = (self.layout.numel[stage] - experts) / shards + experts / self.expert_shard.size
        if self.layout.orthogonalized:
            flops = self.layout.orthogonalized[stage] / shards
        touched = self.layout.touched[stage] / max(1, self.layout.numel[stage])
        touched += _CLIP if getattr(config.optimizer, "clip", None) is not None else 4
        touched += _HALVES if config.exact else 0
        seconds = numel * touched / (device.memory_bandwidth * device.memory_efficiency)
        if config.fsdp.cpu_offload:  # gradients to the host, parameters back; host memory is slower
            seconds = numel * (8 + touched) / device.host_bandwidth
        return seconds + flops / (device.bf16_flops * device.matmul_efficiency)

    def traffic(self, stage: int) -> Counter[str]:
        """Bytes that a rank sends per step, by kind: "messages" between stages, activations inside
        layers by axis, parameters "gathered" and gradients "reduced" along shard (those of experts
        along expert_shard), gradients "replicated"."""
        config, layout, m = self.config, self.layout, self.layout.microbatches
        place, moved = layout.place, Counter(dict.fromkeys(TRAFFIC, 0))
        if stage and place[stage - 1] != place[stage]:
            moved["messages"] += m * layout.received[stage]
        if stage + 1 < len(place) and place[stage + 1] != place[stage]:
            moved["messages"] += m * layout.sent[stage]
        for source, to, nbytes, back in layout.skips:
            if place[source] != place[to]:
                moved["messages"] += m * (nbytes * (source == stage) + back * (to == stage))
        for unit, recomputed in self._runs[stage]:
            for way in (0, 1, 2) if recomputed else (0, 2):
                moved.update({axis: m * nbytes for axis, nbytes in unit.sent[way].items()})
        if not self.state.fsdp:
            return moved
        replicas, experts = config.replicate, layout.experts[stage]
        gathers, reductions = (2 * m if layout.zero == 3 else 1), (1 if layout.zero == 1 else m)
        gradients, replications, sums = layout.numel[stage], 2, (1, 1)
        if self._sums is not None:
            # a weight used by two modules has two sums
            gradients = max(gradients, sum(unit.parameters for unit, _ in self._runs[stage]))
            reductions, sums = self._sums.times, self._sums[1:3]
            replications = self._sums.replica + 1  # plus the all-gather of the results

        def sent(numel: int, ranks: int) -> int:
            return numel * (ranks - 1) // ranks

        dense, shared = layout.numel[stage] - experts, gradients - experts
        for kind, gathered_numel, summed, many, link in (
            ("", dense, shared, sums[0], self.shard),
            ("expert_", experts, experts, sums[1], self.expert_shard),
        ):
            moved[f"{kind}gathered"] = gathers * self.itemsize * sent(gathered_numel, link.size)
            if not kind:
                less = (self.itemsize - 1) * sum(unit.float8 for unit, _ in self._runs[stage])
                moved["gathered"] -= gathers * sent(less, link.size)
            moved[f"{kind}reduced"] = reductions * many * 4 * sent(summed, link.size)
            replicated = replications * (replicas - 1) * 4 * summed
            moved["replicated"] += replicated // (replicas * link.size)
        return moved


class _Sums(NamedTuple):
    """With numerics=exact, the maximal number of partial sums to send: per gradient and per
    gradient of an expert, `times` per step; and per replica, once per step."""

    times: int
    dense: int
    experts: int
    replica: int


@cache
def _partial_sums(dp: int, replicate: int, ep: int, microbatches: int, zero: int) -> _Sums:
    from titanlike.techniques.exact_sums import keys_of, leaves_of

    def most(ranks: int, exchanges: Sequence[range]) -> int:
        """Sums of one exchange that as many neighbouring dp ranks have together."""
        counts = []
        for first, exchange in product(range(dp // ranks), exchanges):
            each = (leaves_of(first, m, microbatches=microbatches, peers=ranks) for m in exchange)
            counts.append(len(keys_of(dp * microbatches, chain.from_iterable(each))))
        return max(counts)

    every = [range(microbatches)]
    exchanges = every if zero == 1 else [range(m, m + 1) for m in range(microbatches)]
    replica = most(dp // replicate, every)
    return _Sums(len(exchanges), most(1, exchanges), most(ep, exchanges), replica)


def _orthogonalization(
    config: Config, model: nn.Module, stages: Sequence[Mapping[str, int]]
) -> list[float]:
    """FLOPs of Muon's Newton-Schulz iterations for each stage's matrices; 0 for other optimizers.

    stages: parameters of each stage by name.
    """
    choice = config.optimizer
    if isinstance(choice, CustomOptimizer):
        return [0.0] * len(stages)
    hidden = hidden_matrices(model, choice)
    shapes = [
        [model.get_parameter(n).shape[-2:] for n in hidden & names.keys()] for names in stages
    ]
    return [sum((choice.matrix_flops(*shape) for shape in stage), 0.0) for stage in shapes]
