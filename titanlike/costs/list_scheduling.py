"""An order made for the costs of a model's stages: whenever a rank is free it takes the most urgent
action that it can, under a limit of memory.

1. Each F and I has a key, the time at which it is wanted; F of a rank run in the order of their keys,
   and wait where the rank would hold more than its limit. I run by their keys, W when a rank would
   be idle otherwise, or when memory has to be freed.
2. Look-ahead: a rank does not begin what would delay a more urgent action that is about to arrive.

Without a limit there is no deadlock, whatever the keys; with one there may be, and no order comes of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from titanlike.costs.simulate import StageTimes, simulate
from titanlike.pipeline.order import Act, Order

_NEVER = float("inf")
_EQUAL = 1e-9  # of a time or of memory, relative

Keys = Sequence[Sequence[float]]  # of each stage, of each microbatch


@dataclass(frozen=True)
class Problem:
    """What an order is made for. Memory in any unit."""

    place: tuple[int, ...]
    microbatches: int
    times: Sequence[StageTimes]
    held: Sequence[float]  # memory of a microbatch in each stage, from F to the end of its backward
    queued: Sequence[float]  # of that, what stays between I and W
    limit: float  # of a rank
    runs_ahead: bool = True  # whether the host queues work on the device
    in_flight: float = _NEVER  # microbatches of all stages of a rank that it may hold

    @property
    def ranks(self) -> int:
        return max(self.place) + 1

    @cached_property
    def seconds(self) -> list[tuple[float, float, float]]:
        """Of F, I and W of each stage."""
        join = max if self.runs_ahead else (lambda device, host: device + host)
        each = [
            (times.forward, times.input_gradient, times.weight_gradient) for times in self.times
        ]
        return [tuple(join(d.device, d.host) for d in row) for row in each]

    @cached_property
    def messages(self) -> list[tuple[float, float]]:
        """Seconds of the message to the next stage, and to the one before."""
        place, last = self.place, len(self.place) - 1
        return [
            (
                own.sends_forward if s < last and place[s] != place[s + 1] else 0.0,
                own.sends_backward if s and place[s] != place[s - 1] else 0.0,
            )
            for s, own in enumerate(self.times)
        ]

    def room(self, rank: int) -> float:
        """Memory that activations of a rank may take."""
        return min(self.limit, self.in_flight * self.own[rank]) * (1 + _EQUAL)

    @cached_property
    def own(self) -> list[float]:
        """Memory of a microbatch in all stages of each rank."""
        each = [0.0] * self.ranks
        for rank, held in zip(self.place, self.held, strict=True):
            each[rank] += held
        return each

    @property
    def least_memory(self) -> float:
        """What activations take on the fullest rank with one microbatch at a time."""
        return max(self.own)

    def fits(self, order: Order) -> bool:
        return all(self.peak(order, rank) <= self.room(rank) for rank in range(self.ranks))

    def peak(self, order: Order, rank: int) -> float:
        """What activations of a rank take at the most."""
        now = most = 0.0
        for act in order.ranks[rank]:
            held, queued = self.held[act.stage], self.queued[act.stage]
            if act.kind == "F":
                now += held
                most = max(most, now)
            else:
                now -= {"B": held, "I": held - queued, "W": queued}[act.kind]
        return most

    def step(self, order: Order) -> float:
        """Seconds of a step."""
        return simulate(order, self.times, runs_ahead=self.runs_ahead).step


class Rule(NamedTuple):
    """How a rank decides."""

    ahead: float = 0.5  # share of an action for which a rank waits for a more urgent one
    weights: float = 0.5  # share of a W by which it may delay what is about to arrive
    frees: bool = False  # whether W run before an I where memory keeps a more urgent F waiting


def wanted(problem: Problem, order: Order) -> tuple[Keys, Keys]:
    """Keys of F and I: when an order's actions begin."""
    stages, m = len(problem.place), problem.microbatches
    forward, backward = ([[0.0] * m for _ in range(stages)] for _ in "FI")
    events = simulate(order, problem.times, runs_ahead=problem.runs_ahead).events
    for rows in events:
        for kind, stage, mb, start, _ in rows:
            if kind == "F":
                forward[stage][mb] = start
            elif kind in ("B", "I"):
                backward[stage][mb] = start
    return forward, backward


def list_order(problem: Problem, forward: Keys, backward: Keys, rule: Rule) -> Order | None:
    """The order that comes of keys of F and I; None for a deadlock."""
    run = _Run(problem, forward, backward, rule)
    return run.order() if run.run() else None


