"""Simulate a training step on every pipeline rank: an Order and its costs as events in time.

1. The Order is walked as torch's lowering does (`_add_send_recv`): one action of each rank in turn,
   once its dependencies have been walked. A send follows the action that computes its tensor, and
   its receive is at once appended to the receiver's list. So each rank's list is that of the
   runtime, and when an action is walked, the times of all that it waits for are known.
2. A rank computes in one stream, in the order of its list. A P2P transfer is a rendezvous in the
   stream of a pair of ranks: it begins when both have reached it, after their earlier actions and
   after earlier transfers of the pair in either direction. A computation waits for its receive;
   nothing waits for sends.
3. Before the first action of a rank come the all-gathers of its stages (ZeRO 1 and 2); after the
   last backward of a stage its gradients are reduced (`StageTimes`). Both block the rank.
4. An asynchronous device lags behind its host or waits for it; otherwise the host's time is added.
   A step ends for all ranks at once, with the all-reduce of the gradient norm.

Tensor- and data-parallel ranks of a pipeline rank do the same at the same time: one represents all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from titanlike.core.pipeline.order import Action, Order
from titanlike.watch.chart import Span, Transfer


@dataclass(frozen=True)
class Duration:
    """Seconds of an action on the device, and of the host that launches it."""

    device: float = 0.0
    host: float = 0.0
    recompute: float = 0.0  # part of `device`: recomputed forwards


@dataclass(frozen=True)
class StageTimes:
    """Times of a stage: per microbatch, and once per step."""

    forward: Duration
    backward: Duration  # full
    input_gradient: Duration  # this and the next: the halves of a split backward
    weight_gradient: Duration
    sends_forward: float = 0.0  # seconds of the P2P transfer to the next stage
    sends_backward: float = 0.0  # seconds of the P2P transfer to the previous stage
    # skip connections: (target stage, seconds of the transfer)
    skips_forward: tuple[tuple[int, float], ...] = ()
    skips_backward: tuple[tuple[int, float], ...] = ()
    gather: float = 0.0  # all-gather of its parameters, once per step
    reduce: float = 0.0  # reduction of its gradients, once per step
    update: float = 0.0  # of its parameters

    def of(self, kind: str) -> Duration:
        names = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}
        return getattr(self, names[kind])

    def as_data(self) -> dict[str, float]:
        """Device seconds by name."""
        names = ("forward", "backward", "input_gradient", "weight_gradient")
        return {f"{name}_seconds": getattr(self, name).device for name in names}


def equal_stages(order: Order, forward: float = 1.0, backward: float = 2.0) -> list[StageTimes]:
    """Make equal stages whose times sum to `forward` and `backward` on each rank, per microbatch.
    P2P transfers take no time; W is half of a split backward."""
    chunks = order.stages / len(order.ranks)
    half = Duration(backward / 2 / chunks)
    times = StageTimes(Duration(forward / chunks), Duration(backward / chunks), half, half)
    return [times] * order.stages


@dataclass
class Simulation:
    """One step of all pipeline ranks."""

    events: list[list[Span]]  # per pipeline rank: actions, gather, reduce, update, agree
    messages: list[Transfer]
    pipeline: float  # seconds until the last rank has computed and reduced everything
    step: float  # seconds including the update
    computes: list[float]  # seconds of computation per rank
    exchanges: list[float]  # seconds of all-gathers and reductions per rank
    # (rank, stage): seconds that the rank waited for results of that stage
    waits: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def bubble(self) -> float:
        """The mean share of the pipeline's time in which a rank is idle."""
        if not self.pipeline:
            return 0.0
        ranks = len(self.computes)
        busy = sum(self.computes) + sum(self.exchanges)
        return max(0.0, 1 - busy / (ranks * self.pipeline))


