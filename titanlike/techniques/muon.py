"""Muon (https://kellerjordan.github.io/posts/muon, arXiv 2502.16982), exact on sharded matrices.

torch.optim.Muon works on shards, but each matmul of a matrix is then a collective (11 to 16 per
matrix), all ranks compute the same, and sums over shards are rounded to bf16 in a different order:
updates differ from a single process's by 2% to 30%, most for gradients close to low rank. Here
momentum is sharded, and full matrices are gathered, in fp32 if the run's precision is. Test:
`test_fences.py::test_torchs_muon_sends_many_messages_and_rounds_otherwise_on_shards`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from titanlike.core.config.optimizers.muon import Muon as MuonConfig
from titanlike.core.distributed.placement import Part, Slices, pieces
from titanlike.core.optim.fused import OptimizerContext, SkippingOptimizer, clip_in_place, select
from titanlike.core.torch_private.dtensor import local


class Muon(SkippingOptimizer):
    """Updates matrices by their orthogonalized momentum; the arithmetic of torch.optim.Muon."""

    def __init__(
        self, groups: list[dict[str, Any]], config: MuonConfig, context: OptimizerContext
    ) -> None:
        """Collective over the ranks that share the matrices.

        groups: of matrices [rows, columns], or of experts [experts, rows, columns], one matrix
        each. Experts are sharded along dim 0, so a rank orthogonalizes its own without
        communication. Matrices are orthogonalized and communicated in the dtype of activations.
        """
        parts = context.parts
        settings = {"weight_decay": config.weight_decay, "momentum": config.momentum}
        super().__init__(groups, {"lr": config.lr, **settings})
        matrices = [matrix for group in groups for matrix in group["params"]]
        self._config, self._dtype = config, context.dtype
        flat = [matrix for matrix in matrices if matrix.dim() == 2]
        full_shapes = {matrix: part.shape for matrix, part in parts.items() if part is not None}
        self._shapes = {p: tuple(full_shapes.get(p, p.shape)[-2:]) for p in matrices}
        self._shared = (context.group or shard_group(flat[0])) if flat else None
        self._places: dict[Tensor, list[_Held]] = {}
        if self._shared is not None:
            self._places = _places(flat, parts, self._shared)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Collective over the ranks that share the matrices. Matrices without a gradient are not
        updated."""
        assert closure is None
        groups = {p: group for group in self.param_groups for p in group["params"]}
        reached = [p for p in groups if p.grad is not None]
        clip_in_place(reached, self.clip)
        shared = [p for p in reached if p in self._places]
        for parameter in (p for p in reached if p not in self._places):
            update = newton_schulz(self._update(parameter, groups), self._config.ns_steps)
            self._apply(parameter, update, groups[parameter])
        if shared:  # two all-to-alls for all of them
            updates = self._orthogonalized(shared, groups)
            for parameter, update in zip(shared, updates, strict=True):
                self._apply(parameter, update, groups[parameter])

    def _apply(self, parameter: nn.Parameter, update: Tensor, group: dict[str, Any]) -> None:
        weights, skip = local(parameter), self.skip_of(parameter)
        rows, columns = self._shapes[parameter]
        ratio = 0.2 * math.sqrt(max(rows, columns))  # the RMS of the update is then about AdamW's
        if self._config.adjust_lr == "original":
            ratio = math.sqrt(max(1.0, rows / columns))
        rate = group["lr"] * ratio
        updated = weights * (1 - group["lr"] * group["weight_decay"])
        updated.add_(update.to(weights.device), alpha=-rate)
        select(skip, weights, updated)

    def _update(self, parameter: nn.Parameter, groups: Mapping[Any, dict[str, Any]]) -> Tensor:
        """Update the momentum; return this rank's shard of the matrix to orthogonalize."""
        state, momentum = self.state[parameter], groups[parameter]["momentum"]
        assert parameter.grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, mean = local(parameter.grad), local(state["momentum_buffer"])
        select(self.skip_of(parameter), mean, mean.lerp(gradient, 1 - momentum))
        update = gradient.lerp(mean, momentum) if self._config.nesterov else mean
        device = update.device
        if isinstance(parameter, DTensor):  # shards may be in CPU memory
            device = torch.device(parameter.device_mesh.device_type)
        return update.to(device, self._dtype)

    def _orthogonalized(
        self, matrices: Sequence[nn.Parameter], groups: Mapping[Any, dict[str, Any]]
    ) -> list[Tensor]:
        """Orthogonalize the momentum of each matrix and return this rank's shard of it. Collective.

        Newton-Schulz needs full matrices. Each rank of an FSDP mesh has some rows of a matrix, and
        a tensor-parallel rank a part of these:

        1. Each matrix gets an owner among the ranks that share it; owners get equal work.
        2. An all-to-all sends the shards of each matrix to its owner, which orthogonalizes it. If
           several ranks have the same shard, the first one sends it.
        3. A second all-to-all returns each rank's shard of the results.

        That is two collectives whatever the number of matrices, and no matrix is orthogonalized
        twice; HSDP replicas do the same work each, with equal results.
        """
        group = self._shared
        assert group is not None
        rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
        held = [self._places[matrix] for matrix in matrices]
        shapes = [self._shapes[matrix] for matrix in matrices]
        updates = [self._update(matrix, groups) for matrix in matrices]
        owned: list[list[int]] = [[] for _ in ranks]  # matrices of each rank
        for matrix, owner in enumerate(deal(shapes, len(ranks))):
            owned[owner].append(matrix)
        owned_here = owned[rank]
        received = _exchange(
            [[updates[i] for i in indices if held[i][rank].sends] for indices in owned],
            [[held[i][r].shape for i in owned_here if held[i][r].sends] for r in ranks],
            group,
            like=updates[0],
        )
        from_rank = [iter(tensors) for tensors in received]
        results = []
        for i in owned_here:
            full = updates[0].new_empty(shapes[i])
            for other, part in enumerate(held[i]):
                if part.sends:
                    part.put(next(from_rank[other]), full)
            results.append(newton_schulz(full, self._config.ns_steps))
        returned = _exchange(
            [[held[i][r].of(x) for i, x in zip(owned_here, results, strict=True)] for r in ranks],
            [[held[i][rank].shape for i in indices] for indices in owned],
            group,
            like=updates[0],
        )
        from_rank = [iter(tensors) for tensors in returned]
        owners = {i: rank for rank, indices in enumerate(owned) for i in indices}
        return [next(from_rank[owners[i]]) for i in range(len(matrices))]