class _Run:
    """Ranks that compute: the state of `list_order`."""

    def __init__(self, problem: Problem, forward: Keys, backward: Keys, rule: Rule) -> None:
        self.problem, self.rule, self.backward = problem, rule, backward
        stages, ranks, m = len(problem.place), problem.ranks, problem.microbatches
        self.local = [[s for s in range(stages) if problem.place[s] == r] for r in range(ranks)]
        self.forwards = [  # of each rank, the last is next
            sorted(((forward[s][j], s, j) for s in own for j in range(m)), reverse=True)
            for own in self.local
        ]
        self.next_input = [0] * stages
        # when the input of F and I of each stage and microbatch is there
        self.ready_f = [[_NEVER] * m for _ in range(stages)]
        self.ready_i = [[_NEVER] * m for _ in range(stages)]
        self.ready_f[0] = [0.0] * m
        self.weights: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.memory = [0.0] * ranks
        self.free = [0.0] * ranks
        self.room = [problem.room(rank) for rank in range(ranks)]
        self.acts: list[list[Act]] = [[] for _ in range(ranks)]

    def order(self) -> Order:
        acts = tuple(map(tuple, self.acts))
        return Order(acts, self.problem.place, self.problem.microbatches)

    def run(self) -> bool:
        """Whether all is computed."""
        problem = self.problem
        events = [(0.0, rank) for rank in range(problem.ranks)]
        left = 3 * problem.microbatches * len(problem.place)
        while events and left:
            now, rank = heapq.heappop(events)
            if now < self.free[rank]:
                continue
            act, later = self._choose(rank, now)
            if act is None:
                if later < _NEVER:
                    heapq.heappush(events, (later, rank))
                continue
            left -= 1
            end, told, at = self._compute(rank, now, act)
            heapq.heappush(events, (end, rank))
            if told >= 0 and told != rank:
                heapq.heappush(events, (max(at, self.free[told]), told))
        return not left

    def _choose(self, rank: int, now: float) -> tuple[Act | None, float]:
        """What a rank computes next; if nothing, when to look again."""
        problem, soon = self.problem, _NEVER
        moment = now * (1 + _EQUAL) + 1e-15
        best: Act | None = None
        key = urgent = _NEVER  # of the best, of what arrives next
        for stage in self.local[rank]:
            mb = self.next_input[stage]
            if mb < problem.microbatches:
                ready = self.ready_i[stage][mb]
                wanted = self.backward[stage][mb]
                if ready <= moment:
                    if wanted < key:
                        best, key = Act("I", stage, mb), wanted
                elif ready < soon:
                    soon, urgent = ready, wanted
        full = False
        if self.forwards[rank]:
            wanted, stage, mb = self.forwards[rank][-1]
            ready = self.ready_f[stage][mb]
            if ready < _NEVER:
                full = self.memory[rank] + problem.held[stage] > self.room[rank]
                if not full and ready <= moment:
                    if wanted < key:
                        best, key = Act("F", stage, mb), wanted
                elif not full and ready < soon:
                    soon, urgent = ready, wanted
        if best is not None and urgent < key:
            seconds = problem.seconds[best.stage]["FI".index(best.kind)]
            if soon - now < self.rule.ahead * seconds:
                best = None
        if full and self.rule.frees and self.weights[rank] and wanted < key and ready <= moment:
            return Act("W", *self.weights[rank][0]), soon
        if best is None and self.weights[rank]:
            stage, mb = self.weights[rank][0]
            late = now + self.rule.weights * problem.seconds[stage][2]
            if late <= soon or (full and soon == _NEVER):
                best = Act("W", stage, mb)
        return best, soon

    def _compute(self, rank: int, now: float, act: Act) -> tuple[float, int, float]:
        """(its end, the rank that its result is for or -1, when it is there)"""
        problem, (kind, stage, mb) = self.problem, act
        seconds, sends = problem.seconds[stage], problem.messages[stage]
        self.acts[rank].append(act)
        told, at = -1, _NEVER
        if kind == "F":
            end = now + seconds[0]
            self.forwards[rank].pop()
            self.memory[rank] += problem.held[stage]
            if stage + 1 < len(problem.place):
                told, at = problem.place[stage + 1], end + sends[0]
                self.ready_f[stage + 1][mb] = at
            else:
                self.ready_i[stage][mb] = end
        elif kind == "I":
            end = now + seconds[1]
            self.next_input[stage] += 1
            self.weights[rank].append((stage, mb))
            self.memory[rank] -= problem.held[stage] - problem.queued[stage]
            if stage:
                told, at = problem.place[stage - 1], end + sends[1]
                self.ready_i[stage - 1][mb] = at
        else:
            end = now + seconds[2]
            self.weights[rank].pop(0)
            self.memory[rank] -= problem.queued[stage]
        self.free[rank] = end
        return end, told, at


def joined(order: Order) -> Order:
    """The same with a B for an I that its W follows at once."""
    ranks = []
    for acts in order.ranks:
        row: list[Act] = []
        for act in acts:
            if act.kind == "W" and row and row[-1] == act._replace(kind="I"):
                row[-1] = act._replace(kind="B")
            else:
                row.append(act)
        ranks.append(tuple(row))
    return replace(order, ranks=tuple(ranks))
