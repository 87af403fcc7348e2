"""Weight gradients computed later than input gradients, for zero-bubble schedules.

A schedule with a split backward computes `I`, the gradients of a stage's inputs, as early as
possible, since another rank waits for them, and `W`, those of its weights, when the rank would
idle. Here a linear layer's backward computes only its input's gradient, and queues its input and
its output's gradient; `W` computes weight gradients from these. Gradients of other weights (norms,
embeddings, convolutions) are computed in `I`.

torch's split would walk through the graph twice: with activation checkpointing it runs a block's
forward up to nine times. Idea: https://arxiv.org/abs/2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.core.distributed.placement import SHARES_GATHERED, adds_bias_later
from titanlike.core.distributed.transform import Transform
from titanlike.core.torch_private.autograd import accumulates, add_gradient, in_functorch, shaped


class DeferWeightGradients(Transform):
    """Defers weight gradients to W, in these stages."""

    def __init__(self, stages: Collection[int], device: torch.device) -> None:
        self._stages, self._device = stages, device
        self._of: dict[int, DeferredWeightGradients] = {}

    def on_stage(self, index: int, stage: nn.Module, units: Sequence[str]) -> None:
        if index in self._stages:
            self._of[index] = DeferredWeightGradients(stage, self._device)

    def weight_gradients(self, stage: int) -> Callable[[], Callable[[], None]] | None:
        return self._of[stage].take if stage in self._of else None

    def after_backward(self) -> None:
        for deferred in self._of.values():
            deferred.check_all_taken()


class Waiting(NamedTuple):
    """Operands of deferred weight gradients of layers with the same input."""

    kept: Tensor  # the input, or a rank's shard of it
    # output gradient [rows, out], weight, bias
    products: Sequence[tuple[Tensor, Tensor, Tensor | None]]
    # launches the input's all-gather; the result waits for it
    gather: Callable[[Tensor], Callable[[], Tensor]] | None = None


class DeferredWeightGradients:
    """A stage's linear layers whose weight gradients are queued until `take`."""

    def __init__(self, stage: nn.Module, device: torch.device) -> None:
        """Replace the forward of the stage's linear layers; call it before `fully_shard`.

        device: where the stage will run.
        """
        alive = torch.zeros(1, device=device, requires_grad=True)
        self.queue: list[Waiting] = []
        # linear layers -> their previous forwards, None = the class's
        self._layers: dict[nn.Linear, Any] = {}
        for module in stage.modules():
            replaced = vars(module).get("forward")
            shares = SHARES_GATHERED in vars(module)  # its forward calls `linear`
            known = replaced is None or shares or adds_bias_later(module)
            if type(module) is nn.Linear and known:
                self._layers[module] = replaced
                # not a closure: each block with different functions would be compiled separately
                patched: Any = module
                patched.forward = replaced if shares else MethodType(linear, module)
                vars(module)[_OWNER], vars(module)[_ALIVE] = self, alive

    def undo(self) -> None:
        """Restore the linear layers' forwards."""
        layer: Any
        for layer, before in self._layers.items():
            for name in ("forward", _OWNER, _ALIVE):
                del vars(layer)[name]
            if before is not None:
                layer.forward = before

    def take(self) -> Callable[[], None]:
        """Empty the queue; return a function that computes and adds its gradients."""
        queued, self.queue = self.queue, []
        if compiled := _take_waiting():
            layers = {_address(layer.weight, _bias(layer)): layer for layer in self._layers}
            for kept, gradients, gathers in compiled:
                pairs = [(gradient, layers[address]) for gradient, address in gradients]
                gather = vars(pairs[0][1])[GATHER] if gathers else None
                products = [(gradient, layer.weight, _bias(layer)) for gradient, layer in pairs]
                queued.append(Waiting(kept, products, gather))
        queued.reverse()

        def begun() -> Any:
            if not queued:
                return None
            stored, products, gather = queued.pop()
            return products, (lambda: stored) if gather is None else gather(stored)

        def add() -> None:
            ahead = begun()
            while ahead is not None:
                products, finish = ahead
                inputs = finish()
                ahead = begun()  # its all-gather overlaps these matmuls
                for gradient, weight, bias in products:
                    add_gradient(weight, gradient.t() @ inputs)
                    if bias is not None:
                        add_gradient(bias, gradient.sum(0))

        return add

    def check_all_taken(self) -> None:
        """Assert that no queued gradient of a step is left."""
        left = len(self.queue) + len(_take_waiting())
        assert not left, f"{left} weight gradients of the step were not computed"


# attributes of a linear layer; GATHER: launches the all-gather of its sharded input
GATHER = "_tp_gather"
_OWNER, _ALIVE = "weight_gradients", "weight_gradients_alive"


def _bias(layer: nn.Linear) -> nn.Parameter | None:
    """The bias that the layer adds itself."""
    return None if adds_bias_later(layer) else layer.bias


def owner_of(layer: nn.Module) -> DeferredWeightGradients | None:
    """The queue that a layer's weight gradient goes to, or None."""
    return vars(layer).get(_OWNER)


def needs_weight_gradients(layer: nn.Linear, input: Tensor) -> bool:
    """Whether the backward of a call gives the layer's own parameters their gradients: they are not
    frozen, not computed from others (parametrizations), and not cast by autocast."""
    weights = [layer.weight] if _bias(layer) is None else [layer.weight, layer.bias]
    kind = input.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)  # raises for meta
    plain = all(isinstance(p, nn.Parameter) and p.requires_grad for p in weights)
    return plain and not autocast and torch.is_grad_enabled()


