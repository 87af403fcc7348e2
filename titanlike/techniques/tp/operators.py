"""Which dimensions of a tensor are sharded, and how torch's operators compute with shards.

A rule stands below the names of the operators that follow it. It returns the layouts of a call's
results, or raises ShardingError with what the operator does over a sharded dimension. An operator
without a rule is refused on shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, Literal

# what is sharded; "constant": equal elements, so that any part is correct
Kind = Literal["tokens", "features", "constant"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A rank's part of one dimension.

    The full dimension is `pattern` repeated `repeat` times: consecutive matrices with these numbers
    of rows, of each of which the rank has a block.
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
        """Whether the rank's part is one contiguous block."""
        return self.matrices == 1 or self.kind == "constant"

    def __str__(self) -> str:
        behind = f" behind {self.source}" if self.source else ""
        what = "a tensor of constants" if self.kind == "constant" else f"the {self.kind}"
        return f"a rank's part of {what}{behind}"


Layout = tuple[Shard | None, ...]  # per dimension; None = not sharded


class ShardingError(Exception):
    """A sharded model computes other results than the full one, or raises: where, and why."""

    def __init__(
        self,
        reason: str,
        shard: Shard | None = None,
        pieces: int = 0,
        style: str = "",
        module: str = "",
    ) -> None:
        """shard: the shard at fault; pieces: how many matrices are taken out of it; style: the
        style that the module needs, if known; module: where it is."""
        super().__init__(reason)
        self.reason, self.shard, self.pieces = reason, shard, pieces
        self.style, self.module = style, module


def need_whole(verb: str, *shards: Shard | None) -> None:
    """Raise ShardingError if one of these dimensions is sharded; the call does `verb` over it."""
    if shard := next(filter(None, shards), None):
        raise ShardingError(f"it {verb} over {shard}", shard)


def merge(a: Shard | None, b: Shard | None) -> Shard | None:
    """The shard of a dimension that two tensors share; raises ShardingError if they differ."""
    if a is None or b is None:
        return a or b
    if "constant" in (a.kind, b.kind):
        return b if a.kind == "constant" else a
    if (a.pattern, a.repeat) != (b.pattern, b.repeat):
        raise ShardingError("the rank has other parts of its arguments", a)
    return a


def by_sizes(whole: Shape, local: Shape, kind: Kind = "constant") -> Layout:
    """The layout of a tensor by its sizes only."""
    pairs = zip(whole, local, strict=True)
    return tuple(None if w == n else Shard(kind, (w,)) for w, n in pairs)


def check_sizes(layout: Layout, whole: Shape, local: Shape) -> None:
    """Raise ShardingError if a dimension that is not sharded has another size."""
    for shard, w, n in zip(layout, whole, local, strict=True):
        if shard is None and w != n:
            raise ShardingError("its sizes are not those of the whole model")


