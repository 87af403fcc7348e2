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


class Moments:
    """Count, mean and sum of squared deviations of the added values, fp64 [channels]."""

    def __init__(self, like: Tensor) -> None:
        self.count = 0
        self.mean = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
        self.squares = torch.zeros_like(self.mean)

    def add(self, x: Tensor) -> None:
        """x: [B, channels, ...]. Chan's formula: E[x^2] - E[x]^2 loses the digits of a small
        variance next to a large mean."""
        count = x.numel() // x.shape[1]
        dims = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(x.float(), dims, correction=0)
        total = self.count + count
        offset = mean.double() - self.mean
        self.mean += offset * (count / total)
        self.squares += variance.double() * count + offset**2 * (self.count * count / total)
        self.count = total

    def sums_about(self, center: Tensor) -> Tensor:
        """Count, sum and sum of squares of the values minus `center`: [1 + 2 * channels].

        They are summed over ranks; close to the center no digits are lost.
        """
        offset = self.mean - center
        count = self.mean.new_full((1,), self.count)
        return torch.cat([count, self.count * offset, self.squares + self.count * offset**2])


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


class BatchNorms(_Collects):
    """The batch norms of this rank's stages that have running statistics: of each of their calls
    the moments over all microbatches."""

    by_microbatch = True

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh

    def in_one_process(self, model: nn.Module) -> Transform:
        return _WholeBatchStatistics(model)

    def on_weights(self, stage: nn.Module) -> None:
        """Stop training forwards from updating the modules' running statistics."""
        norms = freeze_statistics(stage)
        for norm in norms:
            norm.register_forward_pre_hook(self._collect)
        if norms:
            stage.register_forward_pre_hook(lambda *_: self._calls.clear())
        self._modules += norms

    @torch.no_grad()
    def after_update(self, skip: Tensor | None) -> None:
        """Update the running statistics by the collected moments. Collective over dp."""
        collected = [(module, m) for module, moments in self._collected.items() for m in moments]
        self._collected = {}
        if not collected:
            return
        # the running mean, the same on all ranks, serves as the center of the sums
        centers = [_running_mean(module).to(m.mean) for module, m in collected]
        parts = [m.sums_about(center) for (_, m), center in zip(collected, centers, strict=True)]
        flat = torch.cat(parts)
        sums = self._mesh.sum_copies(flat).split([len(part) for part in parts])
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

    def _collect(self, module: BatchNorm, args: tuple[Tensor, ...]) -> None:
        # not again in a recomputation (activation checkpointing)
        if not (self._collecting and module.training) or in_backward():
            return
        moments, call = self._collected[module], self._calls[module]
        self._calls[module] += 1
        if call == len(moments):
            moments.append(Moments(_running_mean(module)))
        with torch.no_grad():
            moments[call].add(args[0].detach())


class _WholeBatchStatistics(_Collects):
    """The running statistics of an unsplit batch, by torch's batch norm: each module is called once
    with the inputs of all microbatches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._modules += freeze_statistics(model)
        model.register_forward_pre_hook(lambda *_: self._calls.clear())
        for norm in self._modules:
            norm.register_forward_pre_hook(self._collect)

    @torch.no_grad()
    def after_update(self, skip: Tensor | None) -> None:
        for norm, calls in self._collected.items():
            norm.track_running_stats = True
            for inputs in calls:
                norm(torch.cat(inputs))
            norm.track_running_stats = False

    def _collect(self, norm: BatchNorm, args: tuple[Tensor, ...]) -> None:
        if not self._collecting or in_backward():  # where blocks are recomputed
            return
        calls, call = self._collected[norm], self._calls[norm]
        self._calls[norm] += 1
        if call == len(calls):
            calls.append([])
        # a copy, as later operations may work in place
        calls[call].append(args[0].detach().clone())


def _running_mean(module: BatchNorm) -> Tensor:
    assert module.running_mean is not None
    return module.running_mean
