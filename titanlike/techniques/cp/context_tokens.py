"""The tokens of a context-parallel rank, and the calls by which a block counts tokens.

With n ranks the sequence is cut into 2n chunks, and rank r has chunks r and 2n - 1 - r: in causal
attention, where later queries attend to more keys, all ranks then compute the same share (arXiv
2407.21783, section 3.3.2). With ulysses each rank attends over full sequences, and has chunk r of
n.

A block that makes its positions (`torch.arange(x.shape[1])`, `self.table[:x.shape[1]]`) would count
from zero on each rank. To find these calls, the forward runs on meta with full sequences and with a
rank's tokens (`context_parallel.py`): the arguments of such calls scale with the length. In a run
the same calls, by their index in the block, count all ranks' tokens, and keep the rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from titanlike.core.distributed.collectives import GroupInfo

Method = Literal["gather", "ulysses", "ring"]


@dataclass(eq=False)
class ContextRanks(GroupInfo):
    """The context-parallel group of this rank."""

    method: Method = "gather"

    @property
    def balanced(self) -> bool:
        """Whether a rank has one chunk of the sequence's beginning and one of its end."""
        return self.method != "ulysses"

    @property
    def multiple(self) -> int:
        """Sequence lengths must be a multiple of this."""
        return 2 * self.size if self.balanced else self.size

    def starts(self, tokens: int) -> tuple[list[int], int]:
        """(where this rank's chunks begin, tokens per chunk) in a sequence of `tokens`."""
        chunk = tokens // self.multiple
        numbers = [self.rank, 2 * self.size - 1 - self.rank] if self.balanced else [self.rank]
        return [number * chunk for number in numbers], chunk

    def take(self, x: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a full sequence along `dim`, in order."""
        starts, chunk = self.starts(x.shape[dim])
        parts = [x.narrow(dim, start, chunk) for start in starts]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()

    def in_order(self, gathered: Tensor, dim: int) -> Tensor:
        """The full sequence from all ranks' tokens, concatenated along `dim`."""
        if not self.balanced:
            return gathered
        ranks = gathered.unflatten(dim, (self.size, 2, -1))
        first, second = ranks.select(dim + 1, 0), ranks.select(dim + 1, 1).flip(dim)
        return torch.cat([first, second], dim).flatten(dim, dim + 1)


# --- calls that count tokens ---------------------------------------------------------------------

Take = Callable[[Tensor, int], Tensor]  # (tensor of all tokens, dimension) -> this rank's
_FILLED = (torch.ones, torch.zeros, torch.full)


class Call(NamedTuple):
    """A call that may count tokens. numbers: of arange (start, end, step); of an index (size, stop)
    of each dimension that is sliced from its start, None for others; of a filled tensor its sizes.
    """

    kind: str
    numbers: tuple[Any, ...]


class Counted(NamedTuple):
    """A call of a block, and its dimensions that count tokens: none; one, which is sharded; or two,
    of a full mask."""

    kind: str
    dims: tuple[int, ...] = ()


def call_of(function: Any, args: Any, kwargs: Any) -> Call | None:
    """The call, if it may count tokens, else None."""
    if function is torch.arange:
        start, end, step = {0: (0, None, 1), 1: (0, *args, 1), 2: (*args, 1)}.get(len(args), args)
        ends = kwargs.get("start", start), kwargs.get("end", end), kwargs.get("step", step)
        return Call("arange", ends)
    if function in _FILLED:
        sizes = _sizes(args, kwargs)
        return Call("filled", sizes) if len(sizes) > 1 else None
    if function is not Tensor.__getitem__:
        return None
    index = _index(*args)
    if not all(item is None or isinstance(item, (int, slice)) for item in index):
        return None
    cuts = zip(args[0].shape, (item for item in index if item is not None), strict=False)
    numbers = tuple(_cut(size, item) for size, item in cuts)
    return Call("index", numbers) if any(numbers) else None


def _sizes(args: Any, kwargs: Any) -> tuple[Any, ...]:
    first = kwargs.get("size", args[0] if args else ())
    return tuple(first) if isinstance(first, (tuple, list)) else args


def _index(tensor: Tensor, index: Any) -> list[Any]:
    """An index as a list, with `...` expanded to slices."""
    index = list(index) if isinstance(index, tuple) else [index]
    position = next((position for position, item in enumerate(index) if item is ...), None)
    if position is None:
        return index
    missing = tensor.dim() - sum(item is not None and item is not ... for item in index)
    return [*index[:position], *[slice(None)] * missing, *index[position + 1 :]]


def _cut(size: int, at: Any) -> tuple[int, int] | None:
    cut = isinstance(at, slice) and at.start in (None, 0) and at.step in (None, 1)
    return (size, at.stop) if cut and isinstance(at.stop, int) else None


def counted(whole: Call, here: Call, tokens: int, ranks: int) -> Counted:
    """Compare a call with full sequences of `tokens` (whole) and with a rank's part (here)."""
    if whole.kind != here.kind or len(whole.numbers) != len(here.numbers):
        return Counted(here.kind)

    def of_tokens(all_tokens: Any, local: Any) -> bool:
        ints = type(all_tokens) is int and type(local) is int
        return ints and (all_tokens, local) == (tokens, tokens // ranks)

    if here.kind == "arange":
        (start, end, step), (_, local_end, _) = whole.numbers, here.numbers
        plain = start == 0 and step == 1 and whole.numbers[::2] == here.numbers[::2]
        return Counted("arange", (0,) if plain and of_tokens(end, local_end) else ())
    pairs = enumerate(zip(whole.numbers, here.numbers, strict=True))
    if here.kind == "filled":
        dims = tuple(dim for dim, (a, b) in pairs if of_tokens(a, b))
        return Counted("filled", dims if len(dims) == 2 else ())
    dims = tuple(dim for dim, (a, b) in pairs if a and b and a[0] == b[0] and of_tokens(a[1], b[1]))
    return Counted("index", dims if len(dims) <= 2 else ())


def with_all_tokens(
    function: Any, args: Any, kwargs: Any, dims: tuple[int, ...], ranks: int, take: Take
) -> Tensor:
    """Call the function with all ranks' tokens; with one token dimension, keep this rank's."""
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
    dims_of_items = [position for position, item in enumerate(index) if item is not None]
    for dim in dims:
        index[dims_of_items[dim]] = slice(None, index[dims_of_items[dim]].stop * ranks)
    rows = tensor[tuple(index)]
    if len(dims) > 1:
        return rows
    return take(rows, sum(not isinstance(item, int) for item in index[: dims_of_items[dims[0]]]))
