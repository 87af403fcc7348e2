"""Gradients of parameters that several tensor-parallel ranks hold: a norm's weight, repeated heads.

Where the ranks computed with different tokens or heads, each has a part of the sum. It is made once a
step, in one message for all of these parameters, and not in each backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.distributed.mesh import Mesh
from titanlike.distributed.placement import Placement
from titanlike.parallel.tp.collectives import TensorRanks
from titanlike.torch_private.dtensor import local


class PartialGradients:
    """Of this rank's parameters."""

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Parameter, Placement]],
        placements: Iterable[Placement],
        ranks: TensorRanks,
        mesh: Mesh,
        timeout: float,
    ) -> None:
        """Collective over all ranks; placements: of all parameters of the model, by which each rank makes
        as many groups: torch counts them, to name the next one."""
        self._ranks = ranks
        found: dict[tuple[str, int], list[nn.Parameter]] = {}
        for parameter, placement in dict(parameters).items():
            if placement.partial != "never" and parameter.requires_grad:
                key = placement.partial, placement.copies
                found.setdefault(key, []).append(parameter)
        counts = {placement.copies for placement in placements if placement.partial != "never"}
        groups = {copies: _group(copies, ranks, mesh, timeout) for copies in sorted(counts)}
        self._of_group = [(when, ps, groups[copies]) for (when, copies), ps in found.items()]

    @torch.no_grad()
    def sum(self) -> None:
        """Collective over the tensor-parallel ranks; a gradient that is missing counts as zeros."""
        for when, parameters, group in self._of_group:
            if when == "sequence" and not self._ranks.sequence:
                continue
            by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradient = local(parameter.grad)
                by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
            for gradients in by_kind.values():
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                dist.all_reduce(flat, group=group)
                sizes = [gradient.numel() for gradient in gradients]
                for gradient, total in zip(gradients, flat.split(sizes), strict=True):
                    gradient.copy_(total.view_as(gradient))


def _group(copies: int, ranks: TensorRanks, mesh: Mesh, timeout: float) -> dist.ProcessGroup:
    """This rank and its neighbours that hold the same elements."""
    if copies == ranks.size:
        assert ranks.group is not None
        return ranks.group
    return dist.new_group(
        mesh.tensor_ranks(copies),
        timeout=timedelta(seconds=timeout),
        use_local_synchronization=True,
    )
