"""Inputs of linear layers gathered along the sequence, and gathered again in the backward, except in
compiled blocks; in float8 where every layer that takes them would round them alike.

Layers that share a gathered input (q, k and v; gate and up) need it for their weight gradients.
Only the rank's shard is saved (arXiv 2205.05198, section 4.2.2): one autograd node, the gather,
computes the gradients of all these layers. Its backward gathers the shard again while it computes
the input's gradient, which it reduce-scatters while it computes the weights'. Weight gradients
deferred to `W` (`weight_gradients.py`) save only the shard. A compiled block overlaps nothing with a
collective: without deferred gradients it saves what it has gathered.

An input that only layers with float8's tensorwise scales take is cast before it is gathered: half the
bytes, and the bits of casting it afterwards, as its scale is that of all ranks' tokens.

A layer's own backward leaves all of this to the gather: the gather returns, for each layer, a
tensor without memory with the shape of its result, which carries the result's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, islice
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from titanlike.core.distributed.collectives import autograd_collective, begin_collective
from titanlike.core.distributed.placement import (
    IN_BF16,
    ONLY_LAYERS,
    SHARES_GATHERED,
    forward_in_bf16,
    in_float8,
)
from titanlike.core.torch_private.autograd import accumulates, in_functorch, shaped
from titanlike.techniques.tp.ranks import TensorRanks
from titanlike.techniques.weight_gradients import (
    GATHER,
    Waiting,
    linear,
    needs_weight_gradients,
    owner_of,
    sum_of_products,
)

# attribute of a gathered tensor: (ranks, version, result of each layer, what was gathered in float8)
_RESULTS = "tp_results"


def share(layer: nn.Module, index: int, ranks: TensorRanks) -> None:
    """Let a linear layer use a gather; index: among its layers."""
    patched: Any = layer
    vars(layer)[SHARES_GATHERED], vars(layer)[GATHER] = index, partial(_begin_rows, ranks=ranks)
    patched.forward = MethodType(_forward, layer)


def gather_for(ranks: TensorRanks, module: nn.Module, layers: Sequence[Any], x: Tensor) -> Tensor:
    """All-gather tokens for a module; x [..., T, D] is this rank's shard; layers: those that take
    what is gathered."""
    takers = layers
    layers = [layer for layer in layers if needs_weight_gradients(layer, x)]
    layers = [layer for layer in layers if not _gathered_in_float8(layer)]
    waits = any(owner_of(layer) for layer in layers)
    if waits:  # float8 layers' weight gradients are not deferred
        layers = [layer for layer in layers if owner_of(layer)]
    # torch.compile drops an operator without used results, and what it would have queued
    unneeded = torch.compiler.is_compiling() and waits and not x.requires_grad
    # gradients that wait would keep all tokens for longer
    compiled = ranks.compiled or torch.compiler.is_compiling()
    again = ranks.gathers_again and not (compiled and not waits)
    shared = _shared_scaling(module, layers) if len(layers) == len(takers) else None
    if not layers or not (again or shared) or unneeded or in_functorch():
        return autograd_collective(x, ranks, "all_gather", "reduce_scatter", x.dim() - 2)
    kept, tokens, scale = None, None, None
    if shared is not None:
        shard, scale = shared.cast_shard(x.detach(), ranks)
        tokens = _begin_rows(shard, ranks, beside=False)()
        kept = shard if again else tokens
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    owner = owner_of(layers[0]) if waits else None
    scaled = [_scaled(layer) for layer in layers]
    casts = [cast for _, *of_layer in scaled for cast in of_layer]
    kinds = tuple((scaling, len(of_layer)) for scaling, *of_layer in scaled)
    how = ranks, owner, kinds, again
    gathered, *results = _Gather.apply(x, *how, kept, scale, *parameters, *casts)
    pairs = zip(layers, results, strict=True)
    of_layers = {getattr(layer, SHARES_GATHERED): y for layer, y in pairs}
    setattr(gathered, _RESULTS, (ranks, gathered._version, of_layers, (tokens, scale)))
    return gathered


def _shared_scaling(module: nn.Module, layers: Sequence[Any]) -> Any:
    """How layers cast their input, if all do so alike and nothing else sees it; else None."""
    if ONLY_LAYERS not in vars(module) or any(_scaled(layer)[0] is None for layer in layers):
        return None
    inside = [layer for layer in layers if layer is not module]
    hooks = [layer._forward_pre_hooks for layer in inside]
    hooks += [each._forward_hooks for each in (module, *inside)]
    if not layers or any(hooks) or len(module._forward_pre_hooks) > 1:  # besides tp's own
        return None
    from titanlike.techniques.low_precision.float8_linear import shared_scaling

    return shared_scaling(layers)


def _forward(layer: Any, x: Tensor) -> Tensor:
    like, gathered_cast = _of_layer(layer, x)
    if like is None:
        if not in_float8(layer):
            return linear(layer, x)
        return (forward_in_bf16 if IN_BF16 in vars(layer) else type(layer).forward)(layer, x)
    bias = None if layer.bias is None else layer.bias.detach()
    scaling, *casts = _scaled(layer)
    given = x.detach(), layer.weight.detach(), bias, like, scaling
    return _Product.apply(*given, *gathered_cast, *casts)


def _scaled(layer: Any) -> list[Any]:
    """How a layer's operands are cast to float8, and its cast weight; [None] = bf16."""
    if not in_float8(layer) or IN_BF16 in vars(layer):
        return [None]
    from titanlike.techniques.low_precision.float8_linear import scaling_of

    return [scaling_of(layer), *chain(*layer.casts)]


