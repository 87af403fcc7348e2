"""Calls by which a block counts its tokens: positions, and rows of a table of positions.

A block that makes its positions itself (`torch.arange(x.shape[1])`, `self.table[:x.shape[1]]`) would
count from zero on each context-parallel rank. Which calls these are is seen where the forward runs on
meta with whole sequences and with a rank's part of them (`check.py`): their numbers differ as the
lengths do. In a run the same calls, by their place among such calls of the block, count the tokens of
all ranks, of which the rank's are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Take = Callable[[Tensor, int], Tensor]  # (of all tokens, dimension) -> those of this rank


class Call(NamedTuple):
    """Of arange: (start, end, step). Of an index: (size, stop) of each dimension that is cut from its
    start, None of others. Of a tensor that is filled with a number: its sizes."""

    kind: str
    numbers: tuple[Any, ...]


class Counted(NamedTuple):
    """A call of a block, and the dimensions that count tokens: none; one, of which a rank has its part;
    or two, of a mask of all tokens."""

    kind: str
    dims: tuple[int, ...] = ()


class Observer(TorchFunctionMode):
    """Within it the calls are listed."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self._calls = calls
        self.muted = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.muted and (call := call_of(function, args, kwargs)) is not None:
            self._calls.append(call)
        return function(*args, **kwargs)


def call_of(function: Any, args: Any, kwargs: Any) -> Call | None:
    """None for what counts nothing."""
    if function is torch.arange:
        start, end, step = {0: (0, None, 1), 1: (0, *args, 1), 2: (*args, 1)}.get(len(args), args)
        given = kwargs.get("start", start), kwargs.get("end", end), kwargs.get("step", step)
        return Call("arange", given)
    if function in _FILLED:
        sizes = _sizes(args, kwargs)
        return Call("filled", sizes) if len(sizes) > 1 else None
    if function is not Tensor.__getitem__:
        return None
    index = _index(*args)
    if not all(one is None or isinstance(one, (int, slice)) for one in index):
        return None
    dims = iter(args[0].shape)
    pairs = [(next(dims), one) for one in index if one is not None]
    cut = tuple(_cut(size, one) for size, one in pairs)
    return Call("index", cut) if any(cut) else None


_FILLED = (torch.ones, torch.zeros, torch.full)


def _sizes(args: Any, kwargs: Any) -> tuple[Any, ...]:
    first = kwargs.get("size", args[0] if args else ())
    return tuple(first) if isinstance(first, (tuple, list)) else args


def _index(tensor: Tensor, index: Any) -> list[Any]:
    """An index as a list, in which `...` are the slices that it stands for."""
    index = list(index) if isinstance(index, tuple) else [index]
    if not any(one is ... for one in index):
        return index
    at = next(at for at, one in enumerate(index) if one is ...)
    missing = tensor.dim() - sum(one is not None and one is not ... for one in index)
    return [*index[:at], *[slice(None)] * missing, *index[at + 1 :]]


def _cut(size: int, one: Any) -> tuple[int, int] | None:
    cut = isinstance(one, slice) and one.start in (None, 0) and one.step in (None, 1)
    return (size, one.stop) if cut and isinstance(one.stop, int) else None


def counted(whole: Call, here: Call, tokens: int, ranks: int) -> Counted:
    """whole: the same call where the sequence is whole, of so many tokens; here: where a rank has its
    part."""
    if whole.kind != here.kind or len(whole.numbers) != len(here.numbers):
        return Counted(here.kind)

    def of_tokens(all_of_them: Any, own: Any) -> bool:
        numbers = type(all_of_them) is int and type(own) is int
        return numbers and (all_of_them, own) == (tokens, tokens // ranks)

    if here.kind == "arange":
        (start, end, step), (_, own, _) = whole.numbers, here.numbers
        plain = start == 0 and step == 1 and whole.numbers[::2] == here.numbers[::2]
        return Counted("arange", (0,) if plain and of_tokens(end, own) else ())
    pairs = enumerate(zip(whole.numbers, here.numbers, strict=True))
    if here.kind == "filled":
        dims = tuple(dim for dim, (a, b) in pairs if of_tokens(a, b))
        return Counted("filled", dims if len(dims) == 2 else ())
    dims = tuple(dim for dim, (a, b) in pairs if a and b and a[0] == b[0] and of_tokens(a[1], b[1]))
    return Counted("index", dims if len(dims) <= 2 else ())


def of_all_tokens(
    function: Any, args: Any, kwargs: Any, dims: tuple[int, ...], ranks: int, take: Take
) -> Tensor:
    """The call with the tokens of all ranks, of which this one's are taken where one dimension has
    them."""
    if function is torch.arange:
        call = call_of(function, args, kwargs)
        assert call is not None
        others = {name: v for name, v in kwargs.items() if name not in ("start", "end", "step")}
        start, end, step = call.numbers
        return take(torch.arange(start, end * ranks, step, **others), 0)
    if function in _FILLED:
        sizes = [n * (ranks if dim in dims else 1) for dim, n in enumerate(_sizes(args, kwargs))]
        others = {name: value for name, value in kwargs.items() if name != "size"}
        return function(sizes, *(args[1:] if function is torch.full else ()), **others)
    tensor, index = args[0], _index(*args)
    places = [at for at, one in enumerate(index) if one is not None]
    for dim in dims:
        index[places[dim]] = slice(None, index[places[dim]].stop * ranks)
    rows = tensor[tuple(index)]
    if len(dims) > 1:
        return rows
    return take(rows, sum(not isinstance(one, int) for one in index[: places[dims[0]]]))
