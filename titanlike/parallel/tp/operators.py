"""How operators of torch compute with a rank's parts of tensors; one without a rule is refused on them.

A rule stands below the names of the operators that follow it. It gives the layouts of a call's results,
or raises ShardingError with what the operator does over a dimension of which the rank has only a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titanlike.parallel.tp.shards import (
    Layout,
    Shape,
    Shard,
    ShardingError,
    by_sizes,
    check_sizes,
    merge,
    need_whole,
    pieces_of,
    viewed,
)


@dataclass(frozen=True)
class Operand:
    """A tensor among the arguments of a call."""

    whole: Shape  # in the whole model
    local: Shape
    layout: Layout


@dataclass(frozen=True)
class Call:
    """An operator's call in the sharded model beside the same call in the whole one."""

    name: str  # "aten.mm"
    given: dict[str, Any]  # arguments by name, tensors as Operands
    whole: Mapping[str, Any]  # in the whole model, tensors as None
    operands: list[Operand]
    results: list[tuple[Shape, Shape]]  # shapes (whole, local)
    pointwise: bool = False  # as torch has tagged it

    @property
    def input(self) -> Operand:
        return self.operands[0]

    def dim(self, value: int) -> int:
        return value % max(len(self.input.whole), 1)

    def shard(self, name: str, default: int = 0) -> tuple[int, Shard | None]:
        """(the input's dimension that an argument names, the rank's part of it)."""
        dim = self.dim(self.given.get(name, default))
        return dim, self.input.layout[dim]


Rule = Callable[[Call], "list[Layout]"]
# name without `_` at its end -> (rule, whether arguments that are sizes may differ)
RULES: dict[str, tuple[Rule, bool]] = {}


def layouts_of(call: Call) -> list[Layout]:
    """The layouts of a call's results; raises ShardingError."""
    kind = call.name.split(".")[1].removesuffix("_") or call.name
    shards = [shard for x in call.operands for shard in x.layout if shard is not None]
    rule, sized = RULES.get(kind, (elementwise if call.pointwise else None, False))
    if not sized:
        _check_same_numbers(call)
    if not shards and (rule is None or all(whole == local for whole, local in call.results)):
        for whole, local in call.results:
            check_sizes((None,) * len(whole), whole, local)
        return [(None,) * len(whole) for whole, _ in call.results]
    if rule is None:
        reason = f"it is not known to compute the same with {shards[0]}"
        raise ShardingError(reason, style="unknown")
    return rule(call)


def _check_same_numbers(call: Call) -> None:
    """Raise ShardingError where an argument that is no tensor is another than in the whole model."""
    for name, value in call.given.items():
        other = call.whole.get(name)
        if _has_operand(value) or name in ("dtype", "layout", "device", "pin_memory"):
            continue
        if name != "memory_format" and type(value) is type(other) and value != other:
            here, there = (str(list(v)) if isinstance(v, tuple) else str(v) for v in (value, other))
            raise ShardingError(f"its {name} is {here}, and {there} in the model")


def _has_operand(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_operand, value))
    return isinstance(value, Operand)


def _follow(names: str, *, sized: bool = False) -> Callable[[Rule], Rule]:
    """The operators that follow a rule; sized: arguments that are sizes may differ."""

    def add(rule: Rule) -> Rule:
        RULES.update({name: (rule, sized) for name in names.split()})
        return rule

    return add


# --- element by element --------------------------------------------------------------------------


@_follow(
    "clone copy _to_copy to type_as contiguous detach alias where "
    "masked_fill fill zero masked_scatter addcmul addcdiv lerp clamp nan_to_num positive "
    "_conj resolve_conj resolve_neg isin one_hot item rrelu_with_noise prelu _prelu_kernel"
)
def elementwise(call: Call) -> list[Layout]:
    """Also with broadcasting."""
    layouts = []
    for whole, local in call.results:
        layout: list[Shard | None] = [None] * len(whole)
        for x in call.operands:
            offset = len(whole) - len(x.whole)
            for dim, shard in enumerate(x.layout):
                if shard is None:
                    continue
                if offset + dim < 0:
                    raise ShardingError("its result has fewer dimensions than its arguments")
                layout[offset + dim] = merge(layout[offset + dim], shard)
                if local[offset + dim] != x.local[dim]:
                    raise ShardingError("the rank's part meets a whole tensor")
        check_sizes(tuple(layout), whole, local)
        layouts.append(tuple(layout))
    return layouts


