"""Tied weights: one parameter of the model that several stages hold a copy of.

The copies are initialized equal (from the parameter's name), and each step their gradients are
summed: locally where they are on one rank, else by an all-reduce among the pipeline ranks that hold
one. So they take the same updates and stay equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from titanlike.distributed.mesh import Mesh
from titanlike.distributed.transform import Transform
from titanlike.torch_private.dtensor import local


@dataclass(frozen=True)
class Tied(Transform):
    """The tied weights of this rank."""

    # of each the copies on this rank, and the group of the ranks with others (None: no others)
    copies: list[tuple[list[nn.Parameter], dist.ProcessGroup | None]]

    @torch.no_grad()
    def after_backward(self) -> None:
        """Give every copy the sum of all copies' gradients. Collective among their ranks."""
        for parameters, group in self.copies:
            if not parameters[0].requires_grad:
                continue
            mine = [local(p.grad) for p in parameters if p.grad is not None]
            if group is None and (not mine or len(parameters) < 2):
                continue
            total = torch.stack(mine).sum(0) if mine else torch.zeros_like(local(parameters[0]))
            if group is not None:
                dist.all_reduce(total, group=group)
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local(parameter.grad).copy_(total)


def tie(
    stages: Mapping[str, Sequence[int]],
    place: Sequence[int],
    local: Mapping[int, Mapping[str, nn.Parameter]],
    mesh: Mesh,
    timeout: float,
) -> Tied:
    """Find this rank's tied weights, and make the groups that sum their gradients. Collective.

    stages: parameter -> the stages that hold it; place: the pipeline rank of each stage;
    local: this rank's stages -> their parameters by name.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    copies = []
    for name in sorted(name for name, holding in stages.items() if len(holding) > 1):
        holders = tuple(sorted({place[stage] for stage in stages[name]}))
        if len(holders) > 1 and holders not in groups:
            groups[holders] = _group(holders, mesh, timeout)
        if mesh.pp_rank in holders:
            mine = [parameters[name] for parameters in local.values() if name in parameters]
            copies.append((mine, groups.get(holders)))
    return Tied(copies)


def _group(pp_ranks: tuple[int, ...], mesh: Mesh, timeout: float) -> dist.ProcessGroup | None:
    """A group of these pipeline ranks in this rank's pipeline; None where it is not among them.

    Each rank makes one group, however many pipelines there are: with the others that hold a copy,
    or with those that hold none, a group that is never used. For torch counts groups, to name the
    next one, and under NCCL may split the communicator of all ranks, in which all take part.
    """
    holds = mesh.pp_rank in pp_ranks
    members = pp_ranks if holds else tuple(r for r in range(mesh.pp) if r not in pp_ranks)
    ranks = mesh.pipeline_ranks()
    group = dist.new_group(
        [ranks[member] for member in members],
        timeout=timedelta(seconds=timeout),
        use_local_synchronization=True,  # the other pipelines' groups are none of this rank's
    )
    return group if holds else None
