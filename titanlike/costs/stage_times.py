"""How long each stage of a drafted layout takes on a device, and what its ranks exchange.

1. Units take what `unit_times.py` says.
2. FSDP's gathers and reductions come once a step, or unit by unit beside what is computed
   (`overlap.py`), by `fsdp.zero` as in `parallel/sharding.py`; those of experts are by themselves,
   among fewer ranks.
3. Messages between stages have the sizes of the draft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from titanlike.config.hardware import Hardware
from titanlike.config.schema import AdamW, Config, Muon, Sgd
from titanlike.costs import links
from titanlike.costs.links import backward_seconds, forward_seconds
from titanlike.costs.simulate import Duration, StageTimes
from titanlike.costs.unit_costs import CostError
from titanlike.costs.unit_times import Roofline, UnitTimes, as_measured, guessed_times, unit_times
from titanlike.distributed.sharding import StateBytes, compute_dtype
from titanlike.graph.cut import messages
from titanlike.optim.muon import hidden_matrices
from titanlike.training.draft import Draft


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
    """Of a drafted layout on a device."""

    stages: list[StageTimes]
    traffic: list[Traffic]  # of each stage
    estimated: str = ""  # why units' times are guessed by parameters
    parts: list[dict[str, float]] = field(default_factory=list)  # of each stage, a microbatch's


@dataclass(frozen=True)
class StageLayout:
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
    experts: Sequence[int]  # parameters of experts among them
    orthogonalized: Sequence[float] = ()  # FLOPs of Muon's updates, of each stage

    @classmethod
    def of(cls, config: Config, draft: Draft) -> StageLayout:
        graphs = draft.model_graph.graphs(draft.model_graph.fields, True)
        numel = draft.memory().unit_parameters()
        sizes = [[sum(t.nbytes for t in flow) for flow in messages(graph)] for graph in graphs]
        return cls(
            stages=draft.stages,
            recomputed=draft.recomputed.blocks,
            deferred=draft.deferred,
            place=draft.order.place,
            zero=draft.zero,
            microbatches=draft.microbatches,
            numel=[draft.stage_numel(stage) for stage in range(draft.order.stages)],
            received=[0, *(received for received, _ in sizes[1:])],
            sent=[*(sent for _, sent in sizes[:-1]), 0],
            experts=[sum(numel[name][1] for name in names) for names in draft.stages],
            orthogonalized=orthogonalization(
                config, draft.model_graph.model, draft.stage_parameters
            ),
        )


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
    return stage_times(config, StageLayout.of(config, draft), hardware, units, estimated)


def stage_times(
    config: Config,
    layout: StageLayout,
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
    recompute = sum(u.recompute.device + u.exchanged_again for u, recomputed in own if recomputed)
    exchanged: Counter[str] = Counter()
    for unit, _ in own:
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
        self.bandwidth, self.latency = links.message(config, hardware)
        self.itemsize = compute_dtype(config).itemsize
        self.shard = links.link(config, "shard", hardware)
        self.expert_shard = links.link(config, "expert_shard", hardware)
        both = self.shard, self.expert_shard
        self.gathers = [links.sharded(link, hardware.gather_bandwidth) for link in both]
        self.reductions = [links.sharded(link, hardware.reduce_bandwidth) for link in both]
        self.replicas = links.link(config, "replicate", hardware)

    def gather(self, numel: int, experts: int, count: int) -> float:
        """Seconds in which parameters are gathered; experts: how many of them are of experts."""
        shard, expert_shard = self.gathers
        one = shard.gather(self.itemsize * (numel - experts), count)
        return one + expert_shard.gather(self.itemsize * experts, count if experts else 0)

    def reduction(self, numel: int, experts: int, count: int) -> float:
        """Seconds in which gradients are summed, in fp32."""
        if not self.state.fsdp:
            return 0.0
        found = 0.0
        for size, shard in zip((numel - experts, experts), self.reductions, strict=True):
            if size:
                found += shard.gather(4 * size, count)
                found += self.replicas.all_reduce(4 * size / shard.size, count)
        return found

    def duration(
        self, seconds: float, launches: float, recompute: float, waiting: float
    ) -> Duration:
        device = self.hardware
        host = launches * device.host_seconds + device.action_seconds
        return Duration(seconds, host, recompute, waiting)

    def orthogonalized(self, stage: int) -> float:
        flops = self.layout.orthogonalized
        return flops[stage] / self.state.shards if flops else 0.0

    def message(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0

    def stage(
        self, stage: int, own: Sequence[tuple[UnitTimes, bool]]
    ) -> tuple[StageTimes, Traffic]:
        layout, zero = self.layout, self.layout.zero
        numel, experts, count = layout.numel[stage], layout.experts[stage], max(1, len(own))
        sharded = self.state.fsdp and self.shard.size > 1
        each = sharded and zero == 3
        gathers = [self.gather(u.parameters, u.experts, 1) if each else 0 for u, _ in own]
        reduced = [
            self.reduction(u.parameters, u.experts, 1) if self.state.fsdp and zero > 1 else 0.0
            for u, _ in own
        ]
        forward = [u.forward.device + u.exchanged_forward for u, _ in own]
        recompute = [u.recompute.device + u.exchanged_again if on else 0.0 for u, on in own]
        deferred = stage in layout.deferred
        weights = [u.weight_gradient.device for u, _ in own]
        inputs = [u.input_gradient.device + u.exchanged_backward for u, _ in own]
        whole = [a + b + c for a, b, c in zip(recompute, inputs, weights, strict=True)]
        halves = [a + b for a, b in zip(recompute, inputs, strict=True)] if deferred else whole
        exchanged = sum(u.exchanged_forward for u, _ in own)
        launched = [
            sum(getattr(u, part).launches for u, on in own if on or part != "recompute")
            for part in ("forward", "recompute", "input_gradient", "weight_gradient")
        ]
        if self.hardware.runs_ahead:
            all_forward = forward_seconds(forward, gathers)
            all_backward = backward_seconds(whole[::-1], gathers[::-1], reduced[::-1])
        else:  # a core that computes sends, too
            all_forward = sum(forward) + sum(gathers)
            all_backward = sum(whole) + sum(gathers) + sum(reduced)
        repeated, sent_back = sum(recompute), sum(u.exchanged_backward for u, _ in own)
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
            gather=self.gather(numel, experts, count) if sharded and zero < 3 else 0.0,
            reduce=self.reduction(numel, experts, count) if zero == 1 else 0.0,
            update=update_seconds(
                self.config,
                (numel - experts) / self.state.shards + experts / self.expert_shard.size,
                self.orthogonalized(stage),
                self.hardware,
            ),
        )
        return times, self._traffic(own, stage)

    def _traffic(self, own: Sequence[tuple[UnitTimes, bool]], stage: int) -> Traffic:
        config, layout, m = self.config, self.layout, self.layout.microbatches
        moved = Traffic(messages=m * self._messages(stage))
        for unit, recomputed in own:
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

    def _messages(self, stage: int) -> int:
        """Bytes that a stage sends to others, forward and backward of a microbatch."""
        layout, place, sent = self.layout, self.layout.place, 0
        if stage and place[stage - 1] != place[stage]:
            sent += layout.received[stage]
        if stage + 1 < len(place) and place[stage + 1] != place[stage]:
            sent += layout.sent[stage]
        return sent


# --- how long the optimizer's update takes --------------------------------------------------------


_CLIP = 12  # bytes a parameter: the norm reads gradients, clipping reads and writes them


def update_seconds(config: Config, numel: float, flops: float, hardware: Hardware) -> float:
    """numel: parameters that a rank updates; flops: see `orthogonalization`."""
    optimizer = config.optimizer
    match optimizer:
        case Sgd(momentum=momentum):
            touched = 12 + (8 if momentum > 0 else 0)
        case AdamW(state_dtype="bf16"):
            touched = 20
        case _:
            touched = 28
    touched += _CLIP if getattr(optimizer, "clip", None) is not None else 4
    seconds = numel * touched / (hardware.memory_bandwidth * hardware.memory_efficiency)
    if config.fsdp.cpu_offload:  # gradients to the host, parameters back; its memory is slower
        seconds = numel * (8 + touched) / hardware.host_bandwidth
    return seconds + flops / (hardware.bf16_flops * hardware.matmul_efficiency)


def orthogonalization(
    config: Config, model: nn.Module, stages: Sequence[Mapping[str, int]]
) -> list[float]:
    """FLOPs of Muon's Newton-Schulz iterations (optim/orthogonalize.py) on each stage's matrices.

    stages: of each the names of its parameters.
    """
    found = [0.0] * len(stages)
    if not isinstance(config.optimizer, Muon):
        return found
    hidden = hidden_matrices(model, config.optimizer)
    for stage, names in enumerate(stages):
        for name in hidden & names.keys():
            *_, rows, columns = model.get_parameter(name).shape
            small, large = sorted((rows, columns))
            # x x^T, its square, and their product with x
            each = 4 * small * small * large + 2 * small**3
            found[stage] += config.optimizer.ns_steps * each
    return found
