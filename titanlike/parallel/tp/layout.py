"""Which dimensions of an activation a rank has a part of, and what views make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, Literal

# what a rank has a part of; "constant": of equal elements, so that any part is right
Kind = Literal["tokens", "features", "constant"]
Shape = tuple[int, ...]


class WrongCall(Exception):
    """A call computes other numbers than in the whole model, or raises: why.

    division: of the dimension that is in the way; pieces: so many matrices are taken out of it; style:
    that the module needs, if that is known.
    """

    def __init__(
        self,
        reason: str,
        division: Division | None = None,
        pieces: int = 0,
        style: str = "",
    ) -> None:
        super().__init__(reason)
        self.reason, self.division, self.pieces, self.style = reason, division, pieces, style


@dataclass(frozen=True)
class Division:
    """How one dimension is divided.

    The whole dimension is `pattern` so many times over: matrices that follow each other, of so many
    rows; of each of them the rank has a block.
    """

    kind: Kind
    pattern: Shape
    repeat: int = 1
    source: str = ""  # the module that divided it

    @property
    def plain(self) -> bool:
        """Whether the rank's part is one block of the whole."""
        return self.repeat * len(self.pattern) == 1 or self.kind == "constant"


Layout = tuple[Division | None, ...]


def part_of(division: Division) -> str:
    behind = f" behind {division.source}" if division.source else ""
    what = "a tensor of constants" if division.kind == "constant" else f"the {division.kind}"
    return f"a rank's part of {what}{behind}"


def partly(verb: str, division: Division) -> WrongCall:
    return WrongCall(f"it {verb} over {part_of(division)}", division)


def merge(a: Division | None, b: Division | None) -> Division | None:
    """Of a dimension that two tensors have in common; raises WrongCall."""
    if a is None or b is None:
        return a or b
    if "constant" in (a.kind, b.kind):
        return b if a.kind == "constant" else a
    if (a.pattern, a.repeat) != (b.pattern, b.repeat):
        raise WrongCall("the rank has other parts of its arguments", a)
    return a


def packed(division: Division, whole: int) -> Division:
    """With a pattern of equal matrices counted as a repetition of one."""
    if len(set(division.pattern)) == 1 and len(division.pattern) > 1:
        count = division.repeat * len(division.pattern)
        return replace(division, pattern=(whole // count,), repeat=count)
    return division


def viewed(wholes: tuple[Shape, Shape], locals_: tuple[Shape, Shape], layout: Layout) -> Layout:
    """The layout of a view; (before, after) of the whole tensor and of the rank's.

    Raises WrongCall where the view of the rank's part is no part of the whole's view.
    """
    found: list[Division | None] = []
    for before, after in _groups(*wholes):
        sizes = prod(locals_[0][slice(*before)]), prod(locals_[1][slice(*after)])
        if sizes[0] != sizes[1]:
            raise WrongCall("its sizes are those of the whole model")
        flat = _flattened(wholes[0], layout, before)
        found += _split(flat, wholes[1], locals_[1], after)
    return tuple(found)


def _groups(before: Shape, after: Shape) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The smallest ranges of dimensions of two views that have the same elements."""
    i = j = 0
    while i < len(before) or j < len(after):
        starts, sizes = (i, j), [1, 1]
        while i == starts[0] and j == starts[1] or sizes[0] != sizes[1]:
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


def _flattened(shape: Shape, layout: Layout, dims: tuple[int, int]) -> Division | None:
    """Of the one dimension that a range of dimensions becomes."""
    divided = [dim for dim in range(*dims) if layout[dim] is not None]
    if not divided:
        return None
    first, last = divided[0], divided[-1]
    division = layout[first]
    assert division is not None
    others = [layout[dim] for dim in divided[1:]]
    if any(other.kind != "constant" for other in others if other is not None):
        if division.kind != "constant" or len(others) > 1:
            raise WrongCall("the rank has parts of two dimensions that become one")
        division, first = others[0], last
    inner = prod(shape[first + 1 : dims[1]])
    outer = prod(shape[dims[0] : first])
    assert division is not None
    pattern = tuple(size * inner for size in division.pattern)
    return replace(division, pattern=pattern, repeat=division.repeat * outer)


def _split(
    flat: Division | None, whole: Shape, local: Shape, dims: tuple[int, int]
) -> list[Division | None]:
    """Of the dimensions that one becomes."""
    found: list[Division | None] = [None] * (dims[1] - dims[0])
    divided = [dim for dim in range(*dims) if whole[dim] != local[dim]]
    if flat is None and not divided:
        return found
    if flat is None or len(divided) != 1:
        raise WrongCall("its sizes are those of the whole model")
    flat = packed(flat, prod(whole[slice(*dims)]))
    [dim] = divided
    outer, inner = prod(whole[dims[0] : dim]), prod(whole[dim + 1 : dims[1]])
    if flat.kind == "constant":
        found[dim - dims[0]] = Division("constant", (whole[dim],))
        return found
    if flat.repeat % outer or any(size % inner for size in flat.pattern):
        sizes = f"{_sizes(whole, dims)} becomes {_sizes(local, dims)}"
        raise WrongCall(f"{sizes}, which {part_of(flat)} cannot be", flat, outer)
    pattern = tuple(size // inner for size in flat.pattern)
    found[dim - dims[0]] = replace(flat, pattern=pattern, repeat=flat.repeat // outer)
    return found


def _sizes(shape: Shape, dims: tuple[int, int]) -> str:
    return " x ".join(map(str, shape[slice(*dims)]))


def pieces_of(division: Division, whole: int, sizes: Sequence[int]) -> list[Division | None]:
    """Of pieces of so many rows of a whole dimension, one after the other; raises WrongCall where the
    rank's piece is not its part of one."""
    matrices = division.pattern * division.repeat
    starts = [0, *accumulate(matrices)]
    if division.kind == "constant":
        return [replace(division, pattern=(size,)) for size in sizes]
    found: list[Division | None] = []
    start = 0
    for size in sizes:
        stop = start + size
        if start not in starts or stop not in starts:
            raise WrongCall(f"a piece of {size} of {whole} is not of one matrix")
        own = matrices[starts.index(start) : starts.index(stop)]
        found.append(packed(replace(division, pattern=tuple(own), repeat=1), size))
        start = stop
    return found


@dataclass(frozen=True)
class Operand:
    """A tensor among the arguments of a call."""

    whole: Shape  # in the undivided model
    local: Shape
    layout: Layout


@dataclass(frozen=True)
class Call:
    """An operator's call in the divided model beside the same call in the whole one."""

    name: str  # "aten.mm"
    given: dict[str, Any]  # arguments by name, tensors as Operands
    whole: Mapping[str, Any]  # in the whole model, tensors as None
    operands: list[Operand]
    results: list[tuple[Shape, Shape]]  # shapes (whole, local)
    pointwise: bool = False  # as torch has tagged it

    def check_same_numbers(self) -> None:
        """Raises WrongCall where an argument that is no tensor is another than in the whole model."""
        for name, value in self.given.items():
            other = self.whole.get(name)
            if _has_operand(value) or name in ("dtype", "layout", "device", "pin_memory"):
                continue
            if name != "memory_format" and type(value) is type(other) and value != other:
                raise WrongCall(f"its {name} is {_shown(value)}, and {_shown(other)} in the model")

    @property
    def input(self) -> Operand:
        return self.operands[0]

    def dim(self, value: int) -> int:
        return value % max(len(self.input.whole), 1)


def _has_operand(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_operand, value))
    return isinstance(value, Operand)


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, (list, tuple)) else str(value)


Rule = Callable[[Call], "list[Layout]"]
