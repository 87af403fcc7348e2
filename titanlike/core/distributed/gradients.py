"""Gradients of tied weights (all-reduced over stages), and parameters without a gradient.

Tied weights are one parameter of the model that several stages hold a copy of. The copies are
initialized equal (from the parameter's name), and each step their gradients are summed: locally
where they are on one rank, else by an all-reduce among the pipeline ranks that hold one. So they
take the same updates and stay equal to the last bit.

A parameter that a step's backward does not reach (an expert that no token chose, a layer left out)
has no gradient in one process, and torch's optimizers leave it alone: no update, no weight decay,
no count of the step. The same holds in every layout: a parameter that no microbatch of any rank,
and no copy of a tied weight, has a gradient of is left alone on all ranks; where some have one, the
others add zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.core.distributed.async_reads import on_device
from titanlike.core.distributed.mesh import Mesh, new_group
from titanlike.core.distributed.sharding import is_sharded
from titanlike.core.distributed.transform import Transform
from titanlike.core.torch_private.dtensor import local
from titanlike.core.torch_private.pipeline_stage import GradientSums


class TiedWeights(Transform):
    def __init__(
        self,
        stages: Mapping[str, Sequence[int]],
        place: Sequence[int],
        parameters: Mapping[int, Mapping[str, nn.Parameter]],
        mesh: Mesh,
        timeout: float,
    ) -> None:
        """Find this rank's tied weights, and make the groups that sum their gradients. Collective.

        stages: parameter -> the stages that hold it; place: the pipeline rank of each stage;
        parameters: those of each stage on this rank, by name.
        """
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        # per tied weight: its copies on this rank, and the group of all ranks with one (None: no
        # other rank has one)
        self._copies: list[tuple[list[nn.Parameter], dist.ProcessGroup | None]] = []
        for name in sorted(name for name, holding in stages.items() if len(holding) > 1):
            holders = tuple(sorted({place[stage] for stage in stages[name]}))
            if len(holders) > 1 and holders not in groups:
                groups[holders] = _group(holders, mesh, timeout)
            if mesh.pp_rank in holders:
                copies = [by_name[name] for by_name in parameters.values() if name in by_name]
                self._copies.append((copies, groups.get(holders)))

    @torch.no_grad()
    def after_backward(self) -> None:
        """Sum gradients over the copies of each tied weight. Collective among their ranks."""
        for copies, group in self._copies:
            if not copies[0].requires_grad:
                continue
            grads = [local(p.grad) for p in copies if p.grad is not None]
            if group is None and (not grads or len(copies) < 2):
                continue
            total = torch.stack(grads).sum(0) if grads else torch.zeros_like(local(copies[0]))
            if group is not None:
                dist.all_reduce(total, group=group)
            for parameter in copies:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local(parameter.grad).copy_(total)


def _group(pp_ranks: tuple[int, ...], mesh: Mesh, timeout: float) -> dist.ProcessGroup:
    """Make the group of these pipeline ranks in this rank's pipeline, or of its remaining ranks.

    Each rank makes one group, however many pipelines there are: with the others that hold a copy,
    or with those that hold none, a group that is never used. For torch counts groups, to name the
    next one, and under NCCL may split the communicator of all ranks, in which all take part.
    """
    holds = mesh.pp_rank in pp_ranks
    pipeline = enumerate(mesh.neighbours("pp", mesh.pp))
    return new_group([rank for at, rank in pipeline if (at in pp_ranks) == holds], timeout)


class UnusedParameters:
    """Finds parameters that got no gradient on this rank, and those that got none on any rank."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        canonical: Mapping[str, str],
        mesh: Mesh,
        zero: int,
        sums: Mapping[int, GradientSums],
    ) -> None:
        """canonical: each name of a parameter -> its first name (tied ones have several); zero: see
        `sharding.py`; sums: by stage, for stages whose gradients FSDP does not reduce."""
        self._mesh = mesh
        self._index = {name: place for place, name in enumerate(sorted(set(canonical.values())))}
        self._trained: list[tuple[str, nn.Parameter]] = []  # this rank's, with first names
        self._sharded: set[nn.Parameter] = set()  # those whose gradients FSDP reduces
        self._reached: set[nn.Parameter] = set()  # sharded ones with a gradient in this step
        self._missing: set[str] = set()  # this rank's without a gradient in this step
        self._all_reached: Tensor | None = None  # cached flags for a step with none missing
        for index, stage in stages.items():
            parameters = [*stage.named_parameters()]
            self._trained += [(canonical[name], p) for name, p in parameters if p.requires_grad]
            if mesh.stage_copies > 1 and is_sharded(stage):
                self._sharded |= {p for _, p in parameters}
                if index in sums:
                    sums[index].reached = self._reached
                else:
                    from titanlike.core.torch_private.fsdp import reduce_missing_gradients

                    reduce_missing_gradients(stage, self._reached, zero)

    def flags(self) -> Tensor:
        """Flags after a step's backwards, on this rank's device: for each parameter of the model 1
        if it got a gradient on this rank, else 0. Their sum over all ranks is for `unreached`."""
        reached = {
            name
            for name, p in self._trained
            if (p in self._reached if p in self._sharded else p.grad is not None)
        }
        self._missing = {name for name, _ in self._trained} - reached
        self._reached.clear()
        if self._all_reached is not None and not self._missing:
            return self._all_reached
        flags = torch.zeros(len(self._index))
        flags[[self._index[name] for name in reached]] = 1
        flags = on_device(flags, self._mesh.device)
        if not self._missing:
            self._all_reached = flags
        return flags

    def unreached(self, counts: Tensor) -> dict[nn.Parameter, Tensor]:
        """Return an fp32 flag on the device for each parameter whose gradient here is filled with
        zeros: 1 if it got none on any rank, so that the optimizer must leave it alone.

        counts: the sum over all ranks of what `flags` returned.
        """
        return {
            parameter: (counts[self._index[name]] == 0).float()
            for name, parameter in self._trained
            if name in self._missing and parameter.grad is not None
        }
