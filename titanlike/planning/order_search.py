"""Search the best order for costs of stages under a memory limit: known schedules, list scheduling,
local moves.

1. Known orders that fit are candidates. The start times of actions in all known orders, fitting or
   not, are priority keys for list scheduling (`list_order`).
2. Further keys are blocks: a microbatch passes through all stages and back without a pause, the
   next
   one a period later. With a period as long as the block there is one microbatch at a time, which
   takes the least memory.
3. In the fastest order single actions are moved as long as steps do not get longer. A small order
   is
   annealed, so its step may get longer temporarily: leaving a local optimum may take several moves.

Every candidate is simulated, so the result is never slower than the best known order that fits.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from titanlike.core.pipeline.order import Action, Order
from titanlike.planning.costs.simulate import StageTimes, most_held, simulate

_NEVER = float("inf")
_EQUAL = 1e-9  # relative tolerance of times and memory

Keys = Sequence[Sequence[float]]  # [stage][microbatch] -> priority; smaller runs first


@dataclass(frozen=True)
class OrderProblem:
    """The inputs of a search for a schedule's order. All memory is in one unit, of the caller's
    choice."""

    place: tuple[int, ...]  # pipeline rank of each stage
    microbatches: int
    times: Sequence[StageTimes]
    held: Sequence[float]  # memory of a microbatch in each stage, from F to the end of its backward
    queued: Sequence[float]  # the part of it that is kept between I and W
    limit: float  # memory for activations of a rank
    runs_ahead: bool = True  # whether the device is asynchronous
    in_flight: float = _NEVER  # limit of microbatches (in all stages) that a rank holds
    starts: tuple[int, ...] = ()  # index of each stage's first unit

    @property
    def ranks(self) -> int:
        return max(self.place) + 1

    @cached_property
    def local(self) -> list[list[int]]:
        """The stages of each rank."""
        return [
            [s for s, holder in enumerate(self.place) if holder == rank]
            for rank in range(self.ranks)
        ]

    @cached_property
    def seconds(self) -> list[tuple[float, float, float]]:
        """Seconds of F, I and W of each stage."""
        join = max if self.runs_ahead else (lambda device, host: device + host)
        durations = [(t.forward, t.input_gradient, t.weight_gradient) for t in self.times]
        return [tuple(join(d.device, d.host) for d in row) for row in durations]

    @cached_property
    def messages(self) -> list[tuple[float, float]]:
        """Seconds of the P2P transfer to the next stage, and to the previous one."""
        place, last = self.place, len(self.place) - 1
        return [
            (
                times.sends_forward if s < last and place[s] != place[s + 1] else 0.0,
                times.sends_backward if s and place[s] != place[s - 1] else 0.0,
            )
            for s, times in enumerate(self.times)
        ]

    def room(self, rank: int) -> float:
        """Memory available for activations of a rank."""
        return min(self.limit, self.in_flight * self.microbatch_memory[rank]) * (1 + _EQUAL)

    @cached_property
    def microbatch_memory(self) -> list[float]:
        """Memory of a microbatch in all stages of each rank."""
        return [sum((self.held[stage] for stage in local), 0.0) for local in self.local]

    @property
    def least_memory(self) -> float:
        """Memory of activations on the fullest rank with one microbatch at a time."""
        return max(self.microbatch_memory)

    def fits(self, order: Order) -> bool:
        return all(self.peak(order, rank) <= self.room(rank) for rank in range(self.ranks))

    def peak(self, order: Order, rank: int) -> float:
        """Peak memory of a rank's activations."""
        return most_held(order.ranks[rank], self.held, self.queued)

    def step(self, order: Order) -> float:
        """Simulated seconds of a step."""
        return simulate(order, self.times, runs_ahead=self.runs_ahead).step


@dataclass(frozen=True)
class SearchResult:
    problem: OrderProblem
    order: Order
    seconds: float  # simulated step time
    name: str = ""  # if it is a known schedule


def fastest(results: Iterable[SearchResult | None]) -> SearchResult | None:
    """The first of the fastest results; None if there are none."""
    return min(filter(None, results), key=lambda result: result.seconds, default=None)