def simulate(
    order: Order, stages: Sequence[StageTimes], *, runs_ahead: bool = True, agree: float = 0.0
) -> Simulation:
    """Simulate a step. stages: times of each stage; runs_ahead: whether the device is asynchronous;
    agree: seconds of the all-reduce of the gradient norm.

    Raises ValueError for an order that deadlocks.
    """
    place, last, ranks = order.stage_to_rank, order.stages - 1, len(order.ranks)
    events: list[list[Span]] = [[] for _ in range(ranks)]
    messages: list[Transfer] = []
    waits: dict[tuple[int, int], float] = {}
    device, computes, exchanges = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks

    def hold_up(kind: str, stage: int, seconds: float) -> None:
        """Add a collective that blocks a stage's rank."""
        if seconds:
            rank = place[stage]
            events[rank].append(Span(kind, stage, -1, device[rank], device[rank] + seconds))
            device[rank] += seconds
            exchanges[rank] += seconds

    for stage, times in enumerate(stages):
        hold_up("gather", stage, times.gather)
    host = list(device)  # the host waits for the all-gathers
    durations = [{k: (times.of(k).device, times.of(k).host) for k in "FBIW"} for times in stages]
    left = [order.microbatches] * order.stages
    # whether forward -> [stage][microbatch] -> when its input has arrived
    never: list[float | None] = [None] * order.microbatches
    arrived = {way: [[*never] for _ in stages] for way in (True, False)}
    skipped: dict[tuple[bool, int, int], float] = {}  # the same for skip connections
    pairs: dict[tuple[int, int], float] = {}  # when the stream of two ranks becomes free

    def send(stage: int, other: int, computed: float, seconds: float) -> float:
        """Add a P2P transfer; returns when it has arrived."""
        rank, to = place[stage], place[other]
        if to == rank:
            return computed
        pair = (rank, to) if rank < to else (to, rank)
        begin = max(computed, device[to], pairs.get(pair, 0.0))
        pairs[pair] = end = begin + seconds
        messages.append(Transfer(rank, begin, end))
        return end

    position = [0] * ranks
    todo = [rank for rank in range(ranks) if order.ranks[rank]]
    while todo:
        before = sum(position)
        for rank in todo:
            kind, stage, mb = order.ranks[rank][position[rank]]
            forward = kind == "F"
            ready: float | None = 0.0
            if kind != "W" and stage != (0 if forward else last):
                ready = arrived[forward][stage][mb]
            if ready is None:
                continue
            if skipped and kind != "W":
                ready = max(ready, skipped.get((forward, stage, mb), 0.0))
            position[rank] += 1
            seconds, launch = durations[stage][kind]
            clock = device[rank]
            if not runs_ahead:
                seconds += launch
                launch = 0.0
            start = max(clock, ready, host[rank])
            if ready > clock:
                key = rank, stage + (-1 if forward else 1)
                waits[key] = waits.get(key, 0.0) + ready - clock
            host[rank] += launch
            end = max(start + seconds, host[rank])
            device[rank] = end
            computes[rank] += end - start
            events[rank].append(Span(kind, stage, mb, start, end))
            if kind in "BW":
                left[stage] -= 1
                if not left[stage]:
                    hold_up("reduce", stage, stages[stage].reduce)
            if kind == "W" or stage == (last if forward else 0):
                continue
            other = stage + (1 if forward else -1)
            times = stages[stage]
            seconds = times.sends_forward if forward else times.sends_backward
            arrived[forward][other][mb] = send(stage, other, end, seconds)
            for other, seconds in times.skips_forward if forward else times.skips_backward:
                key = forward, other, mb
                there = send(stage, other, end, seconds)
                skipped[key] = max(there, skipped.get(key, 0.0))
        if sum(position) == before:
            waiting = ", ".join(str(order.ranks[rank][position[rank]]) for rank in todo)
            raise ValueError(f"the order waits forever, at {waiting}")
        todo = [rank for rank in todo if position[rank] < len(order.ranks[rank])]
    pipeline = max(device)
    updates = [0.0] * ranks
    for stage, times in enumerate(stages):
        updates[place[stage]] += times.update
    for rank, seconds in enumerate(updates):
        begin = pipeline + agree
        if agree:
            events[rank].append(Span("agree", -1, -1, pipeline, begin))
        if seconds:
            events[rank].append(Span("update", -1, -1, begin, begin + seconds))
    step = pipeline + agree + max(updates)
    return Simulation(events, messages, pipeline, step, computes, exchanges, waits)


def most_held(acts: Iterable[Action], held: Sequence[float], queued: Sequence[float]) -> float:
    """Peak memory of a rank's activations, each held from its F to the end of its backward.

    held: memory of a microbatch by stage; queued: the part of it that is kept between I and W.
    """
    now = peak = 0.0
    for kind, stage, _ in acts:
        if kind == "F":
            now += held[stage]
            peak = max(peak, now)
        elif kind == "I":
            now -= held[stage] - queued[stage]
        else:
            now -= held[stage] if kind == "B" else queued[stage]
    return peak


def in_flight(acts: Sequence[Action]) -> int:
    """The maximal number of forwards of a rank that wait for their backward."""
    ones = [1] * (1 + max((act.stage for act in acts), default=0))
    return round(most_held(acts, ones, ones))
