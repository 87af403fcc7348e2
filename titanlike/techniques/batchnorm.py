"""Batch norm in a pipeline: running statistics of the global batch, updated once a step.

In training each microbatch is normalized by its own mean and variance. The running statistics,
which evaluation uses, must not depend on the layout: they are updated once a step, by the mean and
variance over all microbatches of all data-parallel ranks, as for an unsplit batch (torchgpipe's
DeferredBatchNorm). A skipped step updates nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.core.distributed.mesh import Mesh
from titanlike.core.distributed.placement import freeze_statistics
from titanlike.core.distributed.transform import Transform
from titanlike.core.torch_private.autograd import in_backward
from titanlike.core.torch_private.operators import BatchNorm


def sums_about(center: Tensor, x: Tensor) -> Tensor:
    """Count, sum and sum of squares of the values of x [B, channels, ...] minus `center`, fp64
    [1 + 2 * channels].

    They are added over microbatches and ranks; close to the center a small variance next to a large
    mean loses no digits.
    """
    count = x.numel() // x.shape[1]
    dims = [dim for dim in range(x.dim()) if dim != 1]
    variance, mean = torch.var_mean(x.float(), dims, correction=0)
    offset = mean.double() - center
    squares = count * (variance.double() + offset**2)
    return torch.cat([offset.new_full((1,), count), count * offset, squares])


class _Collects(Transform):
    """Batch norms, and what an update needs of each of their calls in a forward."""

    def __init__(self) -> None:
        self._modules: list[BatchNorm] = []
        self._collected: dict[BatchNorm, list[Any]] = {}
        self._calls: Counter[BatchNorm] = Counter()  # in the current forward
        self._collecting = False

    @contextmanager
    def training(self, tokens: Tensor) -> Iterator[None]:
        """A context whose forwards count in the next update; earlier ones are dropped."""
        self._collected, self._collecting = {module: [] for module in self._modules}, True
        try:
            yield
        finally:
            self._collecting = False

    def on_weights(self, stage: nn.Module) -> None:
        """Stop training forwards from updating the modules' running statistics."""
        norms = freeze_statistics(stage)
        for norm in norms:
            norm.register_forward_pre_hook(self._collect)
        if norms:
            stage.register_forward_pre_hook(lambda *_: self._calls.clear())
        self._modules += norms

    def _collect(self, module: BatchNorm, args: tuple[Tensor, ...]) -> None:
        # not again in a recomputation (activation checkpointing)
        if not (self._collecting and module.training) or in_backward():
            return
        calls, call = self._collected[module], self._calls[module]
        self._calls[module] += 1
        needed = self._needed(module, args[0].detach())
        if call == len(calls):
            calls.append(needed)
        else:
            calls[call] += needed

    def _needed(self, module: BatchNorm, x: Tensor) -> Any:
        """What an update needs of a call with this input; that of microbatches is added."""
        raise NotImplementedError


class BatchNorms(_Collects):
    """The batch norms of this rank's stages that have running statistics: of each of their calls
    the sums over all microbatches."""

    by_microbatch = True

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh

    def in_one_process(self, model: nn.Module) -> Transform:
        return _WholeBatchStatistics(model)

    @torch.no_grad()
    def after_update(self, skip: Tensor | None) -> None:
        """Update the running statistics by the collected sums. Collective over dp."""
        collected = [(module, part) for module, calls in self._collected.items() for part in calls]
        self._collected = {}
        if not collected:
            return
        flat = torch.cat([part for _, part in collected])
        sums = self._mesh.sum_copies(flat).split([len(part) for _, part in collected])
        centers = [_center(module) for module, _ in collected]  # before any call has updated it
        for (module, _), center, part in zip(collected, centers, sums, strict=True):
            count, first, second = part.split([1, len(center), len(center)])
            offset = first / count
            variance = (second - count * offset**2) / (count - 1)
            mean = center + offset
            share: Any = module.momentum
            if module.num_batches_tracked is not None:
                module.num_batches_tracked += 1 if skip is None else (skip == 0).long()
                if share is None:  # torch's cumulative average
                    share = 1.0 / module.num_batches_tracked.double()
            # as nn.BatchNorm updates, with the unbiased variance
            for running, value in ((module.running_mean, mean), (module.running_var, variance)):
                assert running is not None
                updated = running.double() * (1 - share) + value * share
                running.copy_(updated if skip is None else torch.where(skip > 0, running, updated))

    def _needed(self, module: BatchNorm, x: Tensor) -> Tensor:
        return sums_about(_center(module), x)


class _WholeBatchStatistics(_Collects):
    """The running statistics of an unsplit batch, by torch's batch norm: each module is called once
    with the inputs of all microbatches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.on_weights(model)

    @torch.no_grad()
    def after_update(self, skip: Tensor | None) -> None:
        for norm, calls in self._collected.items():
            norm.track_running_stats = True
            for inputs in calls:
                norm(torch.cat(inputs))
            norm.track_running_stats = False

    def _needed(self, module: BatchNorm, x: Tensor) -> list[Tensor]:
        return [x.clone()]  # as later operations may work in place


def _center(module: BatchNorm) -> Tensor:
    """The running mean, which is the same on all ranks, and does not change within a step."""
    assert module.running_mean is not None
    return module.running_mean.double()
