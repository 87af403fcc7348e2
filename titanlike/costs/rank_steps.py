"""What a pipeline rank does in a step, as far as it changes its memory: its actions by their kind."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from titanlike.pipeline.order import Act, Order

Kinds = tuple[list[tuple[int, str]], np.ndarray]


def steps(order: Order, rank: int) -> Iterator[tuple[Act, str]]:
    """Each action of a rank, with its kind. The gathers before a stage's first action and the reductions
    behind its last are of the same action."""
    left = dict.fromkeys(order.local(rank), order.microbatches)
    forwards: set[int] = set()
    backwards: set[int] = set()
    for act in order.ranks[rank]:
        kind, stage, _ = act
        if kind == "F" and stage not in forwards:
            forwards.add(stage)
            yield act, "gather"
        elif kind in "BI" and stage not in backwards:
            backwards.add(stage)
            kind = "first " + kind
        yield act, kind
        if act.kind in "BW":
            left[stage] -= 1
            if left[stage] == 0:
                yield act, "reduce"


class KnownKinds:
    """Of ranks of orders, each walked once: a search asks for the same again and again."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Order, Kinds]] = {}

    def __call__(self, order: Order, rank: int) -> Kinds:
        """(stages and kinds of the steps, each once; which of these each step is)."""
        key = id(order), rank
        if key not in self._known:
            index: dict[tuple[int, str], int] = {}
            at = [
                index.setdefault((act.stage, kind), len(index)) for act, kind in steps(order, rank)
            ]
            # with the order, so that no later one has its id
            self._known[key] = order, ([*index], np.array(at, dtype=np.int64))
        return self._known[key][1]
