"""Sums that are bitwise independent of the order in which terms arrive, for `numerics=exact`.

Floating-point addition is commutative, but not associative: a sum is a function of its terms only
if the tree of its additions is fixed.

- `SumTree` adds tensors in one binary tree over the index of the leaf, in whatever order they come.
- `start_sum` sends each rank of a group a shard of the elements of all nodes (an all-to-all), to be
  added in the same tree.
- `tree_sum` adds the elements of a tensor's last dimension.
- `Bins` adds numbers as integers: there any order gives the same.

All are made of elementwise operations and integers, which no kernel computes differently for
another shape, another alignment or another number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Key = tuple[int, int]  # level, index
T = TypeVar("T")


class SumTree(Generic[T]):
    """Partial sums of leaves 0 .. leaves - 1.

    Node (level, index) is the sum of the leaves from index << level up to (index + 1) << level.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        """add: adds a left and a right value; it may reuse the memory of either."""
        self._leaves, self._add = leaves, add
        self.nodes: dict[Key, T] = {}

    def put(self, key: Key, value: T) -> None:
        """Add a node; its leaves must not be in another. At most log2(leaves) nodes are kept when
        leaves come in order."""
        level, index = key
        while (1 << level) < self._leaves:
            other = index ^ 1
            if (other << level) < self._leaves:  # else it has no leaves
                if (level, other) not in self.nodes:
                    break
                before = self.nodes.pop((level, other))
                pair = (before, value) if other < index else (value, before)
                value = self._add(*pair)
            level, index = level + 1, index >> 1
        self.nodes[level, index] = value

    def take(self) -> dict[Key, T]:
        """Return the nodes and remove them from the tree."""
        nodes, self.nodes = self.nodes, {}
        return nodes

    def root(self) -> T:
        """The sum of all leaves, each of which must have been added."""
        (value,) = self.take().values()
        return value


def keys_of(leaves: int, some: Iterable[int]) -> list[Key]:
    """The keys of the nodes that a tree holds after these leaves were added in order."""
    tree: SumTree[None] = SumTree(leaves, lambda left, right: None)
    for leaf in some:
        tree.put((0, leaf), None)
    return sorted(tree.nodes, key=lambda key: key[1] << key[0])


def leaves_of(rank: int, microbatch: int, *, microbatches: int, peers: int = 1) -> list[int]:
    """The leaves (samples in one unit of summation) that a dp rank computes in a microbatch;
    peers: neighbouring ranks whose leaves count as this rank's."""
    return [index * microbatches + microbatch for index in range(rank * peers, (rank + 1) * peers)]


def start_sum(
    nodes: Mapping[Key, Tensor],
    tree: SumTree[Tensor],
    keys: Sequence[Sequence[Key]],
    group: dist.ProcessGroup | None,
) -> Callable[[], None]:
    """Begin to add this rank's shard of every node of the group's ranks to a tree; the returned
    function waits for the messages and adds. Collective.

    nodes: this rank's nodes, flat tensors [size * shard]; keys: of each rank the keys of its nodes;
    the tree receives tensors [shard]; group: None = this rank alone.
    """
    size = len(keys)
    if group is None or size == 1:
        for key in keys[0]:
            tree.put(key, nodes[key])
        return lambda: None
    own_keys = keys[dist.get_rank(group)]
    parts = [nodes[key].view(size, 1, -1) for key in own_keys]
    sent = parts[0] if len(parts) == 1 else torch.cat(parts, 1)  # [size, nodes, part]
    part = sent.shape[-1]
    counts = [len(rank_keys) * part for rank_keys in keys]
    received = sent.new_empty(sum(counts))
    flat, sizes = sent.flatten(), [len(own_keys) * part] * size
    work = dist.all_to_all_single(received, flat, counts, sizes, group=group, async_op=True)

    def end(_: Tensor = flat) -> None:  # the default keeps the send buffer alive
        assert work is not None
        work.wait()
        for key, value in zip(chain.from_iterable(keys), received.split(part), strict=True):
            tree.put(key, value)

    return end


def tree_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension by pairwise halving: [..., N] -> [...]. Overwrites `values`."""
    while (width := values.shape[-1]) > 1:
        values, right = values.split((width + 1) // 2, -1)
        values.narrow(-1, 0, right.shape[-1]).add_(right)
    return values.squeeze(-1) if values.shape[-1] else values.sum(-1)


# --- the norm of gradients ------------------------------------------------------------------------

_BITS = 8  # a bin counts units of 2^(8 k - 149), the least fp32 number above 0 times 2^(8 k)
_BINS = 32
_NONFINITE = _BINS  # the bin that counts infinities and NaN


def row_squares(tensor: Tensor) -> Tensor:
    """The sum of squares of each row, fp32 [rows]; of a vector, each element's square. FSDP shards
    a parameter by rows, so no row is on two ranks."""
    rows = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(-1, 1)  # of none, too
    return tree_sum(rows.float().square())


def bins_of(values: Tensor) -> Tensor:
    """Convert non-negative fp32 numbers to fixed-point bins, int64 [33], whose sum is exact for up
    to 2^32 numbers of all ranks."""
    bits = values.view(torch.int32).long()
    exponent = bits >> 23 & 0xFF
    mantissa = torch.where(exponent > 0, (bits & 0x7FFFFF) | 0x800000, bits & 0x7FFFFF)
    place = (exponent - 1).clamp(min=0)
    bins, units = place // _BITS, mantissa << place % _BITS
    wrong = exponent == 255
    bins, units = bins.masked_fill(wrong, _NONFINITE), units.masked_fill(wrong, 1)
    return torch.zeros(_BINS + 1, dtype=torch.int64, device=bits.device).index_add_(0, bins, units)


def root_of_bins(bins: Tensor) -> Tensor:
    """The square root of the sum that bins hold, an fp32 scalar; NaN if a term was not finite."""
    places = torch.arange(_BINS, dtype=torch.float64, device=bins.device)
    scaled = bins[:_BINS].double() * torch.exp2(_BITS * places - 149)
    root = tree_sum(scaled).sqrt().float()
    return torch.where(bins[_NONFINITE] > 0, torch.full_like(root, torch.nan), root)
