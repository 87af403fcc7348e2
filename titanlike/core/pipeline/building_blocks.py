"""V-Half and V-Min (arXiv 2405.15362): a building block, repeated for each microbatch, then
squeezed.

1. A block gives the time step in which each stage computes F and I of a microbatch, if every action
   takes one step. The next microbatch follows six steps later, as a rank with two stages has 2 F,
   2 I and 2 W. The lifetime of a rank's two activations in the block determines its memory.
2. W are put into the remaining steps, oldest first.
3. Squeezing: in order of time, each action moves to the first free step after its dependencies,
   unless its rank would hold more activations than before. This closes gaps at begin and end.
4. F and I are ordered by their steps, and W fill the remaining gaps.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate

from titanlike.core.pipeline.order import Action, Order
from titanlike.core.pipeline.order_check import dependencies

_PERIOD = 6
Steps = dict[Action, int]  # when each action is computed


def v_half_block(pp: int) -> list[tuple[int, int]]:
    """(time step of F, of I) for each stage of V-Half: about half of 1F1B's activations."""
    gap = 3 if pp % 2 == 0 else 0  # avoids two actions of a rank in one step
    first = [(2 * rank, 6 * pp + gap - rank - 2) for rank in range(pp)]
    second = [(3 * pp - rank - 2, 3 * pp + gap + 2 * rank - 1) for rank in range(pp)]
    return first + second[::-1]


def v_min_block(pp: int) -> list[tuple[int, int]]:
    """(time step of F, of I) for each stage of V-Min: about a third of 1F1B's activations."""
    gap = 2 if pp % 3 == 0 else 0
    first = [(rank, 4 * pp + gap - rank - 1) for rank in range(pp)]
    second = [(2 * pp - rank - 1, 2 * pp + gap + rank) for rank in range(pp)]
    return first + second[::-1]


def repeated(block: list[tuple[int, int]], place: tuple[int, ...], microbatches: int) -> Order:
    """Repeat a building block for each microbatch, squeeze it, and return the Order."""
    steps: list[Steps] = [{} for _ in range(max(place) + 1)]
    for stage, (forward, backward) in enumerate(block):
        for mb in range(microbatches):
            steps[place[stage]][Action("F", stage, mb)] = forward + _PERIOD * mb
            steps[place[stage]][Action("I", stage, mb)] = backward + _PERIOD * mb
    steps = [_with_weights(rank_steps) for rank_steps in steps]
    limit = max(max(_held(rank_steps)) for rank_steps in steps)
    _squeeze(steps, place, limit)
    ranks = [
        [a for a in sorted(rank_steps, key=rank_steps.__getitem__) if a.kind != "W"]
        for rank_steps in steps
    ]
    return Order(_filled(ranks, len(place), limit), place, microbatches)


def _with_weights(steps: Steps) -> Steps:
    """Put each W into the first free step after its I, oldest first."""
    busy = {step: act for act, step in steps.items()}
    waiting: deque[Action] = deque()
    result, step = dict(steps), 0
    while step <= max(busy) or waiting:
        act = busy.get(step)
        if act is not None and act.kind == "I":
            waiting.append(act._replace(kind="W"))
        elif act is None and waiting:
            result[waiting.popleft()] = step
        step += 1
    return result


def _squeeze(steps: list[Steps], place: tuple[int, ...], limit: int) -> None:
    """Move actions to earlier steps, in place; no rank holds more than `limit` activations."""
    last = len(place) - 1
    held = [_held(rank_steps) for rank_steps in steps]
    busy = [set(rank_steps.values()) for rank_steps in steps]
    in_time = sorted((step, act) for rank_steps in steps for act, step in rank_steps.items())
    for step, act in in_time:
        rank = place[act.stage]
        before = [steps[place[need.stage]][need] for need in dependencies(act, last)]
        if act.mb:  # microbatches of a stage stay in order
            before.append(steps[rank][act._replace(mb=act.mb - 1)])
        for earlier in range(max(before, default=-1) + 1, step):
            levels = held[rank][earlier:step]
            if earlier in busy[rank] or (act.kind == "F" and max(levels) >= limit):
                continue
            steps[rank][act] = earlier
            busy[rank].remove(step)
            busy[rank].add(earlier)
            # an F holds its activation from its step on, a W frees it after its step
            begin, change = (earlier + 1, -1) if act.kind == "W" else (earlier, 1)
            for later in range(begin, step + (act.kind == "W")) if act.kind != "I" else ():
                held[rank][later] += change
            break


def _held(steps: Steps) -> list[int]:
    """The number of activations that a rank holds in each time step: from F to W, inclusive."""
    changes = [0] * (max(steps.values()) + 2)
    for act, step in steps.items():
        if act.kind != "I":
            changes[step + (act.kind == "W")] += 1 if act.kind == "F" else -1
    return [*accumulate(changes)]


def _filled(ranks: list[list[Action]], stages: int, limit: int) -> tuple[tuple[Action, ...], ...]:
    """Fill the steps in which a rank waits for its next F or I with a W."""
    todo = [deque(acts) for acts in ranks]
    weights: list[deque[Action]] = [deque() for _ in ranks]
    result: list[list[Action]] = [[] for _ in ranks]
    held = [0] * len(ranks)
    done: set[Action] = set()
    while any(todo) or any(weights):
        now = []
        for rank, acts in enumerate(todo):
            full = acts and acts[0].kind == "F" and held[rank] == limit
            if acts and not full and done.issuperset(dependencies(acts[0], stages - 1)):
                now.append(act := acts.popleft())
                held[rank] += act.kind == "F"
                if act.kind == "I":
                    weights[rank].append(act._replace(kind="W"))
            elif weights[rank]:
                act = weights[rank].popleft()
                held[rank] -= 1
            else:
                continue
            result[rank].append(act)
        done.update(now)
    return tuple(map(tuple, result))