@_follow("native_dropout dropout bernoulli normal uniform exponential random")
def like(call: Call) -> list[Layout]:
    """Elementwise with the first argument alone; other results are statistics of rows."""
    x = call.input
    return [
        x.layout if len(whole) == len(x.whole) and local == x.local else by_sizes(whole, local)
        for whole, local in call.results
    ]


@_follow(
    "zeros ones empty full new_zeros new_ones new_empty new_full empty_strided new_empty_strided "
    "zeros_like ones_like empty_like full_like rand randn randint rand_like randn_like "
    "randint_like scalar_tensor",
    sized=True,
)
def constant(call: Call) -> list[Layout]:
    return [by_sizes(whole, local) for whole, local in call.results]


@_follow(
    "arange linspace logspace eye tril_indices triu_indices randperm range lift_fresh lift_fresh_copy",
    sized=True,
)
def numbers(call: Call) -> list[Layout]:
    if any(whole != local for whole, local in call.results):
        raise ShardingError("it counts as far as the rank's part, from its start")
    return [(None,) * len(whole) for whole, _ in call.results]


# --- over a dimension ----------------------------------------------------------------------------


def _over(verb: str, name: str, operators: str) -> None:
    """Operators that combine the elements along the dimensions that an argument gives."""

    @_follow(operators)
    def rule(call: Call) -> list[Layout]:
        x, dims = call.input, call.given.get(name)
        if len(call.operands) > 1 and "other" in call.given:  # the larger of two tensors
            return elementwise(call)
        dims = list(range(len(x.whole))) if dims is None or dims == [] else dims
        over = [call.dim(dim) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]
        need_whole(verb, *(x.layout[dim] for dim in over))
        rest = tuple(shard for dim, shard in enumerate(x.layout) if dim not in over)
        layouts = [x.layout if len(w) == len(x.whole) else rest for w, _ in call.results]
        return [
            layout if len(layout) == len(whole) else by_sizes(whole, local)
            for layout, (whole, local) in zip(layouts, call.results, strict=True)
        ]


_over(
    "reduces",
    "dim",
    "sum mean amax amin max min argmax argmin var std var_mean std_mean prod all any norm "
    "linalg_vector_norm logsumexp median nanmedian mode nanmean nansum count_nonzero aminmax",
)
_over("takes a softmax", "dim", "softmax _softmax log_softmax _log_softmax _safe_softmax")
_over("cumulates", "dim", "cumsum cumprod cummax cummin logcumsumexp _cummax_helper")
_over("sorts", "dim", "sort argsort topk kthvalue")
_over("reverses", "dims", "flip")
_over("rolls", "dims", "roll")
_over("unfolds", "dimension", "unfold")


def _whole_only(verb: str, operators: str, *, batch: bool = False) -> None:
    """Operators that take no parts, except of a batch."""

    @_follow(operators)
    def rule(call: Call) -> list[Layout]:
        need_whole(verb, *(shard for x in call.operands for shard in x.layout[int(batch) :]))
        return constant(call)


_whole_only("normalizes", "native_group_norm group_norm instance_norm", batch=True)
_whole_only(
    "normalizes",
    "native_batch_norm batch_norm _native_batch_norm_legit _batch_norm_with_update "
    "_native_batch_norm_legit_functional cudnn_batch_norm",
)
_whole_only("convolves", "convolution _convolution conv1d conv2d conv3d", batch=True)
_whole_only("selects", "nonzero masked_select unique_consecutive _unique2 bincount")