# --- list scheduling ------------------------------------------------------------------------------


class Rule(NamedTuple):
    """Parameters of a rank's decisions in list scheduling."""

    ahead: float = 0.5  # fraction of an action that a rank idles for a more urgent one
    weights: float = 0.5  # fraction of a W by which it may delay an action about to be ready
    frees: bool = False  # run W before I if a more urgent F lacks memory


def wanted(problem: OrderProblem, order: Order) -> tuple[Keys, Keys]:
    """Keys of F and I: the start times of an order's actions."""
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
    """Make an order by list scheduling with keys of F and I; None for a deadlock."""
    run = _Run(problem, forward, backward, rule)
    events = [(0.0, rank) for rank in range(problem.ranks)]
    remaining = 3 * problem.microbatches * len(problem.place)
    while events and remaining:
        now, rank = heapq.heappop(events)
        if now < run.free[rank]:
            continue
        act, later = run.choose(rank, now)
        if act is not None:
            remaining -= 1
            receiver, arrival = run.compute(rank, now, act)
            heapq.heappush(events, (run.free[rank], rank))
            if receiver not in (-1, rank):
                heapq.heappush(events, (max(arrival, run.free[receiver]), receiver))
        elif later < _NEVER:
            heapq.heappush(events, (later, rank))
    acts = tuple(map(tuple, run.acts))
    return None if remaining else Order(acts, problem.place, problem.microbatches)


class _Run:
    """The state of `list_order`: ranks and their actions so far."""

    def __init__(self, problem: OrderProblem, forward: Keys, backward: Keys, rule: Rule) -> None:
        self.problem, self.rule, self.backward = problem, rule, backward
        stages, ranks, m = len(problem.place), problem.ranks, problem.microbatches
        self.forwards = [  # per rank; the last one is next
            sorted(((forward[s][j], s, j) for s in stages_of_rank for j in range(m)), reverse=True)
            for stages_of_rank in problem.local
        ]
        self.next_input = [0] * stages
        # when the input of F and I is ready, [stage][microbatch]
        self.ready_f = [[_NEVER] * m for _ in range(stages)]
        self.ready_i = [[_NEVER] * m for _ in range(stages)]
        self.ready_f[0] = [0.0] * m
        self.weights: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.memory = [0.0] * ranks
        self.free = [0.0] * ranks  # when each rank completes its current action
        self.room = [problem.room(rank) for rank in range(ranks)]
        self.acts: list[list[Action]] = [[] for _ in range(ranks)]

    def choose(self, rank: int, now: float) -> tuple[Action | None, float]:
        """Choose what a rank computes next. Returns (action or None, when to ask again)."""
        problem, soon = self.problem, _NEVER
        moment = now * (1 + _EQUAL) + 1e-15
        best: Action | None = None
        key = urgent = _NEVER  # keys of the best action, and of the next one to be ready
        for stage in problem.local[rank]:
            mb = self.next_input[stage]
            if mb < problem.microbatches:
                ready = self.ready_i[stage][mb]
                action_key = self.backward[stage][mb]
                if ready <= moment:
                    if action_key < key:
                        best, key = Action("I", stage, mb), action_key
                elif ready < soon:
                    soon, urgent = ready, action_key
        full = False
        if self.forwards[rank]:
            action_key, stage, mb = self.forwards[rank][-1]
            ready = self.ready_f[stage][mb]
            if ready < _NEVER:
                full = self.memory[rank] + problem.held[stage] > self.room[rank]
                if not full and ready <= moment:
                    if action_key < key:
                        best, key = Action("F", stage, mb), action_key
                elif not full and ready < soon:
                    soon, urgent = ready, action_key
        if best is not None and urgent < key:
            seconds = problem.seconds[best.stage]["FI".index(best.kind)]
            if soon - now < self.rule.ahead * seconds:
                best = None
        if full and self.rule.frees and self.weights[rank] and action_key < key and ready <= moment:
            return Action("W", *self.weights[rank][0]), soon
        if best is None and self.weights[rank]:
            stage, mb = self.weights[rank][0]
            end_of_wait = now + self.rule.weights * problem.seconds[stage][2]
            if end_of_wait <= soon or (full and soon == _NEVER):
                best = Action("W", stage, mb)
        return best, soon

    def compute(self, rank: int, now: float, act: Action) -> tuple[int, float]:
        """Record an action. Returns (rank that receives its result or -1, when it arrives)."""
        problem, (kind, stage, mb) = self.problem, act
        forward, inputs, weights = problem.seconds[stage]
        next_message, back_message = problem.messages[stage]
        self.acts[rank].append(act)
        receiver, arrival = -1, _NEVER
        if kind == "F":
            end = now + forward
            self.forwards[rank].pop()
            self.memory[rank] += problem.held[stage]
            if stage + 1 < len(problem.place):
                receiver, arrival = problem.place[stage + 1], end + next_message
                self.ready_f[stage + 1][mb] = arrival
            else:
                self.ready_i[stage][mb] = end
        elif kind == "I":
            end = now + inputs
            self.next_input[stage] += 1
            self.weights[rank].append((stage, mb))
            self.memory[rank] -= problem.held[stage] - problem.queued[stage]
            if stage:
                receiver, arrival = problem.place[stage - 1], end + back_message
                self.ready_i[stage - 1][mb] = arrival
        else:
            end = now + weights
            self.weights[rank].pop(0)
            self.memory[rank] -= problem.queued[stage]
        self.free[rank] = end
        return receiver, arrival


