"""The same for operators that only take, order or join elements, see `rules.py`."""

from __future__ import annotations

from collections.abc import Sequence

from titanlike.parallel.tp.layout import (
    Call,
    Division,
    Layout,
    Operand,
    Shape,
    WrongCall,
    merge,
    part_of,
    partly,
    pieces_of,
    viewed,
)


def views(call: Call) -> list[Layout]:
    x = call.input
    return [viewed((x.whole, w), (x.local, n), x.layout) for w, n in call.results]


def permute(call: Call) -> list[Layout]:
    layout, given = call.input.layout, call.given
    if "dims" in given:
        order = [call.dim(dim) for dim in given["dims"]]
    else:
        order = list(range(len(layout)))
        a, b = (call.dim(given[name]) for name in ("dim0", "dim1")) if "dim0" in given else (0, -1)
        if order:
            order[a], order[b] = order[b], order[a]
    return [tuple(layout[dim] for dim in order)]


def expand(call: Call) -> list[Layout]:
    [(whole, local)] = call.results
    return [_aligned(call.input, whole, local)]


def _aligned(x: Operand, whole: Shape, local: Shape) -> Layout:
    """Of an argument that is repeated along dimensions of size 1, or new ones."""
    layout: list[Division | None] = []
    offset = len(whole) - len(x.whole)
    for dim, (w, n) in enumerate(zip(whole, local, strict=True)):
        before = dim - offset
        own = before >= 0 and x.whole[before] == w and x.layout[before]
        layout.append(own or (Division("constant", (w,)) if w != n else None))
    return tuple(layout)


def repeated(call: Call) -> list[Layout]:
    [(whole, local)] = call.results
    x, repeats = call.input, call.given["repeats"]
    offset = len(whole) - len(x.whole)
    layout = list(_aligned(x, whole, local))
    for dim, count in enumerate(repeats):
        division = x.layout[dim - offset] if dim >= offset else None
        if division is not None:
            if count != call.whole["repeats"][dim]:
                raise WrongCall("it repeats the rank's part another number of times")
            layout[dim] = Division(
                division.kind, division.pattern, division.repeat * count, division.source
            )
    return [tuple(layout)]


def sliced(call: Call) -> list[Layout]:
    x, dim = call.input, call.dim(call.given.get("dim", 0))
    [(whole, local)] = call.results
    division = x.layout[dim]
    if division is None or (whole[dim] == x.whole[dim] and local[dim] == x.local[dim]):
        if whole[dim] != local[dim] and division is None:
            raise WrongCall("it takes as many as the rank has of another tensor")
        return [x.layout]
    start, step = call.whole.get("start") or 0, call.whole.get("step") or 1
    start = start + x.whole[dim] if start < 0 else start
    own = call.given.get("start") or 0
    own = own + x.local[dim] if own < 0 else own
    stop = start + whole[dim]
    sizes = [size for size in (start, stop - start, x.whole[dim] - stop) if size]
    piece = _one_of(call, division, dim, sizes, sizes.index(whole[dim], int(start > 0)), step)
    if own * x.whole[dim] != start * x.local[dim] or local[dim] * x.whole[dim] != (
        whole[dim] * x.local[dim]
    ):
        raise _unpacked("takes a part of", division)
    return [(*x.layout[:dim], piece, *x.layout[dim + 1 :])]


def _one_of(
    call: Call, division: Division, dim: int, sizes: Sequence[int], index: int, step: int = 1
) -> Division | None:
    if step != 1:
        raise _unpacked("takes a part of", division)
    try:
        return pieces_of(division, call.input.whole[dim], sizes)[index]
    except WrongCall:
        raise _unpacked("takes a part of", division, len(sizes)) from None


def _unpacked(verb: str, division: Division, pieces: int = 0) -> WrongCall:
    return WrongCall(f"it {verb} {part_of(division)}", division, pieces)


def splits(call: Call) -> list[Layout]:
    x, dim = call.input, call.dim(call.given.get("dim", 0))
    division = x.layout[dim]
    sizes = [whole[dim] for whole, _ in call.results]
    if division is None:
        return _like_but(call, dim, [None] * len(sizes))
    if len(sizes) == 1:
        return [x.layout]
    try:
        found = pieces_of(division, x.whole[dim], sizes)
    except WrongCall:
        raise _unpacked("splits", division, len(sizes)) from None
    for whole, local in call.results:
        if local[dim] * x.whole[dim] != whole[dim] * x.local[dim]:
            raise _unpacked("splits", division, len(sizes))
    return _like_but(call, dim, found)


