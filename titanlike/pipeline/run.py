"""One rank's part of the pipeline: batches in, the global loss out.

`pp=1` takes the same road with one stage: its microbatches are gradient accumulation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titanlike.graph.model_graph import Fields, fields_of, shapes
from titanlike.graph.stage import Stage
from titanlike.optim.loss import Loss
from titanlike.parallel.batchnorm import BatchNorms
from titanlike.parallel.mesh import Mesh
from titanlike.parallel.tied import Tied
from titanlike.torch_private.pipelining import OrderRuntime

Batch = dict[str, Tensor]
MOST_SHAPES = 32  # of batches, whose message buffers are kept


class Pipeline:
    """Runs training and evaluation steps of an Order over this rank's stages.

    Batches may differ in shape from step to step (all ranks of a pipeline have the same batch):
    each shape has a runtime of its own, which is made when it is first met and kept.
    """

    def __init__(
        self,
        stages: list[Stage],
        runtime_for: Callable[[Fields], OrderRuntime],
        loss: Loss,
        mesh: Mesh,
        tied: Tied,
        norms: BatchNorms,
        count: Callable[[Batch], Tensor],
    ) -> None:
        """runtime_for: teaches the stages batches of such fields, and makes the runtime for them;
        count: how many terms the loss of this rank's batch has.
        """
        self._stages, self._make = stages, runtime_for
        self._loss, self._mesh, self._tied, self._norms = loss, mesh, tied, norms
        self._count = count
        self._runtimes: OrderedDict[Any, OrderRuntime] = OrderedDict()
        self._act: Callable[[Any], None] | None = None

    def watch(self, act: Callable[[Any], None]) -> None:
        """Call `act` with each action of the schedule when it begins, with None after the last."""
        self._act = act
        for runtime in self._runtimes.values():
            runtime.watch(act)

    def train(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Forward and backward of this dp rank's part of a batch: "inputs", "targets" and what else
        the model takes, [batch / dp, ...] each.

        Returns the loss over the GLOBAL batch, a mean over what the loss counts (valid tokens), and
        that count, fp32 scalars, the same on every rank. The gradients are those of that loss,
        reduced over dp and over the copies of tied weights.
        """
        with self._norms.collecting():
            result = self._step(self._runtime(batch).train, batch)
        self._tied.add_gradients()
        return result

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """As `train`, forward alone; gradients are left as they are."""
        return self._step(self._runtime(batch).evaluate, batch)

    def _runtime(self, batch: Batch) -> OrderRuntime:
        fields = fields_of(batch)
        key = shapes(fields)
        if key in self._runtimes:
            self._runtimes.move_to_end(key)
        else:
            self._runtimes[key] = self._make(fields)
            if self._act is not None:
                self._runtimes[key].watch(self._act)
            if len(self._runtimes) > MOST_SHAPES:
                self._runtimes.popitem(last=False)
        for stage in self._stages:
            stage.select_forward(key)
        return self._runtimes[key]

    def _step(self, run: Callable[[Batch], list[Tensor]], batch: Batch) -> tuple[Tensor, Tensor]:
        mesh = self._mesh
        count = self._count(batch).float()
        if mesh.world_size > 1:
            count = mesh.sum(count) / mesh.pp  # the ranks of one pipeline hold the same batch
        # FSDP averages gradients over dp: dp times each rank's share makes of the average a sum
        self._loss.scale = mesh.dp / count
        losses = run(batch)
        mine = torch.stack(losses).sum().detach() if losses else torch.zeros_like(count)
        loss = mesh.sum(mine) if mesh.world_size > 1 else mine
        return loss / mesh.dp, count
