"""Orthogonalized matrices for Muon, whole or in shards.

Newton-Schulz needs whole matrices, of which each rank of an FSDP mesh holds some rows:

1. Each matrix gets an owner among the ranks of the shard axis, so that all have equal work.
2. One all-to-all brings the rows of each matrix to its owner, which orthogonalizes it.
3. Another takes each rank's rows of the results back.

Two messages whatever the number of matrices, and no rank repeats another's work; replicas (HSDP) do
the same each, with equal results.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

# of the quintic iteration, and the least norm that is divided by: as in torch.optim.Muon
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Nearly the orthogonal factor of a matrix [rows, columns]: singular values of about 1.

    Computed in the dtype of `matrix`. Source: Keller Jordan, https://kellerjordan.github.io/posts/muon
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    wide = wide / wide.norm().clamp(min=_LEAST_NORM)
    for _ in range(steps):
        gram = wide @ wide.T  # [short side, short side]
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.addmm(wide, polynomial, wide, beta=a)
    return wide.T if tall else wide


def orthogonalize(
    parameters: Sequence[Tensor], updates: Sequence[Tensor], steps: int
) -> list[Tensor]:
    """`newton_schulz` of each update. Collective over the ranks that share the parameters.

    parameters: the matrices, whole or FSDP's shards. updates: this rank's rows of what is
    orthogonalized for each, all of one dtype and device; the results are the same rows.
    """
    group = shard_group(parameters[0])
    if group is None:
        return [newton_schulz(update, steps) for update in updates]
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    shapes = [(parameter.shape[0], parameter.shape[1]) for parameter in parameters]
    rows = [_rows_of_ranks(shape[0], size) for shape in shapes]
    owned: list[list[int]] = [[] for _ in range(size)]  # matrices of each rank
    for matrix, owner in enumerate(deal(shapes, size)):
        owned[owner].append(matrix)

    def shape(matrix: int, of: int) -> tuple[int, int]:
        """Of the rows that a rank has."""
        return rows[matrix][of], shapes[matrix][1]

    mine = owned[rank]
    received = _exchange(
        [[updates[matrix] for matrix in matrices] for matrices in owned],
        [[shape(matrix, other) for matrix in mine] for other in range(size)],
        updates[0],
        group,
    )
    results = [
        newton_schulz(torch.cat([received[other][at] for other in range(size)]), steps).split(
            rows[matrix]
        )
        for at, matrix in enumerate(mine)
    ]
    returned = _exchange(
        [[result[other] for result in results] for other in range(size)],
        [[shape(matrix, rank) for matrix in matrices] for matrices in owned],
        updates[0],
        group,
    )
    of_matrix = {
        matrix: result
        for matrices, results_of_owner in zip(owned, returned, strict=True)
        for matrix, result in zip(matrices, results_of_owner, strict=True)
    }
    return [of_matrix[matrix] for matrix in range(len(parameters))]


def shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold the rows of a matrix; None where each holds all of them."""
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


def _rows_of_ranks(rows: int, ranks: int) -> list[int]:
    """As torch.chunk deals rows: the last ranks may have fewer, or none."""
    each = -(-rows // ranks)
    return [max(0, min(each, rows - rank * each)) for rank in range(ranks)]


def _exchange(
    tensors: list[list[Tensor]],
    shapes: list[list[tuple[int, int]]],
    like: Tensor,
    group: dist.ProcessGroup,
) -> list[list[Tensor]]:
    """Send tensors to each rank of a group; returns what each sent here, which has these shapes.

    like: a tensor of the dtype and device of all.
    """
    item = like.element_size()
    counts = [[rows * columns for rows, columns in of_rank] for of_rank in shapes]
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