def linear(module: nn.Linear, input: Tensor) -> Tensor:
    """The forward of a linear layer whose weight gradient may be deferred."""
    weight, bias = module.weight, _bias(module)
    if not hasattr(module, _OWNER) or not needs_weight_gradients(module, input):
        return F.linear(input, weight, bias)
    if torch.compiler.is_compiling():
        if weight.numel() == 0:  # without an address
            return F.linear(input, weight, bias)
        # prevents common-subexpression elimination. Symptom without it: a layer that is called
        # twice with the same input has half its weight gradient
        call = torch.empty(0, device=input.device)
        alive = getattr(module, _ALIVE)
        return torch.ops.titanlike.linear_queueing(input, weight, bias, call, alive)
    if in_functorch():
        return F.linear(input, weight, bias)
    return _Linear.apply(input, weight, bias, vars(module)[_OWNER])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, owner: Any
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.bias, ctx.owner = weight, bias, owner
        # not a view: a custom function's view cannot be changed in place
        rows = F.linear(inputs.reshape(-1, inputs.shape[-1]), weight, bias)
        return shaped(rows, (*inputs.shape[:-1], rows.shape[-1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:  # the output did not reach the loss
            return None, None, None, None
        inputs, weight = ctx.saved_tensors
        input_gradient = gradient @ weight if ctx.needs_input_grad[0] else None
        gradient = gradient.reshape(-1, gradient.shape[-1])
        inputs = inputs.reshape(-1, inputs.shape[-1])
        if not accumulates(ctx, 1):  # torch.autograd.grad in the model's forward
            bias_gradient = None if ctx.bias is None else gradient.sum(0)
            return input_gradient, gradient.t() @ inputs, bias_gradient, None
        ctx.owner.queue.append(Waiting(inputs, [(gradient, ctx.weight, ctx.bias)]))
        return input_gradient, None, None, None


def sum_of_products(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The gradient [rows, in] of an input that several layers share, summed in place."""
    rows = gradients[0] @ weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        torch.addmm(rows, gradient, weight, out=rows)
    return rows


# --- deferred weight gradients in a compiled block ------------------------------------------------
#
# A compiled backward runs no Python code except its operators. So the layer is a custom operator,
# and so is its input's gradient, which appends the operands of the weight's gradient to a list,
# with the weight's address. Its arguments are tensors only: a number that differs between layers
# would give each block its own graph. torch caches compiled graphs on disk by operators' names:
# an operator that changes gets a new name.

Address = tuple[int, int]
# of the last backward: (inputs [rows, in] or a rank's shard, [(output gradient [rows, out], address
# of the layer)], whether it is a shard). Module-level, as an operator takes no objects
_waiting: list[tuple[Tensor, list[tuple[Tensor, Address]], bool]] = []


def _address(weight: Tensor, bias: Tensor | None) -> Address:
    """Identifies a layer; layers that share a weight may have different biases."""
    return weight.data_ptr(), 0 if bias is None else bias.data_ptr()


def _take_waiting() -> list[tuple[Tensor, list[tuple[Tensor, Address]], bool]]:
    taken = _waiting[:]
    _waiting.clear()
    return taken


@torch.library.custom_op("titanlike::linear_queueing", mutates_args=())
def _linear(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, call: Tensor, alive: Tensor
) -> Tensor:
    """Compute F.linear; its backward gives no gradients of weight and bias.

    alive: a scalar that requires a gradient, from outside of the compiled function; its gradient
    means nothing. Symptom without it: if nobody needs the input's gradient, the compiled backward
    drops the operator, and the weight has no gradient.
    """
    return F.linear(inputs, weight, bias)


@_linear.register_fake
def _(inputs: Tensor, weight: Tensor, bias: Tensor | None, call: Tensor, alive: Tensor) -> Tensor:
    return inputs.new_empty((*inputs.shape[:-1], weight.shape[0]))


@torch.library.custom_op("titanlike::linear_queueing_backward", mutates_args=())
def _linear_backward(
    gradient: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, call: Tensor
) -> tuple[Tensor, Tensor]:
    # copies: inductor reuses the memory of both after this call. Symptom without: the loss is right
    # and gradients are wrong
    rows = inputs.reshape(-1, inputs.shape[-1]).clone()
    gradient_rows = gradient.reshape(-1, gradient.shape[-1]).clone()
    _waiting.append((rows, [(gradient_rows, _address(weight, bias))], False))
    return gradient @ weight, gradient.new_empty(1)


@_linear_backward.register_fake
def _(
    gradient: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, call: Tensor
) -> tuple[Tensor, Tensor]:
    return gradient.new_empty(inputs.shape), gradient.new_empty(1)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    input_gradient, alive_gradient = torch.ops.titanlike.linear_queueing_backward(
        gradient, *ctx.saved_tensors
    )
    return input_gradient, None, None, None, alive_gradient


_linear.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("titanlike::gather_queueing_backward", mutates_args=())
def _gather_backward(
    part: Tensor, gradients: list[Tensor], weights: list[Tensor], biases: list[Tensor | None]
) -> Tensor:
    """Compute the gradient [rows, in] of the linear layers' gathered input; part: this rank's
    shard."""
    addresses = map(_address, weights, biases)
    operands = [(g.clone(), address) for g, address in zip(gradients, addresses, strict=True)]
    _waiting.append((part.clone(), operands, True))
    return sum_of_products(gradients, weights)


@_gather_backward.register_fake
def _(
    part: Tensor, gradients: list[Tensor], weights: list[Tensor], biases: list[Tensor | None]
) -> Tensor:
    return gradients[0].new_empty((len(gradients[0]), weights[0].shape[1]))
