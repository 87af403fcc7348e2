"""How operators of torch that compute do it from parts of tensors.

A rule gives the layouts of a call's results, or raises WrongCall with what the operator does over a
dimension of which the rank has only a part.
"""

from __future__ import annotations

from dataclasses import replace

from titanlike.parallel.tp.layout import (
    Call,
    Division,
    Layout,
    Operand,
    Rule,
    Shape,
    WrongCall,
    merge,
    partly,
)


def elementwise(call: Call) -> list[Layout]:
    """Also with broadcasting."""
    found = []
    for whole, local in call.results:
        layout: list[Division | None] = [None] * len(whole)
        for operand in call.operands:
            offset = len(whole) - len(operand.whole)
            for dim, division in enumerate(operand.layout):
                if division is None:
                    continue
                if offset + dim < 0:
                    raise WrongCall("its result has fewer dimensions than its arguments")
                layout[offset + dim] = merge(layout[offset + dim], division)
                if local[offset + dim] != operand.local[dim]:
                    raise WrongCall("the rank's part meets a whole tensor")
        for dim, division in enumerate(layout):
            if division is None and whole[dim] != local[dim]:
                raise WrongCall("its sizes are not those of the whole model")
        found.append(tuple(layout))
    return found


def like(call: Call) -> list[Layout]:
    """Elementwise with the first argument alone; other results are statistics of rows."""
    first = call.input.layout
    return [
        first if len(whole) == len(first) and local == call.input.local else _by_shape(whole, local)
        for whole, local in call.results
    ]


def _by_shape(whole: Shape, local: Shape) -> Layout:
    """Of a tensor whose elements are equal, or whose part is known by its size alone."""
    pairs = zip(whole, local, strict=True)
    return tuple(None if w == n else Division("constant", (w,)) for w, n in pairs)


def constant(call: Call) -> list[Layout]:
    return [_by_shape(whole, local) for whole, local in call.results]


def numbers(call: Call) -> list[Layout]:
    if any(whole != local for whole, local in call.results):
        raise WrongCall("it counts as far as the rank's part, from its start")
    return [(None,) * len(whole) for whole, _ in call.results]


def over(verb: str, *names: str) -> Rule:
    """Rule of an operator that combines the elements along the dimensions that it is given."""

    def rule(call: Call) -> list[Layout]:
        x = call.input
        if len(call.operands) > 1 and "other" in call.given:  # the larger of two tensors
            return elementwise(call)
        given = next((call.given[name] for name in names if call.given.get(name) is not None), None)
        if given is None or given == []:
            dims = list(range(len(x.whole)))
        else:
            dims = [
                call.dim(dim) for dim in (given if isinstance(given, (list, tuple)) else [given])
            ]
        if wrong := next((x.layout[dim] for dim in dims if x.layout[dim] is not None), None):
            raise partly(verb, wrong)
        found: list[Layout] = []
        for whole, local in call.results:
            if len(whole) == len(x.whole):
                layout = tuple(None if d in dims else one for d, one in enumerate(x.layout))
            else:
                layout = tuple(one for d, one in enumerate(x.layout) if d not in dims)
            fits = len(layout) == len(whole)
            found.append(layout if fits else _by_shape(whole, local))
        return found

    return rule


def normalize(call: Call) -> list[Layout]:
    x = call.input
    count = len(call.given["normalized_shape"])
    if wrong := next((one for one in x.layout[-count:] if one is not None), None):
        raise partly("normalizes", wrong)
    return like(call)


def whole_only(verb: str, *, batch: bool = False) -> Rule:
    """Rule of an operator that takes no parts, except of a batch."""

    def rule(call: Call) -> list[Layout]:
        for x in call.operands:
            dims = x.layout[1:] if batch else x.layout
            if wrong := next((one for one in dims if one is not None), None):
                raise partly(verb, wrong)
        return constant(call)

    return rule


def contract(call: Call) -> list[Layout]:
    """Products of matrices: [..., n, k] x [..., k, m], perhaps added to a first argument."""
    *added, a, b = call.operands
    row, column = a.layout[-1], b.layout[-2 if len(b.layout) > 1 else 0]
    if wrong := row or column:
        raise partly("sums", wrong)
    batch = [merge(*pair) for pair in zip(a.layout[:-2], b.layout[:-2], strict=True)]
    layout = (*batch, *a.layout[len(batch) : -1], *(b.layout[-1:] if len(b.layout) > 1 else ()))
    [(whole, local)] = call.results
    product = Operand(whole, local, layout)
    return elementwise(replace(call, operands=[product, *added]))


