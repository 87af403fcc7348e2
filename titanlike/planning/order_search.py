"""The best order for costs of stages under a limit of memory: known schedules, list scheduling,
moves.

1. Known orders that fit are candidates themselves; of all, fitting or not, the times at which their
   actions begin are keys for list scheduling (`list_order`).
2. So are blocks: a microbatch through all stages and back without a pause, the next one a period
   later. With a period as long as the block it is one microbatch at a time, the least memory that
   there is.
3. In the fastest single actions are moved, as long as steps get no longer. A small order is
   annealed, its step may get longer for a while: from the best of one rank to a better one several
   have to change.

Every candidate is simulated: what is found is never slower than the best known order that fits.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from titanlike.costs.simulate import StageTimes, most_held, simulate
from titanlike.pipeline.order import Action, Order

_NEVER = float("inf")
_EQUAL = 1e-9  # of a time or of memory, relative

Keys = Sequence[Sequence[float]]  # of each stage, of each microbatch


@dataclass(frozen=True)
class OrderProblem:
    """What an order is made for. Memory in any unit."""

    place: tuple[int, ...]  # rank of each stage
    microbatches: int
    times: Sequence[StageTimes]
    held: Sequence[float]  # memory of a microbatch in each stage, from F to the end of its backward
    queued: Sequence[float]  # of that, what stays between I and W
    limit: float  # of a rank
    runs_ahead: bool = True  # whether the host queues work on the device
    in_flight: float = _NEVER  # microbatches of all stages of a rank that it may hold
    starts: tuple[int, ...] = ()  # the first unit of each stage

    @property
    def ranks(self) -> int:
        return max(self.place) + 1

    @cached_property
    def local(self) -> list[list[int]]:
        """Stages of each rank."""
        return [[s for s, at in enumerate(self.place) if at == rank] for rank in range(self.ranks)]

    @cached_property
    def seconds(self) -> list[tuple[float, float, float]]:
        """Seconds of F, I and W of durations stage."""
        join = max if self.runs_ahead else (lambda device, host: device + host)
        durations = [(t.forward, t.input_gradient, t.weight_gradient) for t in self.times]
        return [tuple(join(d.device, d.host) for d in row) for row in durations]

    @cached_property
    def messages(self) -> list[tuple[float, float]]:
        """Seconds of the message to the next stage, and to the one before."""
        place, last = self.place, len(self.place) - 1
        return [
            (
                times.sends_forward if s < last and place[s] != place[s + 1] else 0.0,
                times.sends_backward if s and place[s] != place[s - 1] else 0.0,
            )
            for s, times in enumerate(self.times)
        ]

    def room(self, rank: int) -> float:
        """Memory that activations of a rank may take."""
        return min(self.limit, self.in_flight * self.microbatch_memory[rank]) * (1 + _EQUAL)

    @cached_property
    def microbatch_memory(self) -> list[float]:
        """Memory of a microbatch in all stages of each rank."""
        return [sum((self.held[stage] for stage in local), 0.0) for local in self.local]

    @property
    def least_memory(self) -> float:
        """What activations take on the fullest rank with one microbatch at a time."""
        return max(self.microbatch_memory)

    def fits(self, order: Order) -> bool:
        return all(self.peak(order, rank) <= self.room(rank) for rank in range(self.ranks))

    def peak(self, order: Order, rank: int) -> float:
        """What activations of a rank take at the most."""
        return most_held(order.ranks[rank], self.held, self.queued)

    def step(self, order: Order) -> float:
        """Seconds of a step."""
        return simulate(order, self.times, runs_ahead=self.runs_ahead).step


@dataclass(frozen=True)
class SearchResult:
    problem: OrderProblem
    order: Order
    seconds: float  # of a step, simulated
    name: str = ""  # of the known schedule that it is


def fastest(results: Iterable[SearchResult | None]) -> SearchResult | None:
    """The first of the fastest; None where there is none."""
    return min(filter(None, results), key=lambda result: result.seconds, default=None)


# --- list scheduling ------------------------------------------------------------------------------


class Rule(NamedTuple):
    """How a rank decides."""

    ahead: float = 0.5  # share of an action for which a rank waits for a more urgent one
    weights: float = 0.5  # share of a W by which it may delay what is about to arrive
    frees: bool = False  # whether W run before an I where memory keeps a more urgent F waiting


def wanted(problem: OrderProblem, order: Order) -> tuple[Keys, Keys]:
    """Keys of F and I: when an order's actions begin."""
    stages, m = len(problem.place), problem.microbatches
    forward, backward = ([[0.0] * m for _ in range(stages)] for _ in "FI")
    events = simulate(order, problem.times, runs_ahead=problem.runs_ahead).events
    for kind, stage, mb, start, _ in chain.from_iterable(events):
        if kind == "F":
            forward[stage][mb] = start
        elif kind in ("B", "I"):
            backward[stage][mb] = start
    return forward, backward


