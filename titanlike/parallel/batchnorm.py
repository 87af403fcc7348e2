"""Batch norm in a pipeline: running statistics of the whole batch, updated once a step.

In training each microbatch is normalized by its own mean and variance. The running statistics, which
evaluation uses, must not depend on the layout: they move once a step, by the mean and variance of
all microbatches of all data-parallel ranks, which are those of the batch before it was split (the
idea of torchgpipe's DeferredBatchNorm). A step that is not applied moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.config.errors import Problem
from titanlike.config.schema import Config, TraceSplit
from titanlike.parallel.mesh import Mesh
from titanlike.torch_private.autograd import in_backward
from titanlike.torch_private.base_classes import BatchNorm, InstanceNorm


def has_statistics(module: nn.Module) -> bool:
    """Whether it is a batch norm that keeps running statistics."""
    return isinstance(module, BatchNorm) and module.running_mean is not None


def leave_statistics(model: nn.Module) -> list[nn.Module]:
    """Let training forwards leave running statistics alone from now on; the batch norms that have some.

    As before they normalize by the batch's statistics in training, by the running ones in evaluation.
    """
    norms = [module for module in model.modules() if has_statistics(module)]
    for norm in norms:
        norm.track_running_stats = False
    return norms


def norm_problems(config: Config, model: nn.Module) -> list[Problem]:
    """Norms that would give statistics that depend on the layout, or hang."""
    problems = []
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            reason = (
                f"its {name} is a SyncBatchNorm, which talks to all ranks in its forward, also to "
                "those of other stages"
            )
            fix = "nn.BatchNorm2d there: its running statistics are those of the whole batch"
        elif isinstance(module, InstanceNorm) and module.running_mean is not None:
            reason = f"its {name} is an instance norm that keeps running statistics"
            fix = "track_running_stats=False there, or a batch norm"
        elif has_statistics(module) and isinstance(config.split, TraceSplit):
            reason = f"the tracer cannot see that {name} is a batch norm and keeps statistics"
            fix = "split=points or split=even, which leave modules whole"
            problems.append(Problem("split", "trace", reason, fix))
            break
        elif has_statistics(module) and config.precision.name == "bf16":
            reason = f"its {name} is a batch norm, whose running statistics are too fine for bf16"
            problems.append(Problem("precision", "bf16", reason, "precision=fp32, or a group norm"))
            break
        else:
            continue
        problems.append(Problem("model.name", config.model.name, reason, fix))
    return problems


def shared_norm_problems(
    config: Config, model: nn.Module, stages: Sequence[Sequence[str]]
) -> list[Problem]:
    """Batch norms that several stages would keep statistics of, each its own.

    stages: the units of each.
    """
    seen: set[str] = set()
    for unit in [name for names in stages for name in names]:
        norms = [norm for norm in model.get_submodule(unit).modules() if has_statistics(norm)]
        if unit in seen and norms:
            reason = f"two stages call {unit}, whose batch norm has one set of running statistics"
            fix = "split=points with both calls in one stage, or a module for each"
            return [Problem("split", config.split.name, reason, fix)]
        seen.add(unit)
    return []


class Moments:
    """Count, mean and sum of squared deviations of what was added, fp64 [channels]."""

    def __init__(self, like: Tensor) -> None:
        self.count = 0
        self.mean = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
        self.squares = torch.zeros_like(self.mean)

    def add(self, x: Tensor) -> None:
        """x: [B, channels, ...]. Chan's formula: E[x^2] - E[x]^2 would lose the digits of a small
        variance beside a large mean."""
        count = x.numel() // x.shape[1]
        dims = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(x.float(), dims, correction=0)
        total = self.count + count
        away = mean.double() - self.mean
        self.mean += away * (count / total)
        self.squares += variance.double() * count + away**2 * (self.count * count / total)
        self.count = total

    def sums_about(self, center: Tensor) -> Tensor:
        """Count, sum and sum of squares of what was added, less a center: [1 + 2 * channels].

        They add up over ranks; near to the center they do so without losing digits.
        """
        away = self.mean - center
        count = self.mean.new_full((1,), self.count)
        return torch.cat([count, self.count * away, self.squares + self.count * away**2])


class BatchNorms:
    """The batch norms of this rank's stages that have running statistics."""

    def __init__(self, stages: Iterable[nn.Module], mesh: Mesh) -> None:
        """From now on training forwards leave the modules' running statistics alone."""
        self._mesh = mesh
        self._modules: list[nn.Module] = []
        # of each module, one for each of its calls in a forward, over all microbatches
        self._moments: dict[nn.Module, list[Moments]] = {}
        self._calls: dict[nn.Module, int] = {}  # in the forward that runs
        self._collecting = False
        for stage in stages:
            own = leave_statistics(stage)
            for module in own:
                module.register_forward_pre_hook(self._look)
            if own:
                stage.register_forward_pre_hook(self._beginning(own))
            self._modules += own

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Forwards within belong to the next update; what was collected before is forgotten."""
        self._moments = {module: [] for module in self._modules}
        self._collecting = True
        try:
            yield
        finally:
            self._collecting = False

    @torch.no_grad()
    def update(self) -> None:
        """Move the running statistics by what was collected. Collective over dp."""
        collected = [(module, m) for module in self._modules for m in self._moments.get(module, ())]
        self._moments = {}
        if not collected:
            return
        # all ranks have the same running mean: it serves as a center, and is moved afterwards
        centers = [module.running_mean.to(m.mean) for module, m in collected]
        pairs = zip(collected, centers, strict=True)
        parts = [m.sums_about(center) for (_, m), center in pairs]
        flat = torch.cat(parts)
        for axis in ("shard", "replicate"):
            if self._mesh.dp > 1:
                self._mesh.sum(flat, axis)
        sums = flat.split([len(part) for part in parts])
        for (module, _), center, part in zip(collected, centers, sums, strict=True):
            count, first, second = part.split([1, len(center), len(center)])
            away = first / count
            _move(module, center + away, (second - count * away**2) / (count - 1))

    def _look(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        # a module that is recomputed (activation checkpointing) runs again in the backward
        if not (self._collecting and module.training) or in_backward():
            return
        moments, call = self._moments[module], self._calls[module]
        self._calls[module] += 1
        if call == len(moments):
            moments.append(Moments(module.running_mean))
        with torch.no_grad():
            moments[call].add(args[0].detach())

    def _beginning(self, own: list[nn.Module]) -> Callable[[nn.Module, Any], None]:
        def hook(*_: Any) -> None:
            self._calls |= dict.fromkeys(own, 0)

        return hook


def _move(module: nn.Module, mean: Tensor, variance: Tensor) -> None:
    """One step of the running statistics, as nn.BatchNorm makes it. variance: unbiased."""
    share: Any = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked += 1
        if share is None:  # the average of all steps
            share = 1.0 / module.num_batches_tracked.double()
    for running, value in ((module.running_mean, mean), (module.running_var, variance)):
        running.copy_(running.double() * (1 - share) + value * share)
