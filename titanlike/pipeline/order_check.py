"""Check that torch's pipeline runtime can run an Order without deadlock and with right gradients."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from titanlike.pipeline.order import Action, Order


def check_order(order: Order) -> Order:
    """Return `order` if torch's pipeline runtime can run it to the end with right gradients.

    Raises ValueError naming the pipeline rank, the action, and what to change: an action out of
    range, on the wrong rank, doubled or missing; B together with I or W for one microbatch; an
    action before a dependency; forwards of the last stage out of microbatch order; a deadlock.
    """
    _check_shape(order)
    positions = _check_cells(order)
    _check_complete(order, positions)
    _check_sequence(order, positions)
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


def _check_shape(order: Order) -> None:
    if order.microbatches < 1:
        raise ValueError(f"an order of {order.microbatches} microbatches: it needs at least 1")
    for stage, rank in enumerate(order.stage_to_rank):
        if not 0 <= rank < len(order.ranks):
            has = f"the order has ranks 0 to {len(order.ranks) - 1}"
            raise ValueError(f"stage {stage} is placed on pipeline rank {rank}: {has}")
    for rank in range(len(order.ranks)):
        if rank not in order.stage_to_rank:
            raise ValueError(f"pipeline rank {rank} has no stage: place one there, or use less")


def _check_cells(order: Order) -> dict[Action, int]:
    """Check each action by itself; returns its index in its rank's list."""
    positions: dict[Action, int] = {}
    for rank, acts in enumerate(order.ranks):
        for position, act in enumerate(acts):
            problem = ""
            if act.kind not in ("F", "B", "I", "W"):
                problem = f" has kind {act.kind!r}: use F, B, I or W"
            elif not 0 <= act.stage < order.stages:
                problem = f": there are only stages 0 to {order.stages - 1}"
            elif not 0 <= act.mb < order.microbatches:
                problem = f": there are only microbatches 0 to {order.microbatches - 1}"
            elif (holder := order.stage_to_rank[act.stage]) != rank:
                problem = f": stage {act.stage} is on pipeline rank {holder}; move the action there"
            elif act in positions:
                problem = f" is listed twice, first as action {positions[act] + 1}; remove one"
            if problem:
                where = f"pipeline rank {rank}: {act} (action {position + 1} of {len(acts)})"
                raise ValueError(where + problem)
            positions[act] = position
    return positions


def _check_complete(order: Order, positions: dict[Action, int]) -> None:
    """Check that every microbatch has F only (evaluation), or F and B, or F, I and W."""
    forward_only = all(act.kind == "F" for act in positions)
    for stage, rank in enumerate(order.stage_to_rank):
        for mb in range(order.microbatches):
            f, b, i, w = (Action(kind, stage, mb) for kind in "FBIW")
            half = i if i in positions else w
            problem = ""
            if f not in positions:
                problem = f"{f} is missing; add it"
            elif b in positions and half in positions:
                problem = f"{b} besides {half}; keep either {b}, or {i} and {w}"
            elif (i in positions) != (w in positions):
                problem = f"{w if half == i else i} is missing besides {half}; add it"
            elif not (forward_only or b in positions or half in positions):
                problem = f"{b} is missing; add it after {f}, or add {i} and {w}"
            if problem:
                raise ValueError(f"pipeline rank {rank}: {problem}")


def _check_sequence(order: Order, positions: dict[Action, int]) -> None:
    """Check the order of actions within each rank."""
    last = order.stages - 1
    position = {completion_key(act): index for act, index in positions.items()}
    for rank, acts in enumerate(order.ranks):
        for index, act in enumerate(acts):
            for need in dependencies(act, last):
                if order.stage_to_rank[need.stage] == rank and position[need] > index:
                    wrong = f"{act} comes before {acts[position[need]]}, which it needs"
                    raise ValueError(f"pipeline rank {rank}: {wrong}; swap them")
    final = [act for act in order.ranks[order.stage_to_rank[last]] if act[:2] == ("F", last)]
    for before, after in pairwise(final):
        if before.mb > after.mb:
            raise ValueError(
                f"pipeline rank {order.stage_to_rank[last]}: {before} comes before {after}; the last "
                "stage's forwards must be in microbatch order, because torch numbers the "
                "losses as they arrive"
            )
