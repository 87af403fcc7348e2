"""The operators of one recorded node, run alone on meta: what they multiply, and the bytes they touch.

A backward is run as a zero-bubble schedule splits it: input gradients (and gradients of weights that
are not of linear layers), then the weight gradients that wait. Weights have gradients already, as in
all microbatches but the first, so that to add to them counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from titanlike.costs.fused_attention import FusedAttention
from titanlike.costs.node_cost import EXPERTS_PRODUCT, META, Call, empty_like, module_of
from titanlike.graph.recording import Node
from titanlike.torch_private.operators import TorchDispatchMode
from titanlike.torch_private.tensors import storage_id, tree_leaves

# A module -> a context in which its linear layers' weight gradients wait for what it gives to be
# called
Deferring = Callable[[nn.Module], AbstractContextManager[Callable[[], object]]]

_FREE = ("detach", "alias", "empty", "new_empty", "_unsafe_view", "lift", "unbind")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
ATTENTION = "attention"
_KERNELS = "_scaled_dot_product_"  # in their names


class Operator(NamedTuple):
    """What an operator does; of a matrix product its sizes, batched: rows x columns, summed over."""

    name: str  # "aten.mm"; ATTENTION
    flops: int
    bytes: int  # read and written
    itemsize: int  # of an element of its results, bytes
    sizes: tuple[int, int, int] | None = None  # rows, columns, sum


Operators = Mapping[Operator, int]  # operator -> how often
# axis -> (bytes that a rank sends, messages, bytes of these that are sent while it attends)
Exchanges = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class NodeOperators:
    """Of a node's forward, of its backward up to its inputs, and of the weight gradients left; with what
    the ranks of each axis exchange in the first two."""

    forward: Operators
    input_gradient: Operators
    weight_gradient: Operators
    exchanged_forward: Exchanges = field(default_factory=dict)
    exchanged_backward: Exchanges = field(default_factory=dict)


def node_operators(
    node: Node,
    model: nn.Module,
    deferring: Deferring,
    exchanged: Callable[[], Exchanges] = dict,
) -> NodeOperators:
    """exchanged: what the node's ranks have exchanged so far."""
    module = module_of(node, model)
    call = Call(node, module, META, empty_like)
    weights = [*call.weights, *(module.parameters() if module is not None else ())]
    weights = [weight for weight in weights if weight.requires_grad]
    attention = _Attentions()
    begin = exchanged()
    with deferring(nn.Module() if module is None else module) as wait:
        with _Recorder() as forward, attention:
            results = call.forward()
        middle = exchanged()
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        try:
            with _Recorder() as backward:
                if results:
                    ones = [torch.empty_like(result) for result in results]
                    torch.autograd.backward(results, ones)
            with _Recorder() as later:
                wait()
        finally:
            for weight in weights:
                weight.grad = None
    forward.found.update(attention.found)
    if any(result.requires_grad for result in results):
        backward.found.update(map(_backward_of, attention.found.elements()))
    there, back = (_difference(*pair) for pair in ((begin, middle), (middle, exchanged())))
    return NodeOperators(forward.found, backward.found, later.found, there, back)


def _difference(before: Exchanges, after: Exchanges) -> Exchanges:
    pairs = {axis: zip(before[axis], after[axis], strict=True) for axis in before}
    return {axis: tuple(b - a for a, b in both) for axis, both in pairs.items()}


def _backward_of(operator: Operator) -> Operator:
    """Of fused attention: five products for the forward's two, as many tensors again."""
    return operator._replace(flops=operator.flops * 5 // 2, bytes=2 * operator.bytes)


class _Attentions(FusedAttention):
    """Notes each call of fused attention, which is no operator on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Operator] = Counter()

    def called(self, q: Tensor, k: Tensor, v: Tensor, result: Tensor, causal: bool) -> None:
        *batch, queries, width = q.shape
        pairs = queries * k.shape[-2] // (2 if causal else 1)
        rows = q.numel() // (queries * width)
        flops = 2 * rows * pairs * (width + v.shape[-1])
        touched = sum(tensor.nbytes for tensor in (q, k, v, result))
        self.found[Operator(ATTENTION, flops, touched, q.itemsize)] += 1


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Operator] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = str(getattr(function, "overloadpacket", function))
        short = name.rpartition(".")[2]
        if getattr(function, "is_view", False) or short.startswith(_FREE):
            return result
        given = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not made:
            return result
        known = {storage_id(tensor) for tensor in given}
        if short in ("_to_copy", "contiguous", "reshape", "clone") and known & {
            storage_id(tensor) for tensor in made
        }:
            return result  # it was as it is to be
        sizes, flops = None, 0
        if short in _PRODUCTS:
            a, b = given[-2:]
            sizes = a.shape[-2], b.shape[-1], a.shape[-1]
            flops = 2 * made[0].numel() * a.shape[-1]
        elif (packet := getattr(function, "overloadpacket", None)) in flop_registry:
            flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
            if _KERNELS in name:  # called by name: a ring's blocks
                name = ATTENTION
                arguments = [argument.name for argument in function._schema.arguments]
                at = arguments.index("is_causal")
                flops //= 2 if len(args) > at and args[at] else 1
            elif name.startswith(EXPERTS_PRODUCT):
                sizes = _of_an_expert(given[0], given[1], made[0])
        read = sum(min(tensor.nbytes, _storage_bytes(tensor)) for tensor in given)
        written = sum(tensor.nbytes for tensor in made)
        if "embedding" in short or short in ("gather", "index", "index_select"):
            read = written  # of a table only some rows
        self.found[Operator(name, flops, read + written, made[0].itemsize, sizes)] += 1
        return result


def _of_an_expert(a: Tensor, b: Tensor, result: Tensor) -> tuple[int, int, int]:
    """Sizes of the product of one expert, where all have equally many rows: a [N, I] and b [E, O, I],
    or gradients a [N, O] and rows b [N, I] of a weight [E, O, I]."""
    if b.dim() == 3:
        return a.shape[0] // b.shape[0], b.shape[1], b.shape[2]
    return result.shape[1], result.shape[2], a.shape[0] // result.shape[0]


def _storage_bytes(tensor: Tensor) -> int:
    """Of an expanded tensor less than it has elements."""
    return tensor.untyped_storage().nbytes()