def joined(order: Order) -> Order:
    """Replace each I that is followed at once by its W by a B."""
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


# --- the search -----------------------------------------------------------------------------------


_RULES = (
    *(Rule(0.0, 0.5), Rule(0.5, 0.5), Rule(0.5, 0.0), Rule(1.0, 0.2)),
    *(Rule(0.5, 0.5, True), Rule(0.5, 0.0, True)),
)
_PERIODS = 10  # periods to try per block
_ACTIONS = 500_000  # budget of scheduled actions: a few seconds of one core
_MOST = 720  # limit of candidates
_MOVED = 700_000  # budget of actions simulated for local moves
_SMALL = 80  # actions; smaller orders are annealed
_WARM = 0.3  # initial temperature, in durations of an action
_FAR = 8  # limit of positions that an action moves in its rank's list


def trials_for(problems: Sequence[OrderProblem]) -> int:
    """The number of candidates per problem such that all take a few seconds."""
    actions = sum(3 * problem.microbatches * len(problem.place) for problem in problems)
    return min(_MOST, _ACTIONS // max(1, actions))


def best_known(problem: OrderProblem, known: Mapping[str, Order]) -> SearchResult | None:
    """The fastest known order that fits."""
    return fastest(
        SearchResult(problem, order, problem.step(order), name)
        for name, order in known.items()
        if problem.fits(order)
    )


def best_order(
    problem: OrderProblem, known: Mapping[str, Order], trials: int, seed: int = 0
) -> SearchResult | None:
    """Search the fastest order; None if none fits."""
    best = best_known(problem, known)
    for tried, start in enumerate(_starts(problem, known)):
        if tried >= trials and best:
            break
        best = _faster(problem, best, *start)
    return best and _polished(best, trials, random.Random(seed))


def adapted(problem: OrderProblem, order: Order) -> SearchResult | None:
    """Adapt an order of similar costs to this problem: the fastest of a few; None if none fits."""
    best, keys = best_known(problem, {"": order}), wanted(problem, order)
    for rule in _RULES[1:3]:
        best = _faster(problem, best, *keys, rule)
    return best


def _faster(
    problem: OrderProblem, best: SearchResult | None, forward: Keys, backward: Keys, rule: Rule
) -> SearchResult | None:
    """The order from these keys if it is faster than `best` (with full backwards if they are not
    slower), else `best`."""
    order = list_order(problem, forward, backward, rule)
    if order is None or (best and problem.step(order) >= best.seconds * (1 - _EQUAL)):
        return best
    orders = joined(order), order
    return fastest(SearchResult(problem, each, problem.step(each)) for each in orders)


def _starts(problem: OrderProblem, known: Mapping[str, Order]) -> Iterator[tuple[Keys, Keys, Rule]]:
    """Yield keys and rules, the most promising first."""
    keys = [wanted(problem, order) for order in known.values()]
    blocks = [*block_keys(problem)]
    for rule in _RULES[1:3]:
        yield from ((*pair, rule) for pair in (*keys, *blocks))
    for rule in (*_RULES[3:], _RULES[0]):
        yield from ((*pair, rule) for pair in keys)


def block_keys(problem: OrderProblem) -> Iterator[tuple[Keys, Keys]]:
    """Yield keys of repeated blocks, with periods from a rank's load to the full block."""
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
        forward_keys, backward_keys = (
            [[begin + period * mb for mb in range(m)] for begin in each]
            for each in (forward, backward)
        )
        yield forward_keys, backward_keys


def _polished(best: SearchResult, trials: int, draw: random.Random) -> SearchResult:
    """Improve an order by moving single actions, by the same number of moves for any size."""
    problem, now, warm = best.problem, best, 0.0
    size = 3 * problem.microbatches * len(problem.place)
    moves = min(_MOVED // size, 30 * trials)
    if size <= _SMALL:
        moves, warm = 80 * trials, _WARM * best.seconds * problem.ranks / size
    for remaining in range(moves, 0, -1):
        order = _moved(now.order, draw)
        if order is None or not problem.fits(order):
            continue
        try:
            seconds = problem.step(order)
        except ValueError:  # deadlock
            continue
        longer = draw.expovariate(1.0) * warm * remaining / moves if warm else 0.0
        if seconds <= now.seconds + longer:
            name = best.name if seconds == best.seconds else ""
            now = SearchResult(problem, order, seconds, name)
            best = min(now, best, key=lambda result: result.seconds)
    return best


def _moved(order: Order, draw: random.Random) -> Order | None:
    """Move a random action; None if that would break the order of its microbatch or stage."""
    rank = draw.randrange(len(order.ranks))
    acts = list(order.ranks[rank])
    start = draw.randrange(len(acts))
    end = max(0, min(len(acts) - 1, start + draw.choice((-1, 1)) * draw.randint(1, _FAR)))
    act = acts.pop(start)
    passed = acts[min(start, end) : max(start, end)]
    same_stage = (other for other in passed if other.stage == act.stage)
    if not passed or any(other.mb == act.mb or other.kind == act.kind for other in same_stage):
        return None
    acts.insert(end, act)
    ranks = (*order.ranks[:rank], tuple(acts), *order.ranks[rank + 1 :])
    return replace(order, ranks=ranks)


def lower_bound(problem: OrderProblem) -> float:
    """A lower bound of the step time of any order of a problem's stages.

    A rank computes all microbatches of its stages after the first one has reached it. A microbatch
    holds memory on a rank at least until it has been through all later stages and back, so a memory
    limit bounds the number of microbatches in flight.
    """
    stages, m, bound = len(problem.place), problem.microbatches, 0.0
    seconds, messages = problem.seconds, problem.messages
    backwards = [
        min(t.backward.device, i + w) for t, (_, i, w) in zip(problem.times, seconds, strict=True)
    ]
    arrives = [
        sum(seconds[s][0] + messages[s][0] for s in range(target)) for target in range(stages)
    ]
    for rank, local in enumerate(problem.local):
        load = sum(seconds[stage][0] + backwards[stage] for stage in local)
        bound = max(bound, min(arrives[stage] for stage in local) + m * load)
        life = 0.0
        for stage in local:
            back = range(stage, stages)
            way = sum(sum(seconds[s][:2]) for s in back)
            way += sum(messages[s - 1][0] + messages[s][1] for s in back[1:])
            life += problem.held[stage] * way + problem.queued[stage] * seconds[stage][2]
        bound = max(bound, m * life / max(problem.room(rank), 1e-12))
    return bound
