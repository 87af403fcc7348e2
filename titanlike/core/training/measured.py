"""Step metrics besides loss and gradient norm, one entry of `MEASURED` each.

Their tensors are reduced with the all-reduce that every step has anyway. The results are in the
step's record: metrics.jsonl, W&B, TensorBoard; lists and dicts also as curves in report.html.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from titanlike.core.config.schema import Config
from titanlike.core.training.build import Run


@dataclass(frozen=True)
class Measuring:
    """The inputs of metrics: a step whose forward and backward are launched on this rank."""

    run: Run
    config: Config
    norms: Tensor  # of this rank's shard of each gradient, in the order of `Run.owned`
    terms: Tensor  # see `Pipeline.forward_backward`; only with `metrics.microbatch_losses`

    def squares(self) -> dict[str, Tensor]:
        """Map each parameter of this rank to its contribution to the squared gradient norm: summed
        over all ranks, these are the squares of the full gradients' norms."""
        shares = 1.0 if self.run.shares is None else self.run.shares.to(self.norms.device)
        squares = self.norms.square() * shares / self.config.replicate
        return dict(zip(self.run.owned, squares.unbind(), strict=True))


@dataclass(frozen=True)
class Measured:
    """One metric of a step: a scalar or a vector."""

    name: str  # in the record
    # fp32 on the device, a scalar or a vector of a size that is the same on all ranks
    take: Callable[[Measuring], Tensor]
    reduce: Literal["sum", "max"] = "sum"  # over all ranks
    every: Callable[[Config], int] = lambda config: 1  # steps; 0 = never
    # computes the metric from the reduced tensor, on the device; not called for "max"
    finish: Callable[[Tensor], Tensor] = lambda total: total
    labels: Callable[[Run], Sequence[str]] | None = None  # makes a dict of a vector; None = a list
    apart: bool = False  # the dict's entries are those of the record

    def now(self, config: Config, step: int) -> bool:
        every = self.every(config)
        return every > 0 and step % every == 0

    def shown(self, numbers: Mapping[str, Any], run: Run) -> dict[str, Any]:
        """The metric's entry in a step's record; numbers: the step's metrics by name, on the host."""
        if self.name not in numbers:
            return {}
        value = numbers[self.name]
        if self.labels is not None:
            value = dict(zip(self.labels(run), value, strict=True))
        return value if self.apart else {self.name: value}


def taken(measuring: Measuring, step: int) -> list[tuple[Measured, Tensor]]:
    """Compute this rank's part of each metric that is due in this step."""
    device = measuring.run.mesh.device
    return [
        (entry, entry.take(measuring).to(device, torch.float32))
        for entry in entries(measuring.run)
        if entry.now(measuring.config, step)
    ]


def entries(run: Run) -> list[Measured]:
    """All metrics of a run: `MEASURED`, and the user's custom metrics."""
    if (own := run.own) is None:
        return MEASURED
    custom = Measured(
        "own metrics",
        lambda _: own.take(),
        every=lambda config: config.log_every,
        finish=own.finish,
        labels=lambda _: own.names,
        apart=True,
    )
    return [*MEASURED, custom]


def _losses(total: Tensor) -> Tensor:
    sums, counts = total.view(2, -1)
    return sums / counts.clamp(min=1.0)  # 0 for a microbatch without valid tokens


MEASURED = [
    Measured(
        "microbatch_losses",
        lambda measuring: measuring.terms,
        every=lambda config: int(config.metrics.microbatch_losses),
        finish=_losses,
    )
]
