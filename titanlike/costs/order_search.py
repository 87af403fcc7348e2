"""The best order for costs of stages under a limit of memory: known schedules, list scheduling, changes.

1. Known orders that fit are candidates themselves; of all, fitting or not, the times at which their
   actions begin are keys for list scheduling (`list_scheduling.py`).
2. So are blocks: a microbatch through all stages and back without a pause, the next one a period later.
   With a period as long as the block it is one microbatch at a time, the least memory that there is.
3. The best are changed at random, a stage's keys earlier or later, and kept where they get better.
4. In the fastest single actions are moved, as long as steps get no longer. A small order is annealed, its
   step may get longer for a while: from the best of one rank to a better one several have to change.

Every candidate is simulated: what is found is never slower than the best known order that fits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from titanlike.costs.list_scheduling import Keys, Problem, Rule, joined, list_order, wanted
from titanlike.pipeline.order import Order

_RULES = (
    *(Rule(0.0, 0.5), Rule(0.5, 0.5), Rule(0.5, 0.0), Rule(1.0, 0.2)),
    *(Rule(0.5, 0.5, True), Rule(0.5, 0.0, True)),
)
_PERIODS = 10  # that are tried of a block
_KEPT = 4  # candidates that are changed
_ACTIONS = 500_000  # that are scheduled in all: a few seconds of one core
_MOST = 720  # candidates
_MOVED = 600_000  # actions at the most that are simulated for moves of single ones
_SMALL = 80  # actions: an order that is annealed
_WARM = 0.3  # actions by which its step may get longer at first
_FAR = 8  # places in the list of its rank that an action moves at the most


@dataclass(frozen=True)
class Known:
    """A schedule's order, for the placement of a problem."""

    name: str
    order: Order


@dataclass(frozen=True)
class Found:
    problem: Problem
    order: Order
    seconds: float  # of a step, simulated
    name: str = ""  # of the known schedule that it is


@dataclass
class _Candidate:
    seconds: float
    forward: Keys
    backward: Keys
    rule: Rule
    order: Order