# --- matrices that several ranks share ----------------------------------------------------------

# coefficients of the quintic iteration, and the lower bound of the norm: as in torch.optim.Muon
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Approximate the orthogonal factor of a matrix [rows, columns], or of each of several [number,
    rows, columns]: singular values become about 1. Computed in the dtype of `matrix`.

    Source: Keller Jordan, https://kellerjordan.github.io/posts/muon
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
    """One rank's shard of a matrix."""

    shape: torch.Size  # of the local tensor
    places: list[tuple[Slices, Slices]]  # see `pieces`
    sends: bool = True  # False if an earlier rank has the same shard

    def of(self, full: Tensor) -> Tensor:
        if len(self.places) == 1:
            return full[self.places[0][1]]
        shard = full.new_empty(self.shape)
        for here, there in self.places:
            shard[here] = full[there]
        return shard

    def put(self, shard: Tensor, full: Tensor) -> None:
        for here, there in self.places:
            full[there] = shard[here]


def _places(
    matrices: Sequence[nn.Parameter],
    parts: Mapping[nn.Parameter, Part | None],
    group: dist.ProcessGroup,
) -> dict[Tensor, list[_Held]]:
    """Return each rank's shard of each matrix; all ranks pass the same matrices. Collective."""
    local_places = [
        (local(matrix).shape, [*pieces(matrix, parts.get(matrix))]) for matrix in matrices
    ]
    by_rank = [local_places] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, local_places, group=group)
    held: dict[Tensor, list[_Held]] = {}
    for matrix, *ranks in zip(matrices, *by_rank, strict=True):
        full_slices = [[there for _, there in places] for _, places in ranks]
        held[matrix] = [
            _Held(shape, places, full_slices[i] not in full_slices[:i])
            for i, (shape, places) in enumerate(ranks)
        ]
    return held


def shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks of the FSDP mesh that share the rows of a matrix; None if it is not sharded."""
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


def deal(shapes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Assign each matrix to the rank that orthogonalizes it: the most expensive first, each to the
    rank with the least work so far. Deterministic, so equal on all ranks."""
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
    group: dist.ProcessGroup,
    like: Tensor,
) -> list[list[Tensor]]:
    """Send `tensors[r]` to rank r of a group by an all-to-all; return what each rank sent here.

    shapes: of the received tensors, by sender; like: a tensor of the dtype and device of all.
    """
    item = like.element_size()
    counts = [[shape.numel() for shape in from_rank] for from_rank in shapes]
    flat = [tensor.flatten() for to_rank in tensors for tensor in to_rank]
    sent = torch.cat(flat) if flat else like.new_empty(0)
    received = like.new_empty(sum(map(sum, counts)))
    dist.all_to_all_single(
        received.view(torch.uint8),  # as bytes: not every backend supports bf16
        sent.view(torch.uint8),
        [item * sum(from_rank) for from_rank in counts],
        [item * sum(tensor.numel() for tensor in to_rank) for to_rank in tensors],
        group=group,
    )
    pieces = iter(received.split([count for from_rank in counts for count in from_rank]))
    return [[next(pieces).view(shape) for shape in from_rank] for from_rank in shapes]