def list_order(problem: OrderProblem, forward: Keys, backward: Keys, rule: Rule) -> Order | None:
    """The order that comes of keys of F and I; None for a deadlock."""
    run = _Run(problem, forward, backward, rule)
    events = [(0.0, rank) for rank in range(problem.ranks)]
    left = 3 * problem.microbatches * len(problem.place)
    while events and left:
        now, rank = heapq.heappop(events)
        if now < run.free[rank]:
            continue
        act, later = run.choose(rank, now)
        if act is not None:
            left -= 1
            receiver, at = run.compute(rank, now, act)
            heapq.heappush(events, (run.free[rank], rank))
            if receiver not in (-1, rank):
                heapq.heappush(events, (max(at, run.free[receiver]), receiver))
        elif later < _NEVER:
            heapq.heappush(events, (later, rank))
    acts = tuple(map(tuple, run.acts))
    return None if left else Order(acts, problem.place, problem.microbatches)


class _Run:
    """Ranks that compute: the state of `list_order`."""

    def __init__(self, problem: OrderProblem, forward: Keys, backward: Keys, rule: Rule) -> None:
        self.problem, self.rule, self.backward = problem, rule, backward
        stages, ranks, m = len(problem.place), problem.ranks, problem.microbatches
        self.forwards = [  # of each rank, the last is next
            sorted(((forward[s][j], s, j) for s in stages_of_rank for j in range(m)), reverse=True)
            for stages_of_rank in problem.local
        ]
        self.next_input = [0] * stages
        # when the input of F and I of each stage and microbatch is there
        self.ready_f = [[_NEVER] * m for _ in range(stages)]
        self.ready_i = [[_NEVER] * m for _ in range(stages)]
        self.ready_f[0] = [0.0] * m
        self.weights: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.memory = [0.0] * ranks
        self.free = [0.0] * ranks  # when each has computed what it began
        self.room = [problem.room(rank) for rank in range(ranks)]
        self.acts: list[list[Action]] = [[] for _ in range(ranks)]

    def choose(self, rank: int, now: float) -> tuple[Action | None, float]:
        """What a rank computes next; if nothing, when to look again."""
        problem, soon = self.problem, _NEVER
        moment = now * (1 + _EQUAL) + 1e-15
        best: Action | None = None
        key = urgent = _NEVER  # of the best, of what arrives next
        for stage in problem.local[rank]:
            mb = self.next_input[stage]
            if mb < problem.microbatches:
                ready = self.ready_i[stage][mb]
                wanted = self.backward[stage][mb]
                if ready <= moment:
                    if wanted < key:
                        best, key = Action("I", stage, mb), wanted
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
                        best, key = Action("F", stage, mb), wanted
                elif not full and ready < soon:
                    soon, urgent = ready, wanted
        if best is not None and urgent < key:
            seconds = problem.seconds[best.stage]["FI".index(best.kind)]
            if soon - now < self.rule.ahead * seconds:
                best = None
        if full and self.rule.frees and self.weights[rank] and wanted < key and ready <= moment:
            return Action("W", *self.weights[rank][0]), soon
        if best is None and self.weights[rank]:
            stage, mb = self.weights[rank][0]
            late = now + self.rule.weights * problem.seconds[stage][2]
            if late <= soon or (full and soon == _NEVER):
                best = Action("W", stage, mb)
        return best, soon

    def compute(self, rank: int, now: float, act: Action) -> tuple[int, float]:
        """(the rank that its result is for or -1, when it is there)"""
        problem, (kind, stage, mb) = self.problem, act
        forward, inputs, weights = problem.seconds[stage]
        next_message, back_message = problem.messages[stage]
        self.acts[rank].append(act)
        receiver, at = -1, _NEVER
        if kind == "F":
            end = now + forward
            self.forwards[rank].pop()
            self.memory[rank] += problem.held[stage]
            if stage + 1 < len(problem.place):
                receiver, at = problem.place[stage + 1], end + next_message
                self.ready_f[stage + 1][mb] = at
            else:
                self.ready_i[stage][mb] = end
        elif kind == "I":
            end = now + inputs
            self.next_input[stage] += 1
            self.weights[rank].append((stage, mb))
            self.memory[rank] -= problem.held[stage] - problem.queued[stage]
            if stage:
                receiver, at = problem.place[stage - 1], end + back_message
                self.ready_i[stage - 1][mb] = at
        else:
            end = now + weights
            self.weights[rank].pop(0)
            self.memory[rank] -= problem.queued[stage]
        self.free[rank] = end
        return receiver, at