def trials_for(problems: Sequence[Problem]) -> int:
    """Candidates for each of these problems that take a few seconds together."""
    actions = sum(3 * problem.microbatches * len(problem.place) for problem in problems)
    return min(_MOST, _ACTIONS // max(1, actions))


def best_known(problem: Problem, known: Sequence[Known]) -> Found | None:
    """The fastest of the known orders that fit."""
    fitting = [one for one in known if problem.fits(one.order)]
    each = [Found(problem, one.order, problem.step(one.order), one.name) for one in fitting]
    return min(each, key=lambda found: found.seconds, default=None)


def best_order(
    problem: Problem, known: Sequence[Known], trials: int, seed: int = 0
) -> Found | None:
    """The fastest order that was found; None where none fits."""
    best = best_known(problem, known)
    pool: list[_Candidate] = []
    tried = 0
    for forward, backward, rule in _starts(problem, known):
        if tried >= trials and (pool or best):
            break
        tried += 1
        _consider(problem, pool, forward, backward, rule)
    draw = random.Random(seed)
    unit = sum(map(sum, problem.seconds)) / problem.ranks
    while pool and tried < trials:
        tried += 1
        one = pool[min(int(draw.expovariate(1.0)), len(pool) - 1)]
        forward, backward = one.forward, one.backward
        if draw.random() < 0.3:
            forward, backward = wanted(problem, one.order)
        rule = draw.choice(_RULES) if draw.random() < 0.5 else one.rule
        far = draw.choice((0.1, 0.3, 1.0)) * unit
        forward, backward = (_shifted(keys, far, draw) for keys in (forward, backward))
        _consider(problem, pool, forward, backward, rule)
    if pool and (best is None or pool[0].seconds < best.seconds * (1 - 1e-9)):
        best = Found(problem, pool[0].order, pool[0].seconds)
    return best and _polished(best, trials, draw)


def _polished(best: Found, trials: int, draw: random.Random) -> Found:
    """With single actions moved on their ranks; as many moves a trial, whatever the size."""
    problem, now, warm = best.problem, best, 0.0
    size = 3 * problem.microbatches * len(problem.place)
    moves = min(_MOVED // size, 25 * trials)
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
            now = Found(problem, order, seconds, best.name if seconds == best.seconds else "")
            best = min(now, best, key=lambda one: one.seconds)
    return best


def _moved(order: Order, draw: random.Random) -> Order | None:
    """With an action at another place; None where that breaks the order of its microbatch or stage."""
    rank = draw.randrange(len(order.ranks))
    acts = list(order.ranks[rank])
    start = draw.randrange(len(acts))
    end = max(0, min(len(acts) - 1, start + draw.choice((-1, 1)) * draw.randint(1, _FAR)))
    act = acts.pop(start)
    passed = acts[min(start, end) : max(start, end)]
    if not passed or any(
        other.stage == act.stage and (other.mb == act.mb or other.kind == act.kind)
        for other in passed
    ):
        return None
    acts.insert(end, act)
    ranks = (*order.ranks[:rank], tuple(acts), *order.ranks[rank + 1 :])
    return replace(order, ranks=ranks)


def adapted(problem: Problem, order: Order) -> Found | None:
    """An order of much the same costs, fitted to these: the faster of a few; None where none fits."""
    pool: list[_Candidate] = []
    for rule in _RULES[1:3]:
        _consider(problem, pool, *wanted(problem, order), rule)
    best = best_known(problem, [Known("", order)])
    if pool and (best is None or pool[0].seconds < best.seconds):
        best = Found(problem, pool[0].order, pool[0].seconds)
    return best


def _starts(problem: Problem, known: Sequence[Known]) -> Iterator[tuple[Keys, Keys, Rule]]:
    """What is likely the best first."""
    keys = [wanted(problem, one.order) for one in known]
    blocks = [*block_keys(problem)]
    for rule in _RULES[1:3]:
        for each in (*keys, *blocks):
            yield *each, rule
    for rule in (*_RULES[3:], _RULES[0]):
        for each in keys:
            yield *each, rule


def block_keys(problem: Problem) -> Iterator[tuple[Keys, Keys]]:
    """Keys of repeated blocks, each with a longer period, from a rank's load to the whole block."""
    stages, m, now = len(problem.place), problem.microbatches, 0.0
    forward, backward = [0.0] * stages, [0.0] * stages
    for stage in range(stages):
        forward[stage] = now
        now += problem.seconds[stage][0] + problem.messages[stage][0]
    for stage in reversed(range(stages)):
        backward[stage] = now
        now += problem.seconds[stage][1] + problem.messages[stage][1]
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


def _shifted(keys: Keys, far: float, draw: random.Random) -> Keys:
    """With the keys of some stages earlier or later."""
    shifts = [draw.gauss(0, far) if draw.random() < 0.4 else 0.0 for _ in keys]
    return [
        [key + shift for key in row] if shift else row
        for row, shift in zip(keys, shifts, strict=True)
    ]


def _consider(
    problem: Problem, pool: list[_Candidate], forward: Keys, backward: Keys, rule: Rule
) -> None:
    """Keep the order of these keys if it is among the best."""
    order = list_order(problem, forward, backward, rule)
    if order is None:
        return
    seconds = problem.step(order)
    if len(pool) == _KEPT and seconds >= pool[-1].seconds:
        return
    if not pool or seconds < pool[0].seconds:  # a step may be shorter with whole backwards
        whole = problem.step(one := joined(order))
        if whole <= seconds:
            order, seconds = one, whole
    if any(abs(seconds - one.seconds) <= 1e-9 * seconds for one in pool):
        return
    pool.append(_Candidate(seconds, forward, backward, rule, order))
    pool.sort(key=lambda candidate: candidate.seconds)
    del pool[_KEPT:]


def lower_bound(problem: Problem) -> float:
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
    for rank in range(problem.ranks):
        own = [stage for stage in range(stages) if problem.place[stage] == rank]
        load = sum(seconds[stage][0] + whole[stage] for stage in own)
        bound = max(bound, min(arrives[stage] for stage in own) + m * load)
        life = 0.0
        for stage in own:
            back = range(stage, stages)
            way = sum(sum(seconds[s][:2]) for s in back)
            way += sum(messages[s - 1][0] + messages[s][1] for s in back[1:])
            life += problem.held[stage] * way + problem.queued[stage] * seconds[stage][2]
        bound = max(bound, m * life / max(problem.room(rank), 1e-12))
    return bound