def _gathered_in_float8(layer: Any) -> bool:
    """Whether a layer that must compute in bf16 has a weight that FSDP gathered in float8."""
    return IN_BF16 in vars(layer) and hasattr(layer.weight, "to_original_precision")


def _of_layer(layer: nn.Module, x: Tensor) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    """The gather's tensor for a layer, if the layer is called with the gathered input, and what was
    gathered of it in float8: elements and scale."""
    ranks, version, results, cast = getattr(x, _RESULTS, (None, 0, {}, (None, None)))
    if ranks is not None and not torch.compiler.is_compiling() and x._version != version:
        # changed in place, so gathering again would differ. Found when the model is recorded, for
        # compiled blocks, too
        ranks.gathers_again = False
        return None, (None, None)
    return results.get(getattr(layer, SHARES_GATHERED)), cast


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        like: Tensor,
        scaling: Any,
        tokens: Tensor | None,
        scale: Tensor | None,
        *casts: Tensor,
    ) -> Tensor:
        """tokens [N, D], scale: x in float8, if it was gathered so."""
        ctx.given = len(casts)
        rows = x.reshape(-1, x.shape[-1])
        if scaling is None:
            rows = F.linear(rows, weight, bias)
        else:
            from titanlike.techniques.low_precision.float8_linear import Operand

            cast = None if tokens is None else Operand(tokens, scale)
            rows, *_ = scaling.results(rows, weight, casts, cast)
            rows = rows if bias is None else rows + bias.to(rows.dtype)
        return shaped(rows, (*x.shape[:-1], rows.shape[-1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, gradient, None, None, None, *(None for _ in range(ctx.given))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ranks: TensorRanks,
        owner: Any,
        kinds: Any,
        again: bool,
        kept: Tensor | None,
        scale: Tensor | None,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        """owner: the queue of deferred weight gradients; kinds: for each layer how it casts to
        float8 (None = bf16), and the number of its cast weight's tensors; again: gather in the
        backward, too; kept, scale: x in float8, else None, this rank's shard or what was gathered;
        tensors: weight and bias of each layer, then its cast weight."""
        parameters = tensors[: 2 * len(kinds)]
        # a cast weight's original is not needed again
        weights = [
            None if given else w for (_, given), w in zip(kinds, parameters[::2], strict=True)
        ]
        casts = tensors[len(parameters) :]
        kept = x if kept is None else kept
        ctx.save_for_backward(kept, scale, *weights, *parameters[1::2], *casts)
        ctx.set_materialize_grads(False)
        ctx.ranks, ctx.owner, ctx.kinds, ctx.parameters = ranks, owner, kinds, parameters
        shape = (*x.shape[:-2], x.shape[-2] * ranks.size, x.shape[-1])
        ctx.again, ctx.shape = again, shape
        if scale is None:
            gathered = shaped(_begin_rows(x, ranks, beside=False)(), shape)
        else:  # no operation takes it; one that did would not stay unnoticed
            gathered = x.new_full((), math.nan).expand(shape)
        forms = [(*gathered.shape[:-1], weight.shape[0]) for weight in parameters[::2]]
        return gathered, *(x.new_empty(()).expand(form) for form in forms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_gathered: Tensor | None, *of_results: Tensor | None) -> Any:
        kept, scale, *saved = ctx.saved_tensors
        count = len(ctx.kinds)
        weights, biases, left = saved[:count], saved[count : 2 * count], iter(saved[2 * count :])
        casts = [[*islice(left, given)] for _, given in ctx.kinds]
        scalings = [scaling for scaling, _ in ctx.kinds]
        # layers whose results reached the loss
        rows = {
            i: gradient.reshape(-1, gradient.shape[-1])
            for i, gradient in enumerate(of_results)
            if gradient is not None
        }
        compiled = torch.compiler.is_compiling()
        waits = ctx.owner is not None and (compiled or _accumulate(ctx, rows))
        gather, finish = partial(_begin_rows, ranks=ctx.ranks), None
        if rows and not waits:
            finish = gather(kept) if ctx.again else lambda: kept
        if scale is not None:
            from titanlike.techniques.low_precision.float8_linear import Operand
        cast: dict[int, Any] = {}  # gradients of results, in float8
        of_x = of_gathered
        if ctx.needs_input_grad[0] and rows:
            plain = [i for i in rows if scalings[i] is None]
            of = [rows[i] for i in plain], [weights[i] for i in plain]
            if waits and compiled:
                biases = [biases[i] for i in plain]
                of_rows = torch.ops.titanlike.gather_queueing_backward(kept, *of, biases)
            elif plain:
                of_rows = sum_of_products(*of)
            for i in [i for i in rows if i not in plain]:
                one, cast[i] = scalings[i].input_gradient(rows[i], weights[i], casts[i])
                of_rows = of_rows.add_(one) if plain or len(cast) > 1 else one
            of_x = of_rows.view(ctx.shape)
            of_x = of_x if of_gathered is None else of_x.add_(of_gathered)
        scattered = None
        if ctx.needs_input_grad[0] and of_x is not None:
            scattered = begin_collective("reduce_scatter", of_x, ctx.ranks, of_x.dim() - 2)
        del of_x, of_gathered
        grads: list[Tensor | None] = [None] * len(ctx.parameters)
        if finish is not None:
            gathered = finish()
            inputs = None if scale is None else Operand(gathered, scale)
            for i, gradient in rows.items():
                if scalings[i] is None:
                    grads[2 * i] = gradient.t() @ gathered
                else:
                    inputs = inputs or scalings[i].cast_input(gathered)
                    g = cast[i] if i in cast else scalings[i].cast_gradient(gradient)
                    grads[2 * i] = scalings[i].weight_gradient(gradient, g, inputs)
                grads[2 * i + 1] = gradient.sum(0) if ctx.needs_input_grad[8 + 2 * i] else None
        elif rows and not compiled:
            products = [(g, *ctx.parameters[2 * i : 2 * i + 2]) for i, g in rows.items()]
            ctx.owner.queue.append(Waiting(kept, products, gather))
        nothing = (None for of_layer in casts for _ in of_layer)
        of_x = None if scattered is None else scattered()
        return of_x, *[None] * 6, *grads, *nothing


def _accumulate(ctx: Any, layers: Iterable[int]) -> bool:
    """Whether the running backward adds to `.grad` of these layers' weights."""
    tensors = [*filter(torch.is_tensor, ctx.parameters)]  # behind x, without missing biases
    places = {id(tensor): place for place, tensor in enumerate(tensors, 1)}
    return all(accumulates(ctx, places[id(ctx.parameters[2 * at])]) for at in layers)


def _begin_rows(x: Tensor, ranks: TensorRanks, beside: bool = True) -> Callable[[], Tensor]:
    """Launch the all-gather of all tokens; the returned function waits for them, as rows."""
    sent = x.view(torch.uint8) if x.itemsize == 1 else x  # float8, which gloo does not know
    finish = begin_collective("all_gather", sent, ranks, x.dim() - 2, beside)
    return lambda: finish().reshape(-1, x.shape[-1]).view(x.dtype)
