"""Differentiable collectives for the ranks that share layers or sequences; object collectives.

Each is a pair of operations: one in the forward, the other on its gradient in the backward. Below:
gather and scatter of Python objects through rank 0, outside of steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.core.torch_private.dtensor import traced_collective

Operation = Literal[
    "identity", "all_reduce", "all_gather", "reduce_scatter", "split", "all_to_all", "largest"
]


class Traffic(NamedTuple):
    """Communication volume of a rank in its group."""

    nbytes: int = 0
    messages: int = 0
    beside: int = 0  # the part of nbytes that is sent while the rank computes


@dataclass(eq=False)
class GroupInfo:
    """A process group whose ranks communicate activations.

    group: None where there is no process group, as on meta or when units are timed alone: a
    collective then only computes the shape of its result, and its traffic is counted.
    """

    size: int
    rank: int
    group: dist.ProcessGroup | None = None

    traffic: Traffic = Traffic()  # counted where `group` is None

    def count(self, nbytes: int, messages: int = 1, beside: bool = False) -> None:
        """Add to `traffic`."""
        before = self.traffic
        hidden = before.beside + (nbytes if beside else 0)
        self.traffic = Traffic(before.nbytes + nbytes, before.messages + messages, hidden)


def autograd_collective(
    x: Tensor, ranks: GroupInfo, forward: Operation, backward: Operation, dim: int = 0
) -> Tensor:
    """Apply `forward` to x, and `backward` to its gradient; dim: the dimension that is sharded."""
    return x if ranks.size == 1 else _Collective.apply(x, ranks, forward, backward, dim)


def largest(x: Tensor, ranks: GroupInfo | None) -> Tensor:
    """The largest of all ranks' elements, one by one; without gradient. None = this rank's."""
    return x if ranks is None or ranks.size == 1 else _run("largest", x, ranks, 0)


# newer versions of torch (2.13) have other names for them
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ranks: GroupInfo, forward: Operation, backward: Operation, dim: int
    ) -> Tensor:
        ctx.ranks, ctx.operation, ctx.dim = ranks, backward, dim
        return x.view_as(x) if forward == "identity" else _run(forward, x, ranks, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        operation = ctx.operation
        identity = operation == "identity"
        result = gradient if identity else _run(operation, gradient, ctx.ranks, ctx.dim)
        return result, None, None, None, None


def _run(operation: Operation, x: Tensor, ranks: GroupInfo, dim: int) -> Tensor:
    if operation == "split":
        size = x.shape[dim] // ranks.size
        return x.narrow(dim, ranks.rank * size, size).contiguous()
    if operation in ("all_gather", "reduce_scatter"):
        return begin_collective(operation, x, ranks, dim, beside=False)()
    if ranks.group is None or x.is_meta:
        return _shape_alone(operation, x, ranks, dim)
    if torch.compiler.is_compiling():
        return traced_collective(operation, x, dim, ranks.group)
    if operation in ("all_reduce", "largest"):
        result = x.clone(memory_format=torch.contiguous_format)
        reduction = dist.ReduceOp.SUM if operation == "all_reduce" else dist.ReduceOp.MAX
        dist.all_reduce(result, reduction, group=ranks.group)
        return result
    assert operation == "all_to_all", operation
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(result.view(-1), x.contiguous().view(-1), group=ranks.group)
    return result


def begin_collective(
    operation: Operation, x: Tensor, ranks: GroupInfo, dim: int, beside: bool = True
) -> Callable[[], Tensor]:
    """Begin an all-gather or a reduce-scatter, without gradient; what waits for its result.

    beside: the rank computes until it waits.
    """
    if ranks.group is None or x.is_meta:
        shape = _shape_alone(operation, x, ranks, dim, beside)
        return lambda: shape
    if torch.compiler.is_compiling():
        traced = traced_collective(operation, x, dim, ranks.group)
        return lambda: traced
    if operation == "all_gather":
        result = x.new_empty(ranks.size, *x.shape)
        work = _all_gather(result.view(-1), x.contiguous().view(-1), ranks.group, beside)
    else:
        parts = x.unflatten(dim, (ranks.size, -1)).movedim(dim, 0).contiguous()
        result = torch.empty_like(parts[0])
        work = _reduce_scatter(result.view(-1), parts.view(-1), group=ranks.group, async_op=beside)

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        gathered = operation == "all_gather"
        return result.movedim(0, dim).flatten(dim, dim + 1) if gathered else result

    return finish


def _shape_alone(
    operation: Operation, x: Tensor, ranks: GroupInfo, dim: int, beside: bool = False
) -> Tensor:
    shape = list(x.shape)
    # a rank has its own part already; an all-reduce is a reduce-scatter and an all-gather
    whole = x.nbytes * (ranks.size if operation == "all_gather" else 1)
    messages = 2 if operation in ("all_reduce", "largest") else 1
    ranks.count(messages * whole * (ranks.size - 1) // ranks.size, messages, beside)
    if operation == "all_gather":
        shape[dim] *= ranks.size
    elif operation == "reduce_scatter":
        shape[dim] //= ranks.size
    return x.new_empty(shape)


# --- objects, through rank 0 ----------------------------------------------------------------------
#
# torch's gather and scatter open two sockets on rank 0 for each other rank: too many where a process
# may have 4,096. In a binary tree a rank opens one per level.


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Gather the values of all ranks to the group's first rank; other ranks get nothing useful.
    Collective. group: None = this process alone."""
    rank, size = _place(group)
    values, step = [value], 1
    while step < size and rank % (2 * step) == 0:
        if rank + step < size:
            received: list[Any] = [None]
            dist.recv_object_list(received, group=group, group_src=rank + step)
            values += received[0]
        step *= 2
    if rank:
        dist.send_object_list([values], group=group, group_dst=rank - step)
    return values


def scatter_objects(values: list[Any], group: dist.ProcessGroup | None) -> Any:
    """Scatter the first rank's values, one for each rank; the reverse of `gather_objects`."""
    rank, size = _place(group)
    step = rank & -rank or 1 << (size - 1).bit_length()
    if rank:
        received: list[Any] = [None]
        dist.recv_object_list(received, group=group, group_src=rank - step)
        (values,) = received
    while step := step // 2:
        if rank + step < size:
            dist.send_object_list([values[step:]], group=group, group_dst=rank + step)
            values = values[:step]
    return values[0]


def distinct_values(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The different ones among the values of all ranks, as `repr` tells, in order of rank; the same
    on all ranks. Each is sent by the first rank that has it. Collective."""
    if group is None:
        return [value]
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    own = torch.tensor([int.from_bytes(digest, "little", signed=True)])
    every = own.new_empty(dist.get_world_size(group))
    _all_gather(every, own, group)
    every = every.tolist()
    values = []
    for rank in (every.index(each) for each in dict.fromkeys(every)):
        found = [value]
        dist.broadcast_object_list(found, group=group, group_src=rank)
        values += found
    return values


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return (this rank in the group, the number of its ranks)."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