def _like_but(call: Call, dim: int, divisions: Sequence[Division | None]) -> list[Layout]:
    layout = call.input.layout
    found: list[Layout] = [(*layout[:dim], one, *layout[dim + 1 :]) for one in divisions]
    for result, (whole, local) in zip(found, call.results, strict=True):
        for one, w, n in zip(result, whole, local, strict=True):
            if one is None and w != n:
                raise WrongCall("its sizes are not those of the whole model")
    return found


def take_one(call: Call) -> list[Layout]:
    """select, unbind."""
    layout, dim = call.input.layout, call.dim(call.given.get("dim", 0))
    if (wrong := layout[dim]) is not None and wrong.kind != "constant":
        raise _unpacked("takes one of", wrong)
    return [(*layout[:dim], *layout[dim + 1 :]) for _ in call.results]


def as_complex(call: Call) -> list[Layout]:
    """view_as_complex: the last dimension, of pairs, becomes one number; and back."""
    layout = call.input.layout
    if call.name.endswith("view_as_real"):
        return [(*layout, None)]
    if layout[-1] is not None:
        raise partly("takes pairs", layout[-1])
    return [layout[:-1]]


def joined(call: Call) -> list[Layout]:
    """cat."""
    dim = call.dim(call.given.get("dim", 0))
    parts = [x for x in call.operands if len(x.whole) == len(call.input.whole)]
    others: list[Division | None] = [None] * len(call.input.whole)
    for x in parts:
        for place, division in enumerate(x.layout):
            if place != dim:
                others[place] = merge(others[place], division)
    along = [x.layout[dim] for x in parts]
    if any(along):
        if not all(along) or len({one.kind for one in along if one}) > 1:
            wrong = next(one for one in along if one is not None)
            raise partly("concatenates", wrong)
        # also constants, which differ from each other
        divided = [one for one in along if one is not None]  # all of them
        first = divided[0]
        if first.kind != "features" and len(along) > 1:
            raise partly("concatenates", first)
        pattern = tuple(p for one in divided for p in one.pattern * one.repeat)
        others[dim] = Division(first.kind, pattern, 1, first.source)
    [(whole, local)] = call.results
    if any(one is None and w != n for one, w, n in zip(others, whole, local, strict=True)):
        raise WrongCall("its sizes are not those of the whole model")
    return [tuple(others)]


def stacked(call: Call) -> list[Layout]:
    [(whole, _)] = call.results
    dim = call.given.get("dim", 0) % len(whole)
    layout: list[Division | None] = [None] * (len(whole) - 1)
    for x in call.operands:
        layout = [merge(a, b) for a, b in zip(layout, x.layout, strict=True)]
    return [(*layout[:dim], None, *layout[dim:])]


def padded(call: Call) -> list[Layout]:
    x, pad = call.input, call.given["pad"]
    for count, dim in enumerate(range(len(x.whole) - 1, len(x.whole) - 1 - len(pad) // 2, -1)):
        if any(pad[2 * count : 2 * count + 2]) and (wrong := x.layout[dim]):
            raise partly("pads", wrong)
    return [x.layout]


def halves(call: Call) -> list[Layout]:
    x, dim = call.input, call.dim(call.given.get("dim", -1))
    if (division := x.layout[dim]) is None:
        return [x.layout]
    half = x.whole[dim] // 2
    try:
        piece = pieces_of(division, x.whole[dim], [half, half])[0]
    except WrongCall:
        raise _unpacked("halves", division, 2) from None
    return [(*x.layout[:dim], piece, *x.layout[dim + 1 :])]


def triangle(call: Call) -> list[Layout]:
    if wrong := next((one for one in call.input.layout[-2:] if one is not None), None):
        raise partly("zeroes a triangle", wrong)
    return [call.input.layout]


def diagonal(call: Call) -> list[Layout]:
    dims = [call.dim(call.given.get("dim1", 0)), call.dim(call.given.get("dim2", 1))]
    if wrong := next((call.input.layout[dim] for dim in dims if call.input.layout[dim]), None):
        raise partly("takes a diagonal", wrong)
    rest = [one for dim, one in enumerate(call.input.layout) if dim not in dims]
    return [(*rest, None)]