@_follow("native_layer_norm layer_norm rms_norm _fused_rms_norm")
def _normalize(call: Call) -> list[Layout]:
    need_whole("normalizes", *call.input.layout[-len(call.given["normalized_shape"]) :])
    return like(call)


@_follow("mm bmm addmm baddbmm mv addmv dot addbmm vdot")
def _contract(call: Call) -> list[Layout]:
    """Products of matrices: [..., n, k] x [..., k, m], perhaps added to a first argument."""
    *added, a, b = call.operands
    need_whole("sums", a.layout[-1], b.layout[-2 if len(b.layout) > 1 else 0])
    batch = [merge(*pair) for pair in zip(a.layout[:-2], b.layout[:-2], strict=True)]
    layout = (*batch, *a.layout[len(batch) : -1], *(b.layout[-1:] if len(b.layout) > 1 else ()))
    [(whole, local)] = call.results
    return elementwise(replace(call, operands=[Operand(whole, local, layout), *added]))


@_follow("scaled_dot_product_attention")
def _attention(call: Call) -> list[Layout]:
    q, k, v, *masks = call.operands
    need_whole("multiplies queries and keys", q.layout[-1], k.layout[-1])
    need_whole("attends", k.layout[-2], v.layout[-2], q.layout[-2])
    if len(q.whole) > 3:
        _check_heads(q, k)
        _check_heads(q, v)
    for mask in masks:
        for shard, of_queries in zip(mask.layout[-3::-1], q.layout[-3::-1], strict=False):
            merge(shard, of_queries)
    return [(*q.layout[:-1], v.layout[-1])]


