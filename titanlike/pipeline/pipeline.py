"""One rank's part of the pipeline: batches in, the global loss out.

`pp=1` is a pipeline of one stage: its microbatches are gradient accumulation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titanlike.graph.model_graph import fields_of, shapes
from titanlike.parallel.batchnorm import BatchNorms
from titanlike.parallel.tied import Tied
from titanlike.pipeline.runtime import RuntimeFactory
from titanlike.torch_private.pipeline_runtime import OrderRuntime

Batch = dict[str, Tensor]
MOST_SHAPES = 32  # of batches whose runtimes, with their message buffers, are cached


class Pipeline:
    """Runs training and evaluation steps of an Order over this rank's stages.

    Batches may differ in shape from step to step (all ranks of a pipeline have the same batch):
    each shape has a runtime of its own, made at its first batch and cached.
    """

    def __init__(self, factory: RuntimeFactory, tied: Tied, norms: BatchNorms) -> None:
        self._factory, self._tied, self._norms = factory, tied, norms
        self._loss, self._mesh = factory.loss, factory.mesh
        self._runtimes: OrderedDict[Any, OrderRuntime] = OrderedDict()
        self._on_action: Callable[[Any], None] | None = None

    def on_action(self, callback: Callable[[Any], None]) -> None:
        """Call back with each action of the schedule when it begins, with None after the last."""
        self._on_action = callback
        for runtime in self._runtimes.values():
            runtime.on_action(callback)

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
            self._runtimes[key] = self._factory.make(fields)
            if self._on_action is not None:
                self._runtimes[key].on_action(self._on_action)
            if len(self._runtimes) > MOST_SHAPES:
                self._runtimes.popitem(last=False)
        for stage in self._factory.stages.values():
            stage.select_forward(key)
        return self._runtimes[key]

    def _step(self, run: Callable[[Batch], list[Tensor]], batch: Batch) -> tuple[Tensor, Tensor]:
        mesh = self._mesh
        count = self._terms(batch).float()
        if mesh.world_size > 1:
            count = mesh.sum(count) / mesh.pp  # the ranks of one pipeline hold the same batch
        # FSDP averages gradients over dp: dp times each rank's share makes of the average a sum
        self._loss.scale = mesh.dp / count
        losses = run(batch)
        mine = torch.stack(losses).sum().detach() if losses else torch.zeros_like(count)
        loss = mesh.sum(mine) if mesh.world_size > 1 else mine
        return loss / mesh.dp, count

    def _terms(self, batch: Batch) -> Tensor:
        """How many terms the loss of this rank's batch has."""
        targets, model_graph = batch["targets"], self._factory.model_graph
        count = self._loss.count(targets)
        if count is None:
            size = model_graph.microbatch_size
            shape = (size, *targets.shape[1:])
            output = model_graph.meta_output(fields_of(batch), True)
            meta = torch.empty(shape, dtype=targets.dtype, device="meta")
            terms = self._loss.terms(output, meta) * (len(targets) // size)
            count = torch.tensor(terms, device=targets.device)
        return count
