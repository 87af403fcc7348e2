"""What the ranks of a group exchange in a forward, and its gradients in the backward.

Each exchange is a pair of operations, of which one is the other's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.torch_private.dtensor import traced_collective

Operation = Literal["copy", "all_reduce", "all_gather", "reduce_scatter", "take", "all_to_all"]


class Exchanged(NamedTuple):
    """What a rank sends to the others of its group."""

    nbytes: int = 0
    messages: int = 0
    beside: int = 0  # of the bytes, those that are under way while the rank attends


@dataclass(eq=False)
class Peers:
    """The ranks that this one exchanges activations with.

    group: None = there are no others here: where tensors are on meta, or units are timed alone, only
    shapes are exchanged.
    """

    size: int
    rank: int
    group: dist.ProcessGroup | None = None

    exchanged: Exchanged = Exchanged()  # where there are no others: what they would be sent

    def count(self, nbytes: int, messages: int = 1, beside: bool = False) -> None:
        """Of what is sent where there is nobody."""
        bytes_, times, hidden = self.exchanged
        hidden += nbytes if beside else 0
        self.exchanged = Exchanged(bytes_ + nbytes, times + messages, hidden)


def exchange(x: Tensor, peers: Peers, there: Operation, back: Operation, dim: int) -> Tensor:
    """`there` in the forward, `back` of the gradient in the backward; dim: along which parts are."""
    return _Exchange.apply(x, peers, there, back, dim)


# newer versions of torch (2.13) have other names for them
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_to_all = dist.all_to_all_single


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, peers: Peers, there: Operation, back: Operation, dim: int
    ) -> Tensor:
        ctx.peers, ctx.back, ctx.dim = peers, back, dim
        return x.view_as(x) if there == "copy" else _run(there, x, peers, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        back = ctx.back
        result = gradient if back == "copy" else _run(back, gradient, ctx.peers, ctx.dim)
        return result, None, None, None, None


def _run(operation: Operation, x: Tensor, peers: Peers, dim: int) -> Tensor:
    if operation == "take":
        return _take(x, peers, dim)
    if peers.group is None or x.is_meta:
        return _shape_alone(operation, x, peers, dim)
    if torch.compiler.is_compiling():
        return traced_collective(operation, x, dim, peers.group)
    if operation == "all_to_all":
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        _all_to_all(result.view(-1), x.contiguous().view(-1), group=peers.group)
        return result
    if operation == "all_reduce":
        result = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, group=peers.group)
        return result
    if operation == "all_gather":
        gathered = x.new_empty(peers.size, *x.shape)
        _all_gather(gathered.view(-1), x.contiguous().view(-1), group=peers.group)
        return gathered.movedim(0, dim).flatten(dim, dim + 1)
    assert operation == "reduce_scatter", operation
    parts = x.unflatten(dim, (peers.size, -1)).movedim(dim, 0).contiguous()
    result = torch.empty_like(parts[0])
    _reduce_scatter(result.view(-1), parts.view(-1), group=peers.group)
    return result


def _take(x: Tensor, peers: Peers, dim: int) -> Tensor:
    size = x.shape[dim] // peers.size
    return x.narrow(dim, peers.rank * size, size).contiguous()


def _shape_alone(operation: Operation, x: Tensor, peers: Peers, dim: int) -> Tensor:
    shape = list(x.shape)
    # a rank has its own part already; an all-reduce is a reduce-scatter and an all-gather
    whole = x.nbytes * (peers.size if operation == "all_gather" else 1)
    messages = 2 if operation == "all_reduce" else 1
    peers.count(messages * whole * (peers.size - 1) // peers.size, messages)
    if operation == "all_gather":
        shape[dim] *= peers.size
    elif operation == "reduce_scatter":
        shape[dim] //= peers.size
    return x.new_empty(shape)
