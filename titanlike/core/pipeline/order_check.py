"""Check that torch's pipeline runtime can run an Order without deadlock and with right gradients."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from titanlike.core.pipeline.order import Action, Order


def check_order(order: Order) -> Order:
    """Return `order` if torch's pipeline runtime can run it to the end with right gradients.

    Raises ValueError naming the pipeline rank, the action, and what to change: an action out of
    range, on the wrong rank, doubled or missing; B together with I or W for one microbatch; an
    action before a dependency; forwards of the last stage out of microbatch order; a deadlock.
    """
    for problem in _problems(order):
        raise ValueError(problem)
    for _ in walk(order):
        pass
    return order


def dependencies(act: Action, last: int) -> tuple[Action, ...]:
    """The actions that must be complete before `act`, as `completion_key`s.

    last: index of the last stage, whose backward starts from the loss.
    """
    kind, stage, mb = act
    if kind == "F":
        return (Action("F", stage - 1, mb),) if stage else ()
    if kind == "W":
        return (Action("I", stage, mb),)
    forward = Action("F", stage, mb)
    return (forward,) if stage == last else (forward, Action("I", stage + 1, mb))


def completion_key(act: Action) -> Action:
    """The key by which dependent actions wait for `act`: a B counts as its I."""
    return act._replace(kind="I") if act.kind == "B" else act


def walk(order: Order) -> Iterator[tuple[int, Action]]:
    """Yield every (rank, action) in an order that respects all dependencies.

    Raises ValueError on a deadlock, naming the ranks that wait for each other.
    """
    last = order.stages - 1
    position = [0] * len(order.ranks)
    done: set[Action] = set()
    left = sum(map(len, order.ranks))
    while left:
        before = left
        for rank, acts in enumerate(order.ranks):
            while position[rank] < len(acts) and done.issuperset(
                dependencies(acts[position[rank]], last)
            ):
                act = acts[position[rank]]
                done.add(completion_key(act))
                position[rank] += 1
                left -= 1
                yield rank, act
        if left == before:
            raise ValueError(_deadlock(order, position, done))


def _deadlock(order: Order, next_action: list[int], done: set[Action]) -> str:
    """Describe the cycle of ranks that wait for each other; next_action: index by rank."""
    position = {completion_key(act): (act, i) for acts in order.ranks for i, act in enumerate(acts)}
    rank = next(rank for rank, acts in enumerate(order.ranks) if next_action[rank] < len(acts))
    lines: dict[int, str] = {}
    while rank not in lines:
        act = order.ranks[rank][next_action[rank]]
        need = next(need for need in dependencies(act, order.stages - 1) if need not in done)
        other = order.stage_to_rank[need.stage]
        if need not in position:
            return f"pipeline rank {rank}: {act} needs {need}, which no rank computes; add it"
        goal, later = position[need]
        goal = f"{goal} of pipeline rank {other}, where it is action {later + 1}"
        lines[rank] = f"pipeline rank {rank} waits at {act} for {goal}"
        rank = other
    cycle = "; ".join(list(lines.values())[list(lines).index(rank) :])
    fix = "Move one of the awaited actions before the one at which its rank waits"
    return f"deadlock: {cycle}. {fix}"


def _problems(order: Order) -> Iterator[str]:
    """Yield what is wrong besides deadlocks; what follows relies on what comes before."""
    place, last, ranks = order.stage_to_rank, order.stages - 1, range(len(order.ranks))
    if order.microbatches < 1:
        yield f"an order of {order.microbatches} microbatches: it needs at least 1"
    for stage, rank in enumerate(place):
        if rank not in ranks:
            has = f"the order has ranks 0 to {len(ranks) - 1}"
            yield f"stage {stage} is placed on pipeline rank {rank}: {has}"
    for rank in ranks:
        if rank not in place:
            yield f"pipeline rank {rank} has no stage: place one there, or use less"
    # each action by itself
    at: dict[Action, int] = {}  # its index in its rank's list
    for rank, acts in enumerate(order.ranks):
        for index, act in enumerate(acts):
            where = f"pipeline rank {rank}: {act} (action {index + 1} of {len(acts)})"
            if act.kind not in ("F", "B", "I", "W"):
                yield f"{where} has kind {act.kind!r}: use F, B, I or W"
            if not 0 <= act.stage <= last:
                yield f"{where}: there are only stages 0 to {last}"
            if not 0 <= act.mb < order.microbatches:
                yield f"{where}: there are only microbatches 0 to {order.microbatches - 1}"
            if (holder := place[act.stage]) != rank:
                yield f"{where}: stage {act.stage} is on pipeline rank {holder}; move the action there"
            if act in at:
                yield f"{where} is listed twice, first as action {at[act] + 1}; remove one"
            at[act] = index
    # every microbatch has F only (evaluation), or F and B, or F, I and W
    forward_only = all(act.kind == "F" for act in at)
    for stage, rank in enumerate(place):
        for mb in range(order.microbatches):
            f, b, i, w = (Action(kind, stage, mb) for kind in "FBIW")
            half, other = (i, w) if i in at else (w, i)
            who = f"pipeline rank {rank}:"
            if f not in at:
                yield f"{who} {f} is missing; add it"
            if b in at and half in at:
                yield f"{who} {b} besides {half}; keep either {b}, or {i} and {w}"
            if (i in at) != (w in at):
                yield f"{who} {other} is missing besides {half}; add it"
            if not (forward_only or b in at or half in at):
                yield f"{who} {b} is missing; add it after {f}, or add {i} and {w}"
    # the order within each rank
    done = {completion_key(act): index for act, index in at.items()}
    for act, index in at.items():
        for need in dependencies(act, last):
            if place[need.stage] == place[act.stage] and done[need] > index:
                wrong = f"{act} comes before {order.ranks[place[act.stage]][done[need]]}"
                yield f"pipeline rank {place[act.stage]}: {wrong}, which it needs; swap them"
    for one, two in pairwise(act for act in order.ranks[place[last]] if act[:2] == ("F", last)):
        if one.mb > two.mb:
            wrong = (
                f"{one} comes before {two}; the last stage's forwards must be in microbatch order"
            )
            yield f"pipeline rank {place[last]}: {wrong}, because torch numbers the losses"