def packed(shard: Shard, whole: int) -> Shard:
    """Write a pattern of equal matrices as a repetition of one."""
    if len(set(shard.pattern)) == 1 and len(shard.pattern) > 1:
        return replace(shard, pattern=(whole // shard.matrices,), repeat=shard.matrices)
    return shard


def viewed(wholes: tuple[Shape, Shape], locals_: tuple[Shape, Shape], layout: Layout) -> Layout:
    """The layout of a view; (before, after) of the full tensor and of the rank's.

    Raises ShardingError if the view of the rank's part is not a part of the full view.
    """
    result: list[Shard | None] = []
    for before, after in _groups(*wholes):
        if prod(locals_[0][slice(*before)]) != prod(locals_[1][slice(*after)]):
            raise ShardingError("its sizes are those of the whole model")
        flat = _flattened(wholes[0], layout, before)
        result += _unflattened(flat, wholes[1], locals_[1], after)
    return tuple(result)


def _groups(before: Shape, after: Shape) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the smallest ranges of dimensions of two views that have the same elements."""
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
    """The shard of a range of dimensions that is flattened."""
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
    """The shards of the dimensions that a flat one becomes."""
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
    """The shards of consecutive pieces of these sizes; raises ShardingError (the call does `verb`)
    if the rank's piece is not its part of one."""
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


# --- calls of operators --------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """A tensor argument of a call."""

    whole: Shape  # in the full model
    local: Shape
    layout: Layout


@dataclass(frozen=True)
class Call:
    """An operator's call in the sharded model, with the same call of the full one."""

    name: str  # "aten.mm"
    given: dict[str, Any]  # arguments by name, tensors as Operands
    whole: Mapping[str, Any]  # in the full model, tensors as None
    operands: list[Operand]
    results: list[tuple[Shape, Shape]]  # shapes (full, local)
    pointwise: bool = False  # torch's tag

    @property
    def input(self) -> Operand:
        return self.operands[0]

    def dim(self, value: int) -> int:
        return value % max(len(self.input.whole), 1)

    def shard(self, name: str, default: int = 0) -> tuple[int, Shard | None]:
        """(the input's dimension that an argument names, its shard)."""
        dim = self.dim(self.given.get(name, default))
        return dim, self.input.layout[dim]


Rule = Callable[[Call], "list[Layout]"]
# name without trailing `_` -> (rule, whether size arguments may differ)
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
    """Raise ShardingError if a non-tensor argument differs from the full model's."""
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
    """Register a rule for operators; sized: size arguments may differ."""

    def add(rule: Rule) -> Rule:
        RULES.update({name: (rule, sized) for name in names.split()})
        return rule

    return add


# --- elementwise ---------------------------------------------------------------------------------


@_follow(
    "clone copy _to_copy to type_as contiguous detach alias where "
    "masked_fill fill zero masked_scatter addcmul addcdiv lerp clamp nan_to_num positive "
    "_conj resolve_conj resolve_neg isin one_hot item rrelu_with_noise prelu _prelu_kernel"
)
def elementwise(call: Call) -> list[Layout]:
    """Elementwise operators, with broadcasting."""
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


@_follow(
    "zeros ones empty full new_zeros new_ones new_empty new_full empty_strided new_empty_strided "
    "zeros_like ones_like empty_like full_like rand randn randint rand_like randn_like "
    "randint_like scalar_tensor",
    sized=True,
)
def _constant(call: Call) -> list[Layout]:
    return [by_sizes(whole, local) for whole, local in call.results]


@_follow(
    "arange linspace logspace eye tril_indices triu_indices randperm range lift_fresh lift_fresh_copy",
    sized=True,
)
def numbers(call: Call) -> list[Layout]:
    if any(whole != local for whole, local in call.results):
        raise ShardingError("it counts as far as the rank's part, from its start")
    return [(None,) * len(whole) for whole, _ in call.results]


@_follow("expand", sized=True)
@_follow(
    "permute transpose t numpy_T mT adjoint swapaxes swapdims stack view_as_real "
    "native_dropout dropout bernoulli normal uniform exponential random"
)
def _inherited(call: Call) -> list[Layout]:
    """Sharded dimensions of a result, found by their sizes; each has the shard of the arguments'
    dimension of the same sizes, or is constant."""
    shards: dict[tuple[int, int], Shard | None] = {}
    for x in call.operands:
        for w, n, shard in zip(x.whole, x.local, x.layout, strict=True):
            shards[w, n] = merge(shards.get((w, n)), shard)
    return [
        tuple(
            (shards.get((w, n)) or shard) if w != n else None
            for w, n, shard in zip(whole, local, by_sizes(whole, local), strict=True)
        )
        for whole, local in call.results
    ]


# --- over dimensions that must not be sharded ----------------------------------------------------


def _over(verb: str, over: str | tuple[int, ...], operators: str) -> None:
    """Register operators that combine elements along dimensions of their input; over: the
    dimensions, or the argument that names them (all if it is missing)."""

    @_follow(operators)
    def rule(call: Call) -> list[Layout]:
        dims: Any = call.given.get(over) if isinstance(over, str) else over
        if len(call.operands) > 1 and "other" in call.given:  # max of two tensors
            return elementwise(call)
        dims = range(len(call.input.whole)) if dims is None or dims == [] else dims
        dims = [dims] if isinstance(dims, int) else dims
        need_whole(verb, *(call.input.layout[call.dim(dim)] for dim in dims))
        return _inherited(call)


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
_over("looks up", (0,), "embedding")
_over("takes pairs", (-1,), "view_as_complex")
_over("zeroes a triangle", (-2, -1), "tril triu")


def _whole_only(verb: str, operators: str, *, batch: bool = False) -> None:
    """Register operators that take no shards, except along the batch."""

    @_follow(operators)
    def rule(call: Call) -> list[Layout]:
        need_whole(verb, *(shard for x in call.operands for shard in x.layout[int(batch) :]))
        return _inherited(call)


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
    return _inherited(call)


@_follow("diagonal")
def _diagonal(call: Call) -> list[Layout]:
    need_whole("takes a diagonal", call.shard("dim1", 0)[1], call.shard("dim2", 1)[1])
    return _inherited(call)


@_follow("mm bmm addmm baddbmm mv addmv dot addbmm vdot")
def _contract(call: Call) -> list[Layout]:
    """Matmuls: [..., n, k] x [..., k, m], perhaps added to a first argument."""
    *_, a, b = call.operands
    need_whole("sums", a.layout[-1], b.layout[-2 if len(b.layout) > 1 else 0])
    return _inherited(call)


@_follow("scaled_dot_product_attention")
def _attention(call: Call) -> list[Layout]:
    q, k, v, *masks = call.operands
    need_whole("multiplies queries and keys", q.layout[-1], k.layout[-1])
    need_whole("attends", k.layout[-2], v.layout[-2], q.layout[-2])
    if len(q.whole) > 3:
        _check_heads(q, k)
        _check_heads(q, v)
    for mask in masks:
        for shard, query_shard in zip(mask.layout[-3::-1], q.layout[-3::-1], strict=False):
            merge(shard, query_shard)
    return [(*q.layout[:-1], v.layout[-1])]


def _check_heads(q: Operand, k: Operand) -> None:
    """Check that the rank's queries meet the same keys as in the full model."""
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


# --- indexing ------------------------------------------------------------------------------------


@_follow("index index_put _unsafe_index _index_put_impl")
def _indexed(call: Call) -> list[Layout]:
    """x[indices], read or written."""
    x, indices, writes = call.input, call.given.get("indices", []), "values" in call.given
    need_whole("looks up", *(x.layout[d] for d, index in enumerate(indices) if index is not None))
    if writes or len(call.operands) > 2:  # else as an embedding
        need_whole("looks up", *(shard for index in call.operands[1:] for shard in index.layout))
    if not writes:
        return _inherited(call)
    constant_shards = (
        shard for shard in x.layout if shard is not None and shard.kind == "constant"
    )
    need_whole("writes to some of the elements", *constant_shards)
    return [x.layout]


@_follow("gather scatter scatter_add scatter_reduce index_select index_add index_copy index_fill")
def _along(call: Call) -> list[Layout]:
    """Indexing along one dimension."""
    x, index = call.input, call.given.get("index")
    need_whole("looks up", call.shard("dim")[1])
    if index is not None and len(index.layout) == len(x.layout):
        for shard, index_shard in zip(x.layout, index.layout, strict=True):
            merge(shard, index_shard)
            if (shard is None) != (index_shard is None):
                raise ShardingError("the rank's part meets a whole tensor")
    return [x.layout for _ in call.results]


@_follow("select unbind")
def _take_one(call: Call) -> list[Layout]:
    _, shard = call.shard("dim")
    if shard is not None and shard.kind != "constant":
        raise ShardingError(f"it takes one of {shard}", shard)
    return _inherited(call)


@_follow("constant_pad_nd")
def _padded(call: Call) -> list[Layout]:
    layout, pad = call.input.layout, call.given["pad"]
    for count, shard in enumerate(layout[::-1][: len(pad) // 2]):
        if any(pad[2 * count : 2 * count + 2]):
            need_whole("pads", shard)
    return [layout]


# --- views, slices, splits and concatenation -----------------------------------------------------


@_follow(
    "view _unsafe_view reshape _reshape_alias view_copy unsqueeze squeeze flatten unflatten "
    "expand_copy view_as",
    sized=True,
)
def _views(call: Call) -> list[Layout]:
    x = call.input
    return [viewed((x.whole, w), (x.local, n), x.layout) for w, n in call.results]


@_follow("repeat", sized=True)
def _repeated(call: Call) -> list[Layout]:
    layout, repeats = list(_inherited(call)[0]), call.given["repeats"]
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
    rows, local_rows = x.whole[dim], x.local[dim]
    if shard is None and whole[dim] != local[dim]:
        raise ShardingError("it takes as many as the rank has of another tensor")
    if shard is None or (whole[dim], local[dim]) == (rows, local_rows):
        return [x.layout]
    starts = call.whole.get("start") or 0, call.given.get("start") or 0
    start, local_start = (
        i + n if i < 0 else i for i, n in zip(starts, (rows, local_rows), strict=True)
    )
    sizes = [size for size in (start, whole[dim], rows - start - whole[dim]) if size]
    verb = "takes a part of"
    if (call.whole.get("step") or 1) != 1:
        raise ShardingError(f"it {verb} {shard}", shard)
    piece = pieces_of(verb, shard, sizes)[sizes.index(whole[dim], int(start > 0))]
    if local_start * rows != start * local_rows or local[dim] * rows != whole[dim] * local_rows:
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
        # constants may differ from each other
        if mixed or (first.kind != "features" and len(parts) > 1):
            need_whole("concatenates", first)
        pattern = tuple(size for shard in shards for size in shard.pattern * shard.repeat)
        layout[dim] = Shard(first.kind, pattern, 1, first.source)
    [(whole, local)] = call.results
    check_sizes(tuple(layout), whole, local)
    return [tuple(layout)]
