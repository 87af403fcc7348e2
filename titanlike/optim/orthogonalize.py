"""Orthogonalized matrices for Muon, whole or in parts.

Newton-Schulz needs whole matrices, of which each rank of an FSDP mesh holds some rows, and each
tensor-parallel one a part of these:

1. Each matrix gets an owner among the ranks that hold it together, so that all have equal work.
2. One all-to-all brings the elements of each matrix to its owner, which orthogonalizes it; of ranks
   that hold the same ones, the first sends them.
3. Another takes what each rank holds of the results back.

Two messages whatever the number of matrices, and no rank repeats another's work; replicas (HSDP) do
the same each, with equal results.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from titanlike.distributed.placement import Part, Slices, pieces
from titanlike.torch_private.dtensor import local

# of the quintic iteration, and the least norm that is divided by: as in torch.optim.Muon
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Nearly the orthogonal factor of a matrix [rows, columns]: singular values of about 1; of each
    of some matrices [number, rows, columns].

    Computed in the dtype of `matrix`. Source: Keller Jordan, https://kellerjordan.github.io/posts/muon
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if tall else matrix
    if matrix.dim() == 2:
        norm, add_product = wide.norm(), torch.addmm
    else:
        norm, add_product = wide.norm(dim=(-2, -1), keepdim=True), torch.baddbmm
    wide = wide / norm.clamp(min=_LEAST_NORM)
    for _ in range(steps):
        gram = wide @ wide.mT  # [short side, short side]
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        wide = add_product(wide, polynomial, wide, beta=a)
    return wide.mT if tall else wide


@dataclass(frozen=True)
class _Held:
    """What one rank has of a matrix."""

    shape: torch.Size  # of its local tensor
    places: list[tuple[Slices, Slices]]  # see `pieces`
    sends: bool = True  # no rank before it has the same

    def of(self, whole: Tensor) -> Tensor:
        if len(self.places) == 1:
            return whole[self.places[0][1]]
        mine = whole.new_empty(self.shape)
        for here, there in self.places:
            mine[here] = whole[there]
        return mine

    def put(self, mine: Tensor, whole: Tensor) -> None:
        for here, there in self.places:
            whole[there] = mine[here]


class Orthogonalizer:
    """`newton_schulz` of matrices that ranks hold together."""

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        parts: Mapping[nn.Parameter, Part | None],
        group: dist.ProcessGroup | None,
        steps: int,
    ) -> None:
        """matrices: parameters, the same on all ranks of the group, whole, FSDP's shards, or
        tensor-parallel parts of either; group: the ranks that hold them; None = all are whole.
        Collective over the group.
        """
        self._group, self._steps = group, steps
        self.shapes = {matrix: _shape(matrix, parts.get(matrix)) for matrix in matrices}
        self._held: dict[Tensor, list[_Held]] = {}  # by rank
        if group is None:
            return
        mine = [(local(matrix).shape, [*pieces(matrix, parts.get(matrix))]) for matrix in matrices]
        of_ranks = [mine] * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, mine, group=group)
        for matrix, *found in zip(matrices, *of_ranks, strict=True):
            wholes = [[there for _, there in places] for _, places in found]
            self._held[matrix] = [
                _Held(shape, places, wholes[at] not in wholes[:at])
                for at, (shape, places) in enumerate(found)
            ]

    def __call__(self, matrices: Sequence[nn.Parameter], updates: Sequence[Tensor]) -> list[Tensor]:
        """Collective over the group; the results are in the form of the updates.

        matrices: some of those given before; updates: what this rank has of what is orthogonalized
        for each, all of one dtype and device.
        """
        group = self._group
        if group is None:
            return [newton_schulz(update, self._steps) for update in updates]
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        held = [self._held[matrix] for matrix in matrices]
        shapes = [self.shapes[matrix] for matrix in matrices]
        owned: list[list[int]] = [[] for _ in range(size)]  # matrices of each rank
        for matrix, owner in enumerate(deal(shapes, size)):
            owned[owner].append(matrix)
        mine = owned[rank]
        received = _exchange(
            [[updates[at] for at in ats if held[at][rank].sends] for ats in owned],
            [
                [held[at][other].shape for at in mine if held[at][other].sends]
                for other in range(size)
            ],
            updates[0],
            group,
        )
        from_rank = [iter(tensors) for tensors in received]
        results = []
        for at in mine:
            whole = updates[0].new_empty(shapes[at])
            for other, own in enumerate(held[at]):
                if own.sends:
                    own.put(next(from_rank[other]), whole)
            results.append(newton_schulz(whole, self._steps))
        returned = _exchange(
            [
                [held[at][other].of(result) for at, result in zip(mine, results, strict=True)]
                for other in range(size)
            ],
            [[held[at][rank].shape for at in ats] for ats in owned],
            updates[0],
            group,
        )
        of_matrix = {
            at: result
            for ats, results_of_owner in zip(owned, returned, strict=True)
            for at, result in zip(ats, results_of_owner, strict=True)
        }
        return [of_matrix[at] for at in range(len(matrices))]


def _shape(matrix: Tensor, part: Part | None) -> tuple[int, int]:
    """Of the whole one."""
    rows, columns = matrix.shape if part is None else part.shape
    return rows, columns


def shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks of FSDP's mesh that hold the rows of a matrix; None where each holds all of them."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    sharded = [
        dim
        for dim, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    ]
    if not sharded:
        return None
    assert len(sharded) == 1 and parameter.placements[sharded[0]] == Shard(0), (
        f"rows are not sharded over one axis: {parameter.placements}"
    )
    return mesh.get_group(sharded[0])


def deal(shapes: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """The rank that orthogonalizes each matrix: the costliest first, each to the rank with the least
    work so far. The same on every rank."""
    costs = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(shapes)
    for matrix in sorted(range(len(shapes)), key=lambda matrix: -costs[matrix]):
        load, rank = loads[0]
        owners[matrix] = rank
        heapq.heapreplace(loads, (load + costs[matrix], rank))
    return owners


def _exchange(
    tensors: list[list[Tensor]],
    shapes: list[list[torch.Size]],
    like: Tensor,
    group: dist.ProcessGroup,
) -> list[list[Tensor]]:
    """Send tensors to each rank of a group; returns what each sent here, which has these shapes.

    like: a tensor of the dtype and device of all.
    """
    item = like.element_size()
    counts = [[shape.numel() for shape in of_rank] for of_rank in shapes]
    flat = [tensor.flatten() for to_rank in tensors for tensor in to_rank]
    sent = torch.cat(flat) if flat else like.new_empty(0)
    received = like.new_empty(sum(map(sum, counts)))
    dist.all_to_all_single(
        received.view(torch.uint8),  # bytes: not every backend knows bf16
        sent.view(torch.uint8),
        [item * sum(of_rank) for of_rank in counts],
        [item * sum(tensor.numel() for tensor in to_rank) for to_rank in tensors],
        group=group,
    )
    pieces = iter(received.split([count for of_rank in counts for count in of_rank]))
    return [[next(pieces).view(shape) for shape in of_rank] for of_rank in shapes]
