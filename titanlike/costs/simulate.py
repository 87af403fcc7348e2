"""A training step on every pipeline rank, as events in time: the Order, with what it costs.

1. The Order is walked as torch's lowering walks it (`_add_send_recv`): an action of each rank in
   turn, as soon as what it needs has been walked. A send comes behind the action that makes its
   message, and its receive at once behind what the receiver has walked by then. So each rank's list
   is that of the runtime, and when an action is walked all that it waits for has its time already.
2. A rank computes in one stream, in the order of its list. A message is a rendezvous in the stream
   of its pair of ranks: it begins when both have reached it, behind what they computed before and
   behind earlier messages of the pair, either way. A computation waits for its message; nobody
   waits for sends.
3. The first action of a rank comes behind the gathers of all its stages (ZeRO 1 and 2), and behind
   the last backward of a stage its gradients are reduced (`StageTimes`): both hold up the rank.
4. On a device that works by itself the host is ahead of it, or holds it up; else the host's time is
   added. A step ends for all ranks at once: they agree on the norm of the gradients.

Tensor- and data-parallel ranks of a pipeline rank do the same at the same time: one stands for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from titanlike.metrics.chart import Span, Transfer
from titanlike.pipeline.order import Action, Order


@dataclass(frozen=True)
class Duration:
    """Seconds of an action: of the device, and of the host that launches it."""

    device: float = 0.0
    host: float = 0.0
    recompute: float = 0.0  # of the device: that forwards run again


@dataclass(frozen=True)
class StageTimes:
    """What a stage takes for a microbatch, and what it takes once a step."""

    forward: Duration
    backward: Duration  # whole
    input_gradient: Duration  # the halves of a backward that is split
    weight_gradient: Duration
    sends_forward: float = 0.0  # seconds of the message to the next stage
    sends_backward: float = 0.0  # and of that to the one before
    # (a stage further on or back, seconds of the message to it)
    skips_forward: tuple[tuple[int, float], ...] = ()
    skips_backward: tuple[tuple[int, float], ...] = ()
    gather: float = 0.0  # of its parameters, once a step
    reduce: float = 0.0  # of its gradients, once a step
    update: float = 0.0  # of its parameters

    def of(self, kind: str) -> Duration:
        names = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}
        return getattr(self, names[kind])

    def as_data(self) -> dict[str, float]:
        """Seconds of a device."""
        names = ("forward", "backward", "input_gradient", "weight_gradient")
        return {f"{name}_seconds": getattr(self, name).device for name in names}


def equal_stages(order: Order, forward: float = 1.0, backward: float = 2.0) -> list[StageTimes]:
    """Stages that together take a rank so long for a microbatch; messages take no time.

    Half of a split backward is W.
    """
    chunks = order.stages / len(order.ranks)
    half = Duration(backward / 2 / chunks)
    times = StageTimes(Duration(forward / chunks), Duration(backward / chunks), half, half)
    return [times] * order.stages


@dataclass
class Simulation:
    """One step of all pipeline ranks."""

    events: list[list[Span]]  # of each pipeline rank: actions, gather, reduce, update, agree
    messages: list[Transfer]
    pipeline: float  # seconds until the last rank has no more to compute or to reduce
    step: float  # with the update
    computes: list[float]  # seconds of each rank
    exchanges: list[float]  # seconds of each rank that are gathers and reductions
    # (rank, stage): seconds that the rank waited for results of that stage
    waits: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def bubble(self) -> float:
        """Share of the pipeline's time in which a rank waits for others, on average."""
        if not self.pipeline:
            return 0.0
        ranks = len(self.computes)
        busy = sum(self.computes) + sum(self.exchanges)
        return max(0.0, 1 - busy / (ranks * self.pipeline))


def simulate(
    order: Order,
    stages: Sequence[StageTimes],
    *,
    runs_ahead: bool = True,
    agree: float = 0.0,
) -> Simulation:
    """stages: what each takes; runs_ahead: whether the host queues work on a device; agree: seconds
    in which all ranks agree on the norm.

    Raises ValueError for an order that waits forever.
    """
    place, last, ranks = order.stage_to_rank, order.stages - 1, len(order.ranks)
    events: list[list[Span]] = [[] for _ in range(ranks)]
    messages: list[Transfer] = []
    waits: dict[tuple[int, int], float] = {}
    device, computes, exchanges = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks

    def hold_up(kind: str, stage: int, seconds: float) -> None:
        """A collective for which the computations of a stage's rank wait."""
        if seconds:
            rank = place[stage]
            events[rank].append(Span(kind, stage, -1, device[rank], device[rank] + seconds))
            device[rank] += seconds
            exchanges[rank] += seconds

    for stage, times in enumerate(stages):
        hold_up("gather", stage, times.gather)
    host = list(device)  # it waits for gathered sizes
    durations = [{k: (times.of(k).device, times.of(k).host) for k in "FBIW"} for times in stages]
    left = [order.microbatches] * order.stages
    # forward? -> of each stage and microbatch, when its input is there
    never: list[float | None] = [None] * order.microbatches
    arrived = {way: [[*never] for _ in stages] for way in (True, False)}
    skipped: dict[tuple[bool, int, int], float] = {}  # the same of skip connections
    pairs: dict[tuple[int, int], float] = {}  # when the stream of two ranks is free

    def send(
        forward: bool, stage: int, other: int, mb: int, computed: float, seconds: float
    ) -> float:
        """When it has arrived."""
        rank, to = place[stage], place[other]
        if to == rank:
            return computed
        pair = (rank, to) if rank < to else (to, rank)
        begin = max(computed, device[to], pairs.get(pair, 0.0))
        pairs[pair] = end = begin + seconds
        messages.append(Transfer("F" if forward else "B", stage, mb, rank, to, begin, end))
        return end

    at = [0] * ranks
    todo = [rank for rank in range(ranks) if order.ranks[rank]]
    while todo:
        before = sum(at)
        for rank in todo:
            kind, stage, mb = order.ranks[rank][at[rank]]
            forward = kind == "F"
            ready: float | None = 0.0
            if kind != "W" and stage != (0 if forward else last):
                ready = arrived[forward][stage][mb]
            if ready is None:
                continue
            if skipped and kind != "W":
                ready = max(ready, skipped.get((forward, stage, mb), 0.0))
            at[rank] += 1
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
            arrived[forward][other][mb] = send(forward, stage, other, mb, end, seconds)
            for other, seconds in times.skips_forward if forward else times.skips_backward:
                key = forward, other, mb
                there = send(forward, stage, other, mb, end, seconds)
                skipped[key] = max(there, skipped.get(key, 0.0))
        if sum(at) == before:
            waiting = ", ".join(str(order.ranks[rank][at[rank]]) for rank in todo)
            raise ValueError(f"the order waits forever, at {waiting}")
        todo = [rank for rank in todo if at[rank] < len(order.ranks[rank])]
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
    """The most that a rank holds for microbatches, from F to the end of their backward; held: of
    one in each stage; queued: of that, what stays between I and W."""
    now = most = 0.0
    for kind, stage, _ in acts:
        if kind == "F":
            now += held[stage]
            most = max(most, now)
        elif kind == "I":
            now -= held[stage] - queued[stage]
        else:
            now -= held[stage] if kind == "B" else queued[stage]
    return most


def in_flight(acts: Sequence[Action]) -> int:
    """The most forwards of a rank at a time that wait for their backward."""
    ones = [1] * (1 + max((act.stage for act in acts), default=0))
    return round(most_held(acts, ones, ones))