def attention(call: Call) -> list[Layout]:
    q, k, v, *masks = call.operands
    if wrong := q.layout[-1] or k.layout[-1]:
        raise partly("multiplies queries and keys", wrong)
    if wrong := k.layout[-2] or v.layout[-2] or q.layout[-2]:
        raise partly("attends", wrong)
    if len(q.whole) > 3:
        _check_heads(q, k)
        _check_heads(q, v)
    for mask in masks:
        for division, own in zip(mask.layout[-3::-1], q.layout[-3::-1], strict=False):
            merge(division, own)
    return [(*q.layout[:-1], v.layout[-1])]


def _check_heads(q: Operand, k: Operand) -> None:
    """Whether the rank's queries meet the keys that they meet in the whole model."""
    if q.layout[-3] is None and k.layout[-3] is None:
        return
    heads, kv_heads = (x.whole[-3] // x.local[-3] for x in (q, k))  # ranks that share them
    fits = heads == kv_heads or (k.local[-3] == 1 and heads % kv_heads == 0)
    orders = [(x.layout[-3].repeat, len(x.layout[-3].pattern)) for x in (q, k) if x.layout[-3]]
    if fits and any(repeat * pieces > 1 for repeat, pieces in orders) and len({*orders}) > 1:
        raise WrongCall("its heads of queries and keys are in another order", q.layout[-3])
    if not fits:
        shown = " and ".join(f"{x.local[-3]} of {x.whole[-3]}" for x in (q, k))
        raise WrongCall(f"it has {shown} heads of queries and keys", q.layout[-3] or k.layout[-3])


def embedding(call: Call) -> list[Layout]:
    weight, ids = call.given["weight"], call.given["indices"]
    if weight.layout[0] is not None:
        raise partly("looks up", weight.layout[0])
    return [(*ids.layout, *weight.layout[1:])]


def indexed(call: Call) -> list[Layout]:
    """x[indices], and writing there."""
    x = call.input
    indices = call.given.get("indices", [])
    for dim, index in enumerate(indices):
        if index is not None and (division := x.layout[dim]) is not None:
            raise partly("looks up", division)
    reads_rows = len(call.operands) == 2 and "values" not in call.given
    for index in () if reads_rows else call.operands[1:]:
        if wrong := next((one for one in index.layout if one is not None), None):
            raise partly("looks up", wrong)
    if "values" in call.given:
        if wrong := next(
            (one for one in x.layout if one is not None and one.kind == "constant"), None
        ):
            raise partly("writes to some of the elements", wrong)
        return [x.layout]
    at = [dim for dim, index in enumerate(indices) if index is not None]
    found: Layout = (None,) * max((len(indices[dim].whole) for dim in at), default=0)
    if reads_rows:  # as an embedding
        found = call.operands[1].layout
    together = at == list(range(at[0], at[0] + len(at))) if at else True
    left = [one for dim, one in enumerate(x.layout) if dim not in at]
    place = at[0] if at and together else 0
    layout = (*left[:place], *found, *left[place:])
    [(whole, local)] = call.results
    return [layout if len(layout) == len(whole) else _by_shape(whole, local)]


def along(call: Call) -> list[Layout]:
    """gather, scatter, index_select: indices along one dimension."""
    x, dim = call.input, call.dim(call.given.get("dim", 0))
    if wrong := x.layout[dim]:
        raise partly("looks up", wrong)
    index = call.given.get("index")
    if index is not None and len(index.layout) == len(x.layout):
        for one, other in zip(x.layout, index.layout, strict=True):
            merge(one, other)
            if (one is None) != (other is None):
                raise WrongCall("the rank's part meets a whole tensor")
    return [x.layout for _ in call.results]


def channels(call: Call) -> list[Layout]:
    """Convolutions: the batch may be a part."""
    return whole_only("convolves", batch=True)(call)


# name without `_` at its end -> (rule, whether arguments that are sizes may differ)
