"""Weight gradients that are computed later than input gradients, as zero-bubble schedules want it.

A schedule that splits the backward computes `I`, the gradients of a stage's inputs, as early as it
can, since another rank waits for them, and `W`, those of its weights, where it would be idle. Here
a linear layer's backward computes the gradient of its input alone and queues its input and the
gradient of its output; `W` makes weight gradients of them. Gradients of all other weights (norms,
embeddings, convolutions) are computed in `I`.

torch's own split would go through the graph twice: with activation checkpointing it runs a block's
forward up to nine times. Idea: https://arxiv.org/abs/2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.torch_private.autograd import accumulates, in_functorch, shaped


class DeferredWeightGradients:
    """The linear layers of a stage: their weight gradients wait until they are taken."""

    def __init__(self, stage: nn.Module) -> None:
        """Replace the forward of the stage's linear layers; call it before `fully_shard`."""
        self._queue: list[tuple[Tensor, Tensor, nn.Parameter, nn.Parameter | None]] = []
        for module in stage.modules():
            if type(module) is nn.Linear and "forward" not in vars(module):
                module.forward = partial(self._forward, module)

    def take(self) -> Callable[[], None]:
        """What computes the queued gradients and adds them to `.grad`; the queue is empty then."""
        queued, self._queue = self._queue, []
        return partial(_add_gradients, queued)

    def check_all_taken(self) -> None:
        """Assert that no gradient of a step is left."""
        assert not self._queue, f"{len(self._queue)} weight gradients of the step were not computed"

    def _forward(self, module: nn.Linear, input: Tensor) -> Tensor:
        weight, bias = module.weight, module.bias
        own = [weight] if bias is None else [weight, bias]
        # not of weights that are computed from others or frozen, nor in other dtypes by autocast
        trained = all(isinstance(p, nn.Parameter) and p.requires_grad for p in own)
        elsewhere = torch.is_autocast_enabled(input.device.type) or in_functorch()
        if not trained or elsewhere or not torch.is_grad_enabled():
            return F.linear(input, weight, bias)
        return _Linear.apply(input, weight, bias, self)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight, bias, owner):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inputs, weight)
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.bias, ctx.owner = weight, bias, owner
        # no view: what a custom function returns could not be changed in place then
        rows = F.linear(inputs.reshape(-1, inputs.shape[-1]), weight, bias)
        return shaped(rows, (*inputs.shape[:-1], rows.shape[-1]))

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        if gradient is None:  # its result did not reach the loss: the weight has no gradient
            return None, None, None, None
        inputs, weight = ctx.saved_tensors
        of_inputs = gradient @ weight if ctx.needs_input_grad[0] else None
        gradient = gradient.reshape(-1, gradient.shape[-1])
        inputs = inputs.reshape(-1, inputs.shape[-1])
        if not accumulates(ctx, 1):  # a torch.autograd.grad in the model's forward
            of_bias = None if ctx.bias is None else gradient.sum(0)
            return of_inputs, gradient.t() @ inputs, of_bias, None
        ctx.owner._queue.append((inputs, gradient, ctx.weight, ctx.bias))
        return of_inputs, None, None, None


def _add_gradients(
    queued: list[tuple[Tensor, Tensor, nn.Parameter, nn.Parameter | None]],
) -> None:
    for inputs, gradient, weight, bias in queued:
        _add(weight, gradient.t() @ inputs)
        if bias is not None:
            _add(bias, gradient.sum(0))
    queued.clear()


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    with torch.no_grad():
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
