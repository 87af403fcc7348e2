"""A linear layer in a compiled block whose weight gradient is computed later.

A compiled backward runs no Python code but its operators. So the layer is an operator of our own,
and so is the gradient of its input, which leaves what the weight's gradient takes in a list, and
the weight's address beside it. Its arguments are tensors alone: of another number for each layer
there would be a graph for each block. torch keeps compiled graphs on disk by the operators' names:
operators that change get other names.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Address = tuple[int, int]
DEFERRED_LINEAR = "titanlike.linear_queueing"  # the name of the layer's operator
# (inputs, gradient of the outputs, address of the layer) of the backward that ran last: an operator
# knows no object that could hold it
_waiting: list[tuple[Tensor, Tensor, Address]] = []


def address(weight: Tensor, bias: Tensor | None) -> Address:
    """Of a layer; layers that share a weight may have a bias each."""
    return weight.data_ptr(), 0 if bias is None else bias.data_ptr()


def take_waiting() -> list[tuple[Tensor, Tensor, Address]]:
    """What the backwards since the last call have left: [rows, in], [rows, out], `address`."""
    taken = _waiting[:]
    _waiting.clear()
    return taken


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, alive: Tensor) -> Tensor:
    """As F.linear, for a compiled forward; its backward gives no gradients of weight and bias.

    alive: one number that requires a gradient, from outside of the compiled function; its gradient
    means nothing. Symptom without it: where nobody needs the gradient of the inputs the compiled
    backward leaves the operator out, and the weight has no gradient.
    """
    # torch makes one of equal calls, but never of two torch.empty. Symptom without it: a layer that
    # is called twice with the same input has half its weight gradient
    call = torch.empty(0, device=inputs.device)
    return torch.ops.titanlike.linear_queueing(inputs, weight, bias, call, alive)


@torch.library.custom_op("titanlike::linear_queueing", mutates_args=())
def _linear(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, call: Tensor, alive: Tensor
) -> Tensor:
    return F.linear(inputs, weight, bias)


@_linear.register_fake
def _(inputs: Tensor, weight: Tensor, bias: Tensor | None, call: Tensor, alive: Tensor) -> Tensor:
    return inputs.new_empty((*inputs.shape[:-1], weight.shape[0]))


@torch.library.custom_op("titanlike::linear_queueing_backward", mutates_args=())
def _linear_backward(
    gradient: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, call: Tensor
) -> tuple[Tensor, Tensor]:
    # copies: inductor gives the memory of both to other values after this call. Symptom without:
    # the loss is right and gradients are wrong
    rows = inputs.reshape(-1, inputs.shape[-1]).clone()
    of_rows = gradient.reshape(-1, gradient.shape[-1]).clone()
    _waiting.append((rows, of_rows, address(weight, bias)))
    return gradient @ weight, gradient.new_empty(1)


@_linear_backward.register_fake
def _(
    gradient: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, call: Tensor
) -> tuple[Tensor, Tensor]:
    return gradient.new_empty(inputs.shape), gradient.new_empty(1)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    of_inputs, of_alive = torch.ops.titanlike.linear_queueing_backward(gradient, *ctx.saved_tensors)
    return of_inputs, None, None, None, of_alive


_linear.register_autograd(_backward, setup_context=_setup)
