"""Parameters that a step's backward does not reach: an expert that no token chose, a layer left out.

In one process such a parameter has no gradient, and torch's optimizers leave it alone: no update, no
weight decay, no count of the step. The same holds in every layout: a parameter that no microbatch of
any rank, and no copy of a tied weight, has a gradient of is left alone on all ranks; where some have
one, the others add zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlike.distributed.async_scalars import on_device
from titanlike.distributed.mesh import Mesh
from titanlike.torch_private.fsdp import reduce_missing_gradients


class Reached:
    """Which of this rank's parameters have a gradient, and which have one on any rank."""

    def __init__(
        self,
        stages: Iterable[nn.Module],
        canonical: Mapping[str, str],
        mesh: Mesh,
        zero: int,
    ) -> None:
        """canonical: name of each parameter of the model -> its first, for tied ones; zero: see
        `sharding.py`."""
        self._mesh = mesh
        self._index = {name: at for at, name in enumerate(sorted(set(canonical.values())))}
        self._trained: list[tuple[str, nn.Parameter]] = []  # of this rank, by first name
        self._sharded: set[nn.Parameter] = set()  # whose gradients FSDP reduces
        self._reached: set[nn.Parameter] = set()  # of those, by a backward of this step
        self._missing: set[str] = set()  # of this rank, in this step
        self._all_reached: Tensor | None = None  # the flags of a step in which nothing is missing
        for stage in stages:
            parameters = [*stage.named_parameters()]
            self._trained += [(canonical[name], p) for name, p in parameters if p.requires_grad]
            if isinstance(stage, FSDPModule) and mesh.stage_copies > 1:
                self._sharded |= {p for _, p in parameters}
                reduce_missing_gradients(stage, self._reached, zero)

    def flags(self) -> Tensor:
        """After the backwards of a step: for each parameter of the whole model 1 if one of this rank
        reached it, else 0; to be summed over all ranks, for `unreached`. On this rank's device."""
        found = {name for name, parameter in self._trained if self._has_gradient(parameter)}
        self._missing = {name for name, _ in self._trained} - found
        self._reached.clear()
        if self._all_reached is None or self._missing:
            flags = torch.zeros(len(self._index))
            flags[[self._index[name] for name in found]] = 1
            flags = on_device(flags, self._mesh.device)
            if self._missing:
                return flags
            self._all_reached = flags
        return self._all_reached

    def _has_gradient(self, parameter: nn.Parameter) -> bool:
        if parameter in self._sharded:
            return parameter in self._reached
        return parameter.grad is not None

    def unreached(self, counts: Tensor) -> dict[nn.Parameter, Tensor]:
        """Of each parameter that this rank did not reach, but has a gradient (of zeros) for: a flag on
        the device, fp32, 1 if no rank reached it. An optimizer leaves it alone then.

        counts: the sum over all ranks of what `flags` returned.
        """
        return {
            parameter: (counts[self._index[name]] == 0).float()
            for name, parameter in self._trained
            if name in self._missing and parameter.grad is not None
        }
