"""One rank's part of the pipeline: batches in, the global loss out.

`pp=1` takes the same road with one stage: its microbatches are gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titanlike.loss import CrossEntropy, valid_tokens
from titanlike.parallel.mesh import Mesh
from titanlike.torch_private import OrderRuntime


class Pipeline:
    """Runs training and evaluation steps of an Order over this rank's stages."""

    def __init__(self, runtime: OrderRuntime, loss: CrossEntropy, mesh: Mesh):
        self._runtime, self._loss, self._mesh = runtime, loss, mesh

    def watch(self, act: Callable[[Any], None]) -> None:
        """Call `act` with each action of the schedule when it begins, with None after the last."""
        self._runtime.watch(act)

    def train(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Forward and backward of this dp rank's part of a batch, int64 [batch / dp, T] each.

        Returns the loss over the GLOBAL batch in nats a valid token and the number of these tokens,
        fp32 scalars, the same on every rank. The gradients are those of that loss, reduced over dp.
        """
        return self._step(self._runtime.train, inputs, targets)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As `train`, forward alone; gradients are left as they are."""
        return self._step(self._runtime.evaluate, inputs, targets)

    def _step(
        self, run: Callable[[Tensor, Tensor], list[Tensor]], inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        mesh = self._mesh
        tokens = valid_tokens(targets).float()
        if mesh.world_size > 1:
            tokens = mesh.sum(tokens) / mesh.pp  # the ranks of one pipeline hold the same batch
        # FSDP averages gradients over dp: dp times each rank's share makes of the average a sum
        self._loss.scale = mesh.dp / tokens
        losses = run(inputs, targets)
        mine = torch.stack(losses).sum().detach() if losses else torch.zeros_like(tokens)
        loss = mesh.sum(mine) if mesh.world_size > 1 else mine
        return loss / mesh.dp, tokens