def joined(order: Order) -> Order:
    """The same with a B for an I that its W follows at once."""
    ranks = []
    for acts in order.ranks:
        row: list[Action] = []
        for act in acts:
            if act.kind == "W" and row and row[-1] == act._replace(kind="I"):
                row[-1] = act._replace(kind="B")
            else:
                row.append(act)
        ranks.append(tuple(row))
    return replace(order, ranks=tuple(ranks))


# --- the best order for costs of stages under a limit of memory -----------------------------------


_RULES = (
    *(Rule(0.0, 0.5), Rule(0.5, 0.5), Rule(0.5, 0.0), Rule(1.0, 0.2)),
    *(Rule(0.5, 0.5, True), Rule(0.5, 0.0, True)),
)
_PERIODS = 10  # that are tried of a block
_ACTIONS = 500_000  # that are scheduled in all: a few seconds of one core
_MOST = 720  # candidates
_MOVED = 700_000  # actions at the most that are simulated for moves of single ones
_SMALL = 80  # actions: an order that is annealed
_WARM = 0.3  # actions by which its step may get longer at first
_FAR = 8  # places in the list of its rank that an action moves at the most


def trials_for(problems: Sequence[OrderProblem]) -> int:
    """Candidates for each of these problems that take a few seconds together."""
    actions = sum(3 * problem.microbatches * len(problem.place) for problem in problems)
    return min(_MOST, _ACTIONS // max(1, actions))


def best_known(problem: OrderProblem, known: Mapping[str, Order]) -> SearchResult | None:
    """The fastest of the known orders that fit."""
    return fastest(
        SearchResult(problem, order, problem.step(order), name)
        for name, order in known.items()
        if problem.fits(order)
    )


def best_order(
    problem: OrderProblem, known: Mapping[str, Order], trials: int, seed: int = 0
) -> SearchResult | None:
    """The fastest order that was found; None where none fits."""
    best = best_known(problem, known)
    for tried, start in enumerate(_starts(problem, known)):
        if tried >= trials and best:
            break
        best = _faster(problem, best, *start)
    return best and _polished(best, trials, random.Random(seed))


def adapted(problem: OrderProblem, order: Order) -> SearchResult | None:
    """An order of much the same costs, fitted to these: the faster of a few; None where none
    fits."""
    best, keys = best_known(problem, {"": order}), wanted(problem, order)
    for rule in _RULES[1:3]:
        best = _faster(problem, best, *keys, rule)
    return best


def _faster(
    problem: OrderProblem, best: SearchResult | None, forward: Keys, backward: Keys, rule: Rule
) -> SearchResult | None:
    """The order of these keys where it is faster, with whole backwards where these are no slower;
    else the best."""
    order = list_order(problem, forward, backward, rule)
    if order is None or (best and problem.step(order) >= best.seconds * (1 - _EQUAL)):
        return best
    orders = joined(order), order
    return fastest(SearchResult(problem, each, problem.step(each)) for each in orders)


def _starts(problem: OrderProblem, known: Mapping[str, Order]) -> Iterator[tuple[Keys, Keys, Rule]]:
    """What is likely the best first."""
    keys = [wanted(problem, order) for order in known.values()]
    blocks = [*block_keys(problem)]
    for rule in _RULES[1:3]:
        yield from ((*pair, rule) for pair in (*keys, *blocks))
    for rule in (*_RULES[3:], _RULES[0]):
        yield from ((*pair, rule) for pair in keys)


def block_keys(problem: OrderProblem) -> Iterator[tuple[Keys, Keys]]:
    """Keys of repeated blocks, each with a longer period, from a rank's load to the whole block."""
    stages, m, now = len(problem.place), problem.microbatches, 0.0
    forward, backward = [0.0] * stages, [0.0] * stages
    for way, (starts, order) in enumerate(
        ((forward, range(stages)), (backward, reversed(range(stages))))
    ):
        for stage in order:
            starts[stage] = now
            now += problem.seconds[stage][way] + problem.messages[stage][way]
    loads = [0.0] * problem.ranks
    for stage, rank in enumerate(problem.place):
        loads[rank] += sum(problem.seconds[stage])
    shortest = 0.9 * max(loads)
    for step in range(_PERIODS):
        period = shortest * (now / shortest) ** (step / (_PERIODS - 1)) if shortest else 0.0
        of_forward, of_backward = (
            [[at + period * mb for mb in range(m)] for at in each] for each in (forward, backward)
        )
        yield of_forward, of_backward


def _polished(best: SearchResult, trials: int, draw: random.Random) -> SearchResult:
    """With single actions moved on their ranks; as many moves a trial, whatever the size."""
    problem, now, warm = best.problem, best, 0.0
    size = 3 * problem.microbatches * len(problem.place)
    moves = min(_MOVED // size, 30 * trials)
    if size <= _SMALL:
        moves, warm = 80 * trials, _WARM * best.seconds * problem.ranks / size
    for left in range(moves, 0, -1):
        order = _moved(now.order, draw)
        if order is None or not problem.fits(order):
            continue
        try:
            seconds = problem.step(order)
        except ValueError:  # it would wait forever
            continue
        longer = draw.expovariate(1.0) * warm * left / moves if warm else 0.0
        if seconds <= now.seconds + longer:
            name = best.name if seconds == best.seconds else ""
            now = SearchResult(problem, order, seconds, name)
            best = min(now, best, key=lambda result: result.seconds)
    return best


def _moved(order: Order, draw: random.Random) -> Order | None:
    """With an action at another place; None where that breaks the order of its microbatch or
    stage."""
    rank = draw.randrange(len(order.ranks))
    acts = list(order.ranks[rank])
    start = draw.randrange(len(acts))
    end = max(0, min(len(acts) - 1, start + draw.choice((-1, 1)) * draw.randint(1, _FAR)))
    act = acts.pop(start)
    passed = acts[min(start, end) : max(start, end)]
    of_stage = (other for other in passed if other.stage == act.stage)
    if not passed or any(other.mb == act.mb or other.kind == act.kind for other in of_stage):
        return None
    acts.insert(end, act)
    ranks = (*order.ranks[:rank], tuple(acts), *order.ranks[rank + 1 :])
    return replace(order, ranks=ranks)


def lower_bound(problem: OrderProblem) -> float:
    """Seconds below which no order of a problem's stages can be.

    A rank computes all of its stages' microbatches after the first has reached it. And what a
    microbatch holds on a rank it holds at least until it has been through all later stages and
    back: with a limit of memory only so many can be under way.
    """
    stages, m, bound = len(problem.place), problem.microbatches, 0.0
    seconds, messages = problem.seconds, problem.messages
    whole = [
        min(t.backward.device, i + w) for t, (_, i, w) in zip(problem.times, seconds, strict=True)
    ]
    arrives = [sum(seconds[s][0] + messages[s][0] for s in range(at)) for at in range(stages)]
    for rank, local in enumerate(problem.local):
        load = sum(seconds[stage][0] + whole[stage] for stage in local)
        bound = max(bound, min(arrives[stage] for stage in local) + m * load)
        life = 0.0
        for stage in local:
            back = range(stage, stages)
            way = sum(sum(seconds[s][:2]) for s in back)
            way += sum(messages[s - 1][0] + messages[s][1] for s in back[1:])
            life += problem.held[stage] * way + problem.queued[stage] * seconds[stage][2]
        bound = max(bound, m * life / max(problem.room(rank), 1e-12))
    return bound