def _check_heads(q: Operand, k: Operand) -> None:
    """Whether the rank's queries meet the keys that they meet in the whole model."""
    shards = [shard for x in (q, k) if (shard := x.layout[-3]) is not None]
    if not shards:
        return
    heads, kv_heads = (x.whole[-3] // x.local[-3] for x in (q, k))  # ranks that share them
    if heads != kv_heads and (k.local[-3] != 1 or heads % kv_heads):
        shown = " and ".join(f"{x.local[-3]} of {x.whole[-3]}" for x in (q, k))
        raise ShardingError(f"it has {shown} heads of queries and keys", shards[0])
    orders = {(shard.repeat, len(shard.pattern)) for shard in shards}
    if any(shard.matrices > 1 for shard in shards) and len(orders) > 1:
        raise ShardingError("its heads of queries and keys are in another order", q.layout[-3])


# --- elements that indices name ------------------------------------------------------------------


@_follow("embedding")
def _embedding(call: Call) -> list[Layout]:
    weight, ids = call.given["weight"], call.given["indices"]
    need_whole("looks up", weight.layout[0])
    return [(*ids.layout, *weight.layout[1:])]


@_follow("index index_put _unsafe_index _index_put_impl")
def _indexed(call: Call) -> list[Layout]:
    """x[indices], and writing there."""
    x, indices = call.input, call.given.get("indices", [])
    at = [dim for dim, index in enumerate(indices) if index is not None]
    need_whole("looks up", *(x.layout[dim] for dim in at))
    reads_rows = len(call.operands) == 2 and "values" not in call.given  # as an embedding
    if not reads_rows:
        need_whole("looks up", *(shard for index in call.operands[1:] for shard in index.layout))
    if "values" in call.given:
        constants = (shard for shard in x.layout if shard is not None and shard.kind == "constant")
        need_whole("writes to some of the elements", *constants)
        return [x.layout]
    selected: Layout = (None,) * max((len(indices[dim].whole) for dim in at), default=0)
    if reads_rows:
        selected = call.operands[1].layout
    rest = [shard for dim, shard in enumerate(x.layout) if dim not in at]
    # where the selected ones are: at the first index, or before all others if they are apart
    place = at[0] if at and at == list(range(at[0], at[0] + len(at))) else 0
    layout = (*rest[:place], *selected, *rest[place:])
    [(whole, local)] = call.results
    return [layout if len(layout) == len(whole) else by_sizes(whole, local)]


@_follow("gather scatter scatter_add scatter_reduce index_select index_add index_copy index_fill")
def _along(call: Call) -> list[Layout]:
    """Indices along one dimension."""
    x, index = call.input, call.given.get("index")
    need_whole("looks up", call.shard("dim")[1])
    if index is not None and len(index.layout) == len(x.layout):
        for shard, of_index in zip(x.layout, index.layout, strict=True):
            merge(shard, of_index)
            if (shard is None) != (of_index is None):
                raise ShardingError("the rank's part meets a whole tensor")
    return [x.layout for _ in call.results]


# --- views, and what takes, orders or joins elements ---------------------------------------------


@_follow(
    "view _unsafe_view reshape _reshape_alias view_copy unsqueeze squeeze flatten unflatten "
    "expand_copy view_as",
    sized=True,
)
def _views(call: Call) -> list[Layout]:
    x = call.input
    return [viewed((x.whole, w), (x.local, n), x.layout) for w, n in call.results]


@_follow("permute transpose t numpy_T mT adjoint swapaxes swapdims")
def _permute(call: Call) -> list[Layout]:
    layout, given = call.input.layout, call.given
    order = [call.dim(dim) for dim in given.get("dims", range(len(layout)))]
    if "dims" not in given and order:
        a, b = (call.dim(given[name]) for name in ("dim0", "dim1")) if "dim0" in given else (0, -1)
        order[a], order[b] = order[b], order[a]
    return [tuple(layout[dim] for dim in order)]


@_follow("expand", sized=True)
def _expand(call: Call) -> list[Layout]:
    """Dimensions of size 1, and new ones, are repeated."""
    [(whole, local)] = call.results
    x, layout = call.input, list(by_sizes(whole, local))
    offset = len(whole) - len(x.whole)
    for dim, shard in enumerate(x.layout):
        if shard is not None and x.whole[dim] == whole[offset + dim]:
            layout[offset + dim] = shard
    return [tuple(layout)]


@_follow("repeat", sized=True)
def _repeated(call: Call) -> list[Layout]:
    layout, repeats = list(_expand(call)[0]), call.given["repeats"]
    for dim, shard in enumerate(call.input.layout, len(layout) - len(call.input.layout)):
        if shard is not None:
            if repeats[dim] != call.whole["repeats"][dim]:
                raise ShardingError("it repeats the rank's part another number of times")
            layout[dim] = replace(shard, repeat=shard.repeat * repeats[dim])
    return [tuple(layout)]


@_follow("slice", sized=True)
def _sliced(call: Call) -> list[Layout]:
    [(whole, local)] = call.results
    x, (dim, shard) = call.input, call.shard("dim")
    rows, own_rows = x.whole[dim], x.local[dim]
    if shard is None and whole[dim] != local[dim]:
        raise ShardingError("it takes as many as the rank has of another tensor")
    if shard is None or (whole[dim], local[dim]) == (rows, own_rows):
        return [x.layout]
    starts = call.whole.get("start") or 0, call.given.get("start") or 0
    start, own = (at + n if at < 0 else at for at, n in zip(starts, (rows, own_rows), strict=True))
    sizes = [size for size in (start, whole[dim], rows - start - whole[dim]) if size]
    verb = "takes a part of"
    if (call.whole.get("step") or 1) != 1:
        raise ShardingError(f"it {verb} {shard}", shard)
    piece = pieces_of(verb, shard, sizes)[sizes.index(whole[dim], int(start > 0))]
    if own * rows != start * own_rows or local[dim] * rows != whole[dim] * own_rows:
        raise ShardingError(f"it {verb} {shard}", shard)
    return [(*x.layout[:dim], piece, *x.layout[dim + 1 :])]


@_follow("split split_with_sizes unsafe_split unsafe_chunk tensor_split", sized=True)
def _splits(call: Call) -> list[Layout]:
    x, (dim, shard) = call.input, call.shard("dim")
    sizes = [whole[dim] for whole, _ in call.results]
    pieces: Sequence[Shard | None] = [shard] * len(sizes)
    if shard is not None and len(sizes) > 1:
        pieces = pieces_of("splits", shard, sizes)
        if any(n[dim] * x.whole[dim] != w[dim] * x.local[dim] for w, n in call.results):
            raise ShardingError(f"it splits {shard}", shard, len(sizes))
    layouts = [(*x.layout[:dim], piece, *x.layout[dim + 1 :]) for piece in pieces]
    for layout, (whole, local) in zip(layouts, call.results, strict=True):
        check_sizes(layout, whole, local)
    return layouts


@_follow("glu")
def _halves(call: Call) -> list[Layout]:
    x, (dim, shard) = call.input, call.shard("dim", -1)
    if shard is None:
        return [x.layout]
    piece = pieces_of("halves", shard, [x.whole[dim] // 2] * 2)[0]
    return [(*x.layout[:dim], piece, *x.layout[dim + 1 :])]


@_follow("select unbind")
def _take_one(call: Call) -> list[Layout]:
    layout, (dim, shard) = call.input.layout, call.shard("dim")
    if shard is not None and shard.kind != "constant":
        raise ShardingError(f"it takes one of {shard}", shard)
    return [(*layout[:dim], *layout[dim + 1 :]) for _ in call.results]


@_follow("view_as_complex view_as_real")
def _as_complex(call: Call) -> list[Layout]:
    """The last dimension, of pairs, becomes one number; and back."""
    layout = call.input.layout
    if call.name.endswith("view_as_real"):
        return [(*layout, None)]
    need_whole("takes pairs", layout[-1])
    return [layout[:-1]]


@_follow("cat concat")
def _joined(call: Call) -> list[Layout]:
    dim = call.dim(call.given.get("dim", 0))
    parts = [x for x in call.operands if len(x.whole) == len(call.input.whole)]
    layout: list[Shard | None] = [None] * len(call.input.whole)
    for x in parts:
        for place, shard in enumerate(x.layout):
            if place != dim:
                layout[place] = merge(layout[place], shard)
    if shards := [shard for x in parts if (shard := x.layout[dim]) is not None]:
        first = shards[0]
        mixed = len(shards) < len(parts) or len({shard.kind for shard in shards}) > 1
        # also constants, which differ from each other
        if mixed or (first.kind != "features" and len(parts) > 1):
            need_whole("concatenates", first)
        pattern = tuple(size for shard in shards for size in shard.pattern * shard.repeat)
        layout[dim] = Shard(first.kind, pattern, 1, first.source)
    [(whole, local)] = call.results
    check_sizes(tuple(layout), whole, local)
    return [tuple(layout)]


@_follow("stack")
def _stacked(call: Call) -> list[Layout]:
    [(whole, _)] = call.results
    dim = call.given.get("dim", 0) % len(whole)
    layout: list[Shard | None] = [None] * (len(whole) - 1)
    for x in call.operands:
        layout = [merge(*pair) for pair in zip(layout, x.layout, strict=True)]
    return [(*layout[:dim], None, *layout[dim:])]


@_follow("constant_pad_nd")
def _padded(call: Call) -> list[Layout]:
    layout, pad = call.input.layout, call.given["pad"]
    for count, shard in enumerate(layout[::-1][: len(pad) // 2]):
        if any(pad[2 * count : 2 * count + 2]):
            need_whole("pads", shard)
    return [layout]


@_follow("tril triu")
def _triangle(call: Call) -> list[Layout]:
    need_whole("zeroes a triangle", *call.input.layout[-2:])
    return [call.input.layout]


@_follow("diagonal")
def _diagonal(call: Call) -> list[Layout]:
    dims = [call.dim(call.given.get("dim1", 0)), call.dim(call.given.get("dim2", 1))]
    need_whole("takes a diagonal", *(call.input.layout[dim] for dim in dims))
    return [(*(shard for dim, shard in enumerate(call.input.layout) if dim not in dims), None)]
