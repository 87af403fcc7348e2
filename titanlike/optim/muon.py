"""Muon (https://kellerjordan.github.io/posts/muon, arXiv 2502.16982), exact on shards and parts.

torch.optim.Muon works on shards, too, but every product of a matrix is then a message (11 to 16 for
each matrix), all ranks compute, and sums over shards are rounded to bf16 in another order: updates
differ from one process's by 2% to 30%, the more the nearer a gradient is to a low rank. Here the
momentum is kept on the shards, and whole matrices are gathered, in fp32 where the run is.
Test: `test_fences.py::test_torchs_muon_sends_many_messages_and_rounds_otherwise_on_shards`.
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

from titanlike.config.optimizers.muon import Muon as MuonConfig
from titanlike.distributed.placement import Part, Slices, pieces
from titanlike.optim.fused import OptimizerContext, SkippingOptimizer, clip_in_place, select
from titanlike.torch_private.dtensor import local


class Muon(SkippingOptimizer):
    """Updates matrices by their orthogonalized momentum; the arithmetic of torch.optim.Muon."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        config: MuonConfig,
        context: OptimizerContext,
    ) -> None:
        """Collective over the ranks that share the matrices.

        groups: of matrices [rows, columns]; or those of experts, [experts, rows, columns], each a
        matrix of its own: a rank's shard is of whole experts, which it orthogonalizes itself.
        They are orthogonalized, and sent to be, in the dtype of activations.
        """
        parts = context.parts
        settings = {"weight_decay": config.weight_decay, "momentum": config.momentum}
        super().__init__(groups, {"lr": config.lr, **settings})
        matrices = [matrix for group in groups for matrix in group["params"]]
        self._config, self._dtype = config, context.dtype
        flat = [matrix for matrix in matrices if matrix.dim() == 2]
        whole = {matrix: part.shape for matrix, part in parts.items() if part is not None}
        self._shapes = {p: tuple(whole.get(p, p.shape)[-2:]) for p in matrices}
        self._shared = (context.group or shard_group(flat[0])) if flat else None
        self._places: dict[Tensor, list[_Held]] = {}
        if self._shared is not None:
            self._places = _places(flat, parts, self._shared)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Collective over the ranks that share the matrices; a matrix without gradient is left
        alone."""
        assert closure is None
        groups = {p: group for group in self.param_groups for p in group["params"]}
        reached = [p for p in groups if p.grad is not None]
        clip_in_place(reached, self.clip)
        shared = [p for p in reached if p in self._places]
        for parameter in (p for p in reached if p not in self._places):
            update = newton_schulz(self._update(parameter, groups), self._config.ns_steps)
            self._apply(parameter, update, groups[parameter])
        if shared:  # in two messages
            updates = self._orthogonalized(shared, groups)
            for parameter, update in zip(shared, updates, strict=True):
                self._apply(parameter, update, groups[parameter])

    def _apply(self, parameter: nn.Parameter, update: Tensor, group: dict[str, Any]) -> None:
        weights, skip = local(parameter), self.skip_of(parameter)
        rate = group["lr"] * lr_ratio(self._config.adjust_lr, *self._shapes[parameter])
        updated = weights * (1 - group["lr"] * group["weight_decay"])
        updated.add_(update.to(weights.device), alpha=-rate)
        select(skip, weights, updated)

    def _update(self, parameter: nn.Parameter, groups: Mapping[Any, dict[str, Any]]) -> Tensor:
        """What this rank has of the momentum, which is moved on, where it is orthogonalized."""
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
        """What this rank has of the orthogonalized momentum of each; groups: each one's.
        Collective.

        Newton-Schulz needs whole matrices, of which each rank of an FSDP mesh holds some rows, and
        each tensor-parallel one a part of these:

        1. Each matrix gets an owner among the ranks that hold it together, all with equal work.
        2. One all-to-all brings the elements of each matrix to its owner, which orthogonalizes it;
           of ranks that hold the same ones, the first sends them.
        3. Another takes what each rank holds of the results back.

        Two messages whatever the number of matrices, and no rank repeats another's work; replicas
        (HSDP) do the same each, with equal results.
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
        mine = owned[rank]
        received = _exchange(
            [[updates[at] for at in ats if held[at][rank].sends] for ats in owned],
            [[held[at][r].shape for at in mine if held[at][r].sends] for r in ranks],
            group,
            like=updates[0],
        )
        from_rank = [iter(tensors) for tensors in received]
        results = []
        for at in mine:
            whole = updates[0].new_empty(shapes[at])
            for other, part in enumerate(held[at]):
                if part.sends:
                    part.put(next(from_rank[other]), whole)
            results.append(newton_schulz(whole, self._config.ns_steps))
        returned = _exchange(
            [[held[at][r].of(x) for at, x in zip(mine, results, strict=True)] for r in ranks],
            [[held[at][rank].shape for at in ats] for ats in owned],
            group,
            like=updates[0],
        )
        from_rank = [iter(tensors) for tensors in returned]
        owners = {at: rank for rank, ats in enumerate(owned) for at in ats}
        return [next(from_rank[owners[at]]) for at in range(len(matrices))]


def lr_ratio(adjust_lr: str, rows: int, columns: int) -> float:
    """What the learning rate of a matrix is multiplied by."""
    if adjust_lr == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))  # as large an update as AdamW's, on average


# --- matrices that ranks hold together ----------------------------------------------------------

# of the quintic iteration, and the least norm that is divided by: as in torch.optim.Muon
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Nearly the orthogonal factor of a matrix [rows, columns]: singular values of about 1; of each
    of some matrices [number, rows, columns].

    Computed in the dtype of `matrix`. Source: Keller Jordan,
    https://kellerjordan.github.io/posts/muon
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


def _places(
    matrices: Sequence[nn.Parameter],
    parts: Mapping[nn.Parameter, Part | None],
    group: dist.ProcessGroup,
) -> dict[Tensor, list[_Held]]:
    """What each rank of a group has of each matrix; the matrices are the same on all.
    Collective."""
    mine = [(local(matrix).shape, [*pieces(matrix, parts.get(matrix))]) for matrix in matrices]
    of_ranks = [mine] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, mine, group=group)
    held: dict[Tensor, list[_Held]] = {}
    for matrix, *ranks in zip(matrices, *of_ranks, strict=True):
        wholes = [[there for _, there in places] for _, places in ranks]
        held[matrix] = [
            _Held(shape, places, wholes[at] not in wholes[:at])
            for at, (shape, places) in enumerate(ranks)
        ]
    return held


def shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks of FSDP's mesh that hold the rows of a matrix; None where each holds all of
    them."""
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
    """The rank that orthogonalizes each matrix: the costliest first, each to the rank with the
    least work so far. The same on every rank."""
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
