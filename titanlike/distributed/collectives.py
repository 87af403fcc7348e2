"""What the ranks of a group exchange in a forward, and its gradients in the backward.

Each exchange is a pair of operations, of which one is the other's gradient. Below: objects that
rank 0 collects and hands out, outside of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.torch_private.dtensor import traced_collective

Operation = Literal["identity", "all_reduce", "all_gather", "reduce_scatter", "split", "all_to_all"]


class Traffic(NamedTuple):
    """What a rank sends to the others of its group."""

    nbytes: int = 0
    messages: int = 0
    beside: int = 0  # of the bytes, those that are under way while the rank attends


@dataclass(eq=False)
class GroupInfo:
    """The ranks that this one exchanges activations with.

    group: None = there are no others here: where tensors are on meta, or units are timed alone,
    only shapes are exchanged.
    """

    size: int
    rank: int
    group: dist.ProcessGroup | None = None

    traffic: Traffic = Traffic()  # where there are no others: what they would be sent

    def count(self, nbytes: int, messages: int = 1, beside: bool = False) -> None:
        """Add to `traffic`."""
        before = self.traffic
        hidden = before.beside + (nbytes if beside else 0)
        self.traffic = Traffic(before.nbytes + nbytes, before.messages + messages, hidden)


def autograd_collective(
    x: Tensor, ranks: GroupInfo, forward: Operation, backward: Operation, dim: int = 0
) -> Tensor:
    """`forward` of x, `backward` of its gradient; dim: along which parts are."""
    return x if ranks.size == 1 else _Collective.apply(x, ranks, forward, backward, dim)


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
    if ranks.group is None or x.is_meta:
        return _shape_alone(operation, x, ranks, dim)
    if torch.compiler.is_compiling():
        return traced_collective(operation, x, dim, ranks.group)
    if operation == "all_to_all":
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(result.view(-1), x.contiguous().view(-1), group=ranks.group)
        return result
    if operation == "all_reduce":
        result = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, group=ranks.group)
        return result
    if operation == "all_gather":
        gathered = x.new_empty(ranks.size, *x.shape)
        _all_gather(gathered.view(-1), x.contiguous().view(-1), group=ranks.group)
        return gathered.movedim(0, dim).flatten(dim, dim + 1)
    assert operation == "reduce_scatter", operation
    parts = x.unflatten(dim, (ranks.size, -1)).movedim(dim, 0).contiguous()
    result = torch.empty_like(parts[0])
    _reduce_scatter(result.view(-1), parts.view(-1), group=ranks.group)
    return result


def _shape_alone(operation: Operation, x: Tensor, ranks: GroupInfo, dim: int) -> Tensor:
    shape = list(x.shape)
    # a rank has its own part already; an all-reduce is a reduce-scatter and an all-gather
    whole = x.nbytes * (ranks.size if operation == "all_gather" else 1)
    messages = 2 if operation == "all_reduce" else 1
    ranks.count(messages * whole * (ranks.size - 1) // ranks.size, messages)
    if operation == "all_gather":
        shape[dim] *= ranks.size
    elif operation == "reduce_scatter":
        shape[dim] //= ranks.size
    return x.new_empty(shape)


# --- objects, through rank 0 ----------------------------------------------------------------------
#
# torch's gather and scatter open two sockets on rank 0 for each other rank: too many where a process
# may have 4,096. In a binary tree a rank has one for each level.


def gather_objects(
    value: Any, group: dist.ProcessGroup | None, among: range | None = None
) -> list[Any]:
    """The values of all ranks of a group, by rank, on its first; elsewhere nothing of use.
    Collective; without a group this process is alone. among: some of its ranks, as if all."""
    first, rank, size = _place(group, among)
    values, step = [value], 1
    while step < size and rank % (2 * step) == 0:
        if rank + step < size:
            received: list[Any] = [None]
            dist.recv_object_list(received, group=group, group_src=first + rank + step)
            values += received[0]
        step *= 2
    if rank:
        dist.send_object_list([values], group=group, group_dst=first + rank - step)
    return values


def scatter_objects(
    values: list[Any], group: dist.ProcessGroup | None, among: range | None = None
) -> Any:
    """This rank's of the values that the first has, by rank; the reverse of `gather_objects`."""
    first, rank, size = _place(group, among)
    step = rank & -rank or 1 << (size - 1).bit_length()
    if rank:
        received: list[Any] = [None]
        dist.recv_object_list(received, group=group, group_src=first + rank - step)
        (values,) = received
    while step := step // 2:
        if rank + step < size:
            dist.send_object_list([values[step:]], group=group, group_dst=first + rank + step)
            values = values[:step]
    return values[0]


def _place(group: dist.ProcessGroup | None, among: range | None) -> tuple[int, int, int]:
    """(the first of the ranks, which of them this is, their number)"""
    if group is None:
        return 0, 0, 1
    among = among or range(dist.get_world_size(group))
    return among.start, dist.get_rank(group) - among.start, len(among)
