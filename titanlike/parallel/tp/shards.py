"""Which dimensions of an activation a rank has a part of, and what views make of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Literal

# what a rank has a part of; "constant": of equal elements, so that any part is right
Kind = Literal["tokens", "features", "constant"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A rank's part of one dimension.

    The whole dimension is `pattern` so many times over: matrices that follow each other, of so many
    rows; of each of them the rank has a block.
    """

    kind: Kind
    pattern: Shape
    repeat: int = 1
    source: str = ""  # the module that sharded it

    @property
    def matrices(self) -> int:
        return self.repeat * len(self.pattern)

    @property
    def plain(self) -> bool:
        """Whether the rank's part is one block of the whole."""
        return self.matrices == 1 or self.kind == "constant"

    def __str__(self) -> str:
        behind = f" behind {self.source}" if self.source else ""
        what = "a tensor of constants" if self.kind == "constant" else f"the {self.kind}"
        return f"a rank's part of {what}{behind}"


Layout = tuple[Shard | None, ...]  # a dimension each; None = the rank has the whole


class ShardingError(Exception):
    """A sharded model computes other numbers than the whole one, or raises: where, and why."""

    def __init__(
        self,
        reason: str,
        shard: Shard | None = None,
        pieces: int = 0,
        style: str = "",
        module: str = "",
    ) -> None:
        """shard: what is in the way; pieces: so many matrices are taken out of it; style: that the
        module needs, if that is known; module: where it is."""
        super().__init__(reason)
        self.reason, self.shard, self.pieces = reason, shard, pieces
        self.style, self.module = style, module


def need_whole(verb: str, *shards: Shard | None) -> None:
    """Raise ShardingError where the rank has a part of one of these dimensions: the call does this."""
    if shard := next(filter(None, shards), None):
        raise ShardingError(f"it {verb} over {shard}", shard)


def merge(a: Shard | None, b: Shard | None) -> Shard | None:
    """The shard of a dimension that two tensors have in common; raises ShardingError."""
    if a is None or b is None:
        return a or b
    if "constant" in (a.kind, b.kind):
        return b if a.kind == "constant" else a
    if (a.pattern, a.repeat) != (b.pattern, b.repeat):
        raise ShardingError("the rank has other parts of its arguments", a)
    return a


def by_sizes(whole: Shape, local: Shape, kind: Kind = "constant") -> Layout:
    """The layout of a tensor whose parts are known by their sizes alone."""
    pairs = zip(whole, local, strict=True)
    return tuple(None if w == n else Shard(kind, (w,)) for w, n in pairs)


def check_sizes(layout: Layout, whole: Shape, local: Shape) -> None:
    """Raise ShardingError where a dimension that the rank has the whole of has another size."""
    for shard, w, n in zip(layout, whole, local, strict=True):
        if shard is None and w != n:
            raise ShardingError("its sizes are not those of the whole model")


def packed(shard: Shard, whole: int) -> Shard:
    """With a pattern of equal matrices counted as a repetition of one."""
    if len(set(shard.pattern)) == 1 and len(shard.pattern) > 1:
        return replace(shard, pattern=(whole // shard.matrices,), repeat=shard.matrices)
    return shard


def viewed(wholes: tuple[Shape, Shape], locals_: tuple[Shape, Shape], layout: Layout) -> Layout:
    """The layout of a view; (before, after) of the whole tensor and of the rank's.

    Raises ShardingError where the view of the rank's part is no part of the whole's view.
    """
    result: list[Shard | None] = []
    for before, after in _groups(*wholes):
        if prod(locals_[0][slice(*before)]) != prod(locals_[1][slice(*after)]):
            raise ShardingError("its sizes are those of the whole model")
        flat = _flattened(wholes[0], layout, before)
        result += _unflattened(flat, wholes[1], locals_[1], after)
    return tuple(result)


def _groups(before: Shape, after: Shape) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The smallest ranges of dimensions of two views that have the same elements."""
    i = j = 0
    while i < len(before) or j < len(after):
        starts, sizes = (i, j), [1, 1]
        while (i, j) == starts or sizes[0] != sizes[1]:
            if j == len(after) or (i < len(before) and sizes[0] <= sizes[1]):
                sizes[0] *= before[i]
                i += 1
            else:
                sizes[1] *= after[j]
                j += 1
        while i < len(before) and before[i] == 1 and j == len(after):
            i += 1
        while j < len(after) and after[j] == 1 and i == len(before):
            j += 1
        yield (starts[0], i), (starts[1], j)


def _flattened(shape: Shape, layout: Layout, dims: tuple[int, int]) -> Shard | None:
    """The shard of the one dimension that a range of dimensions becomes."""
    sharded = [(dim, shard) for dim in range(*dims) if (shard := layout[dim]) is not None]
    if not sharded:
        return None
    (dim, shard), *others = sharded
    if any(other.kind != "constant" for _, other in others):
        if shard.kind != "constant" or len(others) > 1:
            raise ShardingError("the rank has parts of two dimensions that become one")
        [(dim, shard)] = others
    inner, outer = prod(shape[dim + 1 : dims[1]]), prod(shape[dims[0] : dim])
    pattern = tuple(size * inner for size in shard.pattern)
    return replace(shard, pattern=pattern, repeat=shard.repeat * outer)


def _unflattened(
    flat: Shard | None, whole: Shape, local: Shape, dims: tuple[int, int]
) -> list[Shard | None]:
    """The shards of the dimensions that one becomes."""
    result: list[Shard | None] = [None] * (dims[1] - dims[0])
    sharded = [dim for dim in range(*dims) if whole[dim] != local[dim]]
    if flat is None and not sharded:
        return result
    if flat is None or len(sharded) != 1:
        raise ShardingError("its sizes are those of the whole model")
    flat = packed(flat, prod(whole[slice(*dims)]))
    [dim] = sharded
    if flat.kind == "constant":
        result[dim - dims[0]] = Shard("constant", (whole[dim],))
        return result
    outer, inner = prod(whole[dims[0] : dim]), prod(whole[dim + 1 : dims[1]])
    if flat.repeat % outer or any(size % inner for size in flat.pattern):
        before, after = (" x ".join(map(str, shape[slice(*dims)])) for shape in (whole, local))
        raise ShardingError(f"{before} becomes {after}, which {flat} cannot be", flat, outer)
    pattern = tuple(size // inner for size in flat.pattern)
    result[dim - dims[0]] = replace(flat, pattern=pattern, repeat=flat.repeat // outer)
    return result


def pieces_of(verb: str, shard: Shard, sizes: Sequence[int]) -> list[Shard]:
    """The shards of pieces of so many rows of a whole dimension, one after the other; raises
    ShardingError, that the call does this, where the rank's piece is not its part of one."""
    if shard.kind == "constant":
        return [replace(shard, pattern=(size,)) for size in sizes]
    matrices = shard.pattern * shard.repeat
    starts, ends = [0, *accumulate(matrices)], [0, *accumulate(sizes)]
    if not {*ends} <= {*starts}:
        raise ShardingError(f"it {verb} {shard}", shard, len(sizes))
    cuts = [starts.index(end) for end in ends]
    return [
        packed(replace(shard, pattern=matrices[begin:end], repeat=1), size)
        for begin, end, size in zip(cuts, cuts[1:], sizes, strict=False)
    ]
