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

from titanlike.parallel.mesh import Mesh
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
        for stage in stages:
            parameters = [*stage.named_parameters()]
            self._trained += [(canonical[name], p) for name, p in parameters if p.requires_grad]
            if isinstance(stage, FSDPModule) and mesh.dp > 1:
                self._sharded |= {p for _, p in parameters}
                reduce_missing_gradients(stage, self._reached, zero)

    def count_missing(self) -> Tensor:
        """How many parameters of this rank have no gradient after the backwards of a step; to be
        summed over all ranks, for `drop_unreached`."""
        found = {name for name, parameter in self._trained if self._has_gradient(parameter)}
        self._missing = {name for name, _ in self._trained} - found
        self._reached.clear()
        return torch.full((), float(len(self._missing)), device=self._mesh.device)

    def _has_gradient(self, parameter: nn.Parameter) -> bool:
        if parameter in self._sharded:
            return parameter in self._reached
        return parameter.grad is not None

    def drop_unreached(self, missing: Tensor) -> None:
        """Drop the gradients, all zero, of the parameters that no rank reached.

        missing: the sum over all ranks of what `count_missing` returned. Collective unless it is 0.
        """
        if self._mesh.world_size == 1 or not missing.item():
            return
        flags = torch.zeros(len(self._index), dtype=torch.uint8)
        flags[[self._index[n] for n, _ in self._trained if n not in self._missing]] = 1
        reached = self._mesh.max(flags.to(self._mesh.device)).tolist()
        for name, parameter in self._trained:
            if not reached[self._index[name]]:
                parameter.grad = None
