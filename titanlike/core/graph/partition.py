"""Assign consecutive units of a model to stages: split=even, split.points, split.balance.

A unit is a module that is never cut: the embedding, a block, the final norm, the head. Units before
the first block are on the first stage and units after the last block on the last, unless
`split.points` says otherwise or there are more stages than blocks. An empty stage sends what it
receives. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from titanlike.core.config.errors import Refused, nearest, override_text
from titanlike.core.config.groups.pipeline import BalanceSplit, EvenSplit, PointSplit

if TYPE_CHECKING:
    import numpy as np  # where parts are weighed

    from titanlike.core.graph.units import Unit


class SplitError(Refused):
    """A split that does not fit the model or the schedule."""


def partition(
    units: list[Unit], split: EvenSplit | PointSplit | BalanceSplit, stages: int
) -> list[list[str]]:
    """The unit names of every stage, first stage first, in the order of `units`.

    Raises SplitError for a split that `units` or the number of stages do not allow.
    """
    if not units:  # a model without submodules, e.g. torch.nn.Linear
        if stages > 1:
            reason = "the model has no modules inside between which it could be cut"
            raise SplitError("split", split.name, reason, "pp=1")
        return [[]]
    match split:
        case EvenSplit():
            starts = _even_starts(units, split, stages)
        case BalanceSplit():
            starts = _balance_starts(units, split.balance, stages)
        case PointSplit():
            starts = _point_starts(units, split.points, stages)
    names = [unit.name for unit in units]
    return [names[start:stop] for start, stop in pairwise([*starts, len(names)])]


INFINITE = 2**61  # more than any cost; the sum of two does not overflow


def even_sizes(weights: list[float], stages: int) -> list[int]:
    """Sizes of `stages` contiguous, non-empty parts with the smallest maximal weight.

    Ties: the smallest sum of squares, then the smallest first stages, which under most schedules
    have the most microbatches in flight. Exact for weights >= 0, rounded to 2**-16.
    """
    import numpy as np

    n = len(weights)
    assert 1 <= stages <= n and min(weights) >= 0
    # integers, as equal sums of floats differ in their last bits; reversed: the last part is the first
    # stage
    ends = np.cumsum([0, *(round(2**16 * weight) for weight in reversed(weights))])
    table = np.where(np.tri(n + 1, dtype=bool), INFINITE, ends[None, :] - ends[:, None])
    starts = lightest_parts([table] * stages, latest=True)
    return np.diff([*starts, n])[::-1].tolist()


def lightest_parts(tables: Sequence[np.ndarray], latest: bool = False) -> list[int]:
    """Find contiguous parts whose most expensive one is as cheap as possible. Returns where parts
    begin.

    Ties: the smallest sum of squares. Exact: dynamic programming over the parts. tables: for each
    part, [start, stop] -> its cost, INFINITE if it is empty; latest: of equal solutions, choose the
    one whose last parts begin late, else early.
    """
    import numpy as np

    n = len(tables[0]) - 1
    costliest = np.full(n + 1, INFINITE, dtype=tables[0].dtype)
    costliest[0] = 0
    for table in tables:
        costliest = np.maximum(costliest[:, None], table).min(axis=0)
    limit = costliest[n].item()
    squares = np.full(n + 1, np.inf)
    squares[0] = 0.0
    choices = []
    for table in tables:
        sums = squares[:, None] + np.where(table <= limit, table.astype(np.float64) ** 2, np.inf)
        choices.append(n - sums[::-1].argmin(axis=0) if latest else sums.argmin(axis=0))
        squares = sums.min(axis=0)
    starts = [n]
    for choice in reversed(choices):
        starts.insert(0, int(choice[starts[0]]))
    return starts[:-1]


def _even_starts(units: list[Unit], split: EvenSplit, stages: int) -> list[int]:
    blocks = _blocks(units)
    if stages <= len(blocks):
        weights = [1.0] * len(blocks)
        # units before the blocks are on the first stage, units after them on the last; a weight
        # above that of all blocks leaves one block to that stage
        if blocks[0] > 0:
            weights[0] += min(split.embedding_weight, len(blocks))
        if blocks[-1] < len(units) - 1:
            weights[-1] += min(split.head_weight, len(blocks))
        return _starts(blocks, len(units), even_sizes(weights, stages))
    # embedding and head, if any, get their own stages; empty stages come before the last one
    head = [blocks[-1] + 1] if blocks[-1] + 1 < len(units) else []
    starts = sorted({0, *blocks, *head})
    if len(starts) > stages:  # one too many: the embedding joins the first block
        starts.pop(1)
    empty = stages - len(starts)
    if len(starts) == 1:
        return [0, *[len(units)] * empty]  # a model of one unit
    return [*starts[:-1], *[starts[-1]] * empty, starts[-1]]


def _balance_starts(units: list[Unit], balance: list[int], stages: int) -> list[int]:
    blocks = _blocks(units)

    def wrong(reason: str) -> SplitError:
        fix = _example("split.balance", units, stages)
        return SplitError("split.balance", balance, reason, fix)

    if len(balance) != stages:
        raise wrong(f"it has {len(balance)} entries, and the schedule has {stages} stages")
    if min(balance) < 0:
        stage = next(stage for stage, count in enumerate(balance) if count < 0)
        raise wrong(f"stage {stage} gets {balance[stage]} blocks")
    if sum(balance) != len(blocks):
        raise wrong(f"it sums to {sum(balance)}, and the model has {len(blocks)} blocks")
    starts = _starts(blocks, len(units), balance)
    if len(starts) > 1 and starts[1] == 0:
        raise wrong("the first stage would be empty: the model has no unit before the first block")
    return starts


def _point_starts(units: list[Unit], points: list[str], stages: int) -> list[int]:
    position = {unit.name: index for index, unit in enumerate(units)}
    for index, unit in enumerate(units):  # a parent module begins at its first unit
        parts = unit.name.split(".")
        for depth in range(1, len(parts)):
            position.setdefault(".".join(parts[:depth]), index)

    def wrong(reason: str, fix: str | None = None) -> SplitError:
        fix = fix or _example("split.points", units, stages)
        return SplitError("split.points", points, reason, fix)

    for point in points:
        if point not in position:
            near = nearest(point, position)
            known = f"the units are {override_text([units[0].name, '...', units[-1].name])}"
            right = [near if other == point else other for other in points] if near else []
            fix = f"split.points={override_text(right)}" if near else None
            raise wrong(f"the model has no unit {point}; {known}", fix)
        if position[point] == 0:
            raise wrong(f"{point} is the first unit, where the first stage begins anyway")
    for before, after in pairwise(points):
        if before == after:
            raise wrong(f"{after} is listed twice")
        if position[before] == position[after]:
            raise wrong(f"{after} begins where {before} does")
        if position[before] > position[after]:
            fix = f"split.points={override_text(sorted(set(points), key=position.__getitem__))}"
            raise wrong(f"{after} comes before {before} in the model", fix)
    if (made := len(points) + 1) != stages:
        schedule = f"the schedule has {stages}, which takes {stages - 1} points"
        raise wrong(f"{len(points)} points make {made} stages, and {schedule}")
    return [0, *(position[point] for point in points)]


def _blocks(units: list[Unit]) -> list[int]:
    """Indices of the blocks; of all units in a model without module lists."""
    return [i for i, unit in enumerate(units) if unit.block] or list(range(len(units)))


def _starts(blocks: list[int], units: int, sizes: list[int]) -> list[int]:
    """The index of each stage's first unit, from stage sizes in blocks."""
    after = [*blocks, blocks[-1] + 1]  # the units after the last block, such as the head
    return [0, *(min(after[done], units) for done in accumulate(sizes[:-1]))]


def _example(key: str, units: list[Unit], stages: int) -> str:
    """A valid value of `split.balance` or `split.points`, taken from the even split."""
    parts = partition(units, EvenSplit(), stages)
    blocks = {units[place].name for place in _blocks(units)}
    if key == "split.points":
        if not all(parts):
            return f"there can be at most {len(units)} stages; write split=even"
        return f"{key}={override_text([part[0] for part in parts[1:]])}"
    return f"{key}={override_text([len(blocks.intersection(part)) for part in parts])}"
