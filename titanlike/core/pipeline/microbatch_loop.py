"""Gradient accumulation: run an Order of one unsharded stage in one process as a loop.

There is no communication, so torch's pipeline runtime, and its imports (FSDP and DTensor: a tenth
of the CPU time until the first step), are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from titanlike.core.graph.stage import Stage
from titanlike.core.pipeline.order import Action, Order


class MicrobatchLoop:
    """Runs training and evaluation, with the interface of
    `torch_private.pipeline_runtime.OrderRuntime`."""

    def __init__(
        self,
        order: Order,
        stage: Stage,
        loss: Callable[[Any, Tensor], Tensor],
        fields: Sequence[str],
        begin_microbatch: Callable[[int, int], None],
    ) -> None:
        """order: of one stage, without split backwards; fields: batch fields that the stage reads
        besides "inputs"; begin_microbatch: called with (stage, microbatch) before each forward
        and backward."""
        self._stage, self._loss, self._fields = stage, loss, [*fields]
        self._begin_microbatch = begin_microbatch
        (self._train,), (self._forward,) = order.ranks, order.forward_only().ranks
        self._microbatches = order.microbatches
        # see `OrderRuntime`
        self.on_action: Callable[[Any], None] = lambda _: None
        self.on_queued: Callable[[Any, bool], None] = lambda action, received: None

    def train(self, batch: dict[str, Tensor]) -> list[Tensor]:
        """Run forward and backward on a batch, and return the losses of its microbatches."""
        return self._run(self._train, batch)

    def evaluate(self, batch: dict[str, Tensor]) -> list[Tensor]:
        """Run the forward only, without changing gradients; returns the losses of the microbatches."""
        with torch.no_grad():
            return self._run(self._forward, batch)

    def run_alone(self, index: int, received: Sequence[Tensor], batch: dict[str, Tensor]) -> None:
        """Run the stage on one microbatch: forward, and if gradients are enabled a backward with
        zero gradients."""
        output = self._stage(*received, **{name: batch[name] for name in self._fields})
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        trained = [tensor for tensor in outputs if tensor.requires_grad]
        torch.autograd.backward(trained, [torch.zeros_like(tensor) for tensor in trained])

    def _run(self, actions: Sequence[Action], batch: dict[str, Tensor]) -> list[Tensor]:
        parts = {
            name: batch[name].tensor_split(self._microbatches)
            for name in {"inputs", "targets", *self._fields}
        }
        losses: dict[int, Tensor] = {}
        for action in actions:
            self.on_action(action)
            mb = action.mb
            with record_function(f"PP:{action}"):  # the same name as in torch's runtime
                self._begin_microbatch(0, mb)
                if action.kind == "F":
                    fields = {name: parts[name][mb] for name in self._fields}
                    output = self._stage(parts["inputs"][mb], **fields)
                    losses[mb] = self._loss(output, parts["targets"][mb])
                    del output  # autograd has saved what the backward needs
                else:
                    if losses[mb].requires_grad:
                        losses[mb].backward()
                    losses[mb] = losses[mb].detach()  # frees the autograd graph
            self.on_queued(action, False)
        self.on_action(None)
        return [losses[mb] for mb in range(self._microbatches)]
