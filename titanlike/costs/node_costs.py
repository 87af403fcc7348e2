"""What one recorded node costs, run alone: FLOPs, operators, bytes saved and at the most, seconds.

All but the seconds are counted on meta, with attention as fused kernels compute it.
"""

from __future__ import annotations

import copy
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from titanlike.device.accelerator import kept_rng, synchronize
from titanlike.graph.pytree import tree_flatten, tree_map
from titanlike.graph.recording import DEVICE, Node
from titanlike.torch_private.operators import TorchDispatchMode
from titanlike.torch_private.tensors import storage_id, tree_leaves

# What scaled_dot_product_attention on meta stands for, on one device or another.
_ATTENTION = (
    "aten._scaled_dot_product_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "torch_attn._varlen_attn",
    "flex_attention",
)
META = torch.device("meta")
EXPERTS_PRODUCT = "titanlike.expert_linear"  # the operator of `models/expert_linear.py`


def flops(node: Node, model: nn.Module) -> int:
    """FLOPs of forward and backward: matrix products, convolutions and attention (without the
    saving of causal kernels)."""
    with FlopCounterMode(display=False) as counter:
        Call(node, module_of(node, model), META, empty_like).forward_backward()
    return counter.get_total_flops()


def saved_bytes(node: Node, model: nn.Module) -> int:
    """Bytes that the forward saves for the backward, without parameters, with fused attention."""
    module = module_of(node, model)
    call = Call(node, module, META, empty_like)
    weights = [*(module.parameters() if module else ()), *call.weights]
    of_weights = {id(p.untyped_storage()): p.untyped_storage() for p in weights}
    saved: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so ids stay unique

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in of_weights:
            saved[id(storage)] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    with hooks, FusedAttention():
        call.forward()
    return sum(storage.nbytes() for storage in saved.values())


def recomputed_bytes(node: Node, model: nn.Module, save: Sequence[str]) -> int:
    """Bytes that are kept of a unit whose forward runs again in the backward: what it is given, and
    the results of the operators `save` (as "aten.mm")."""
    call = Call(node, module_of(node, model), META, empty_like)
    given = sum(use.tensor.nbytes for use in dict.fromkeys(node.input_nodes) if _is_made(use))
    if not save:
        return given
    results = _Results(save)
    attention = FusedAttention()
    with results, attention:
        call.forward()
    fused = any(fnmatchcase(kernel, name) for name in save for kernel in _ATTENTION)
    return given + results.nbytes + (attention.nbytes if fused else 0)


def queued_bytes(node: Node, model: nn.Module, compiled: bool) -> int:
    """Bytes of the inputs of a unit's linear layers and of the gradients of their results.

    compiled: each layer queues a copy of an input that several share.
    """
    module = module_of(node, model)
    if module is None:
        return 0
    storages: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so ids stay unique

    def add(_: nn.Module, args: Any, kwargs: Any, result: Tensor) -> None:
        for tensor in (*args, *kwargs.values(), result):
            storage = tensor.untyped_storage()
            storages[len(storages) if compiled else id(storage)] = storage

    linear = [part for part in module.modules() if type(part) is nn.Linear]
    trained = [part for part in linear if all(p.requires_grad for p in part.parameters())]
    handles = [part.register_forward_hook(add, with_kwargs=True) for part in trained]
    try:
        with FusedAttention():
            Call(node, module, META, empty_like).forward()
    finally:
        for handle in handles:
            handle.remove()
    return sum(storage.nbytes() for storage in storages.values())


class Call:
    """A node's function, with its own copies of the arguments."""

    def __init__(
        self,
        node: Node,
        module: nn.Module | None,
        device: torch.device,
        make: Callable[[Tensor], Tensor],
    ) -> None:
        self._node, self._device = node, device
        self._inputs = {use: make(use.tensor) for use in dict.fromkeys(node.input_nodes)}
        self.inputs = [*self._inputs.values()]
        self.weights = [self._inputs[use] for use in self._inputs if _is_weight(use)]
        if node.chunked_head is not None:
            self._function = node.chunked_head.loss_function(module)
        else:
            self._function = node.target if module is None else module
        wanted = [*self._inputs.values(), *(module.parameters() if module else ())]
        self._wanted = [tensor for tensor in wanted if tensor.requires_grad]

    def arguments(self) -> Any:
        """For a forward: (args, kwargs)."""

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, Node):
                return self._device if leaf is DEVICE else leaf
            tensor = self._inputs[leaf]
            # a clone: a leaf that requires a gradient must not be changed in place
            return tensor.clone() if tensor.requires_grad and not _is_weight(leaf) else tensor

        return tree_map((self._node.args, self._node.kwargs), real)

    def forward(self, arguments: Any = None) -> list[Tensor]:
        """The results that require a gradient."""
        args, kwargs = self.arguments() if arguments is None else arguments
        with torch.set_grad_enabled(self._node.grad_enabled), self._device:
            result = self._function(*args, **kwargs)
        leaves, _ = tree_flatten(result)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

    def forward_backward(self) -> None:
        results = self.forward()
        if results and self._wanted:
            ones = [torch.ones_like(result) for result in results]
            torch.autograd.grad(results, self._wanted, ones, allow_unused=True)


def module_of(node: Node, model: nn.Module) -> nn.Module | None:
    return model.get_submodule(node.target) if node.kind == "unit" else None


def _is_made(node: Node) -> bool:
    """Whether it is a value of the forward whose gradient is computed: no weight, no mask."""
    return node.value is not None and node.value.requires_grad and not _is_weight(node)


def _is_weight(node: Node) -> bool:
    return isinstance(node.value, nn.Parameter)


def empty_like(tensor: Tensor) -> Tensor:
    """Without values, with the same need of a gradient; a parameter itself."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return torch.empty_like(tensor).requires_grad_(tensor.requires_grad)


def random_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Random floats; 0 as integer, which is a valid index anywhere; True."""
    if tensor.is_floating_point():
        scale = 0.02 if isinstance(tensor, nn.Parameter) else 1.0
        values = scale * torch.randn(tensor.shape, dtype=tensor.dtype, device=device)
        return values.requires_grad_(tensor.requires_grad)
    full = 1 if tensor.dtype == torch.bool else 0
    return torch.full(tensor.shape, full, dtype=tensor.dtype, device=device)


class _Results(TorchDispatchMode):
    """Counts the bytes of the results of some operators."""

    def __init__(self, operators: Sequence[str]) -> None:
        super().__init__()
        self.nbytes = 0
        self._operators = operators

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        called = str(function.overloadpacket)
        called = "aten.mm" if called == EXPERTS_PRODUCT else called
        if any(fnmatchcase(called, name) for name in self._operators):
            leaves = tree_flatten(result)[0]
            self.nbytes += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        return result


# --- attention on meta as fused kernels compute it ------------------------------------------------


class FusedAttention(TorchFunctionMode):
    """Replaces scaled_dot_product_attention, which on meta saves all probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0  # of its results, with a logsumexp for each query

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention:
            return function(*args, **kwargs)
        given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
        mask = given.get("attn_mask")
        result = _Attention.apply(given["query"], given["key"], given["value"], mask)
        self.nbytes += result.nbytes + 4 * (result.numel() // result.shape[-1])
        causal = bool(kwargs.get("is_causal", args[5] if len(args) > 5 else False))
        self.called(given["query"], given["key"], given["value"], result, causal)
        return result

    def called(self, q: Tensor, k: Tensor, v: Tensor, result: Tensor, causal: bool) -> None:
        """For those who count what it computes."""


class _Attention(torch.autograd.Function):
    """Saves what fused attention saves: its arguments, its result, a logsumexp for each query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        result = q.new_empty(*q.shape[:-1], v.shape[-1])
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, mask, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors[:3]
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


# --- the most memory that a recorded node takes while it runs, alone and on meta ------------------


@dataclass(frozen=True)
class NodePeak:
    """Bytes of storages, without those of parameters."""

    forward: int  # at the most in its forward, its inputs and its result included
    # In its backward, at the most, beyond what was in memory at its begin: gradients of activations,
    first: int  # and of weights, which are new
    later: int  # and of weights one at a time, which is added to what is there


def peak_bytes(
    node: Node, model: nn.Module, changed: Callable[[nn.Module], AbstractContextManager[Any]]
) -> NodePeak:
    """changed: within it the node's module runs as it will in a backward."""
    module = module_of(node, model)
    call = Call(node, module, META, empty_like)
    weights = [*call.weights, *(module.parameters() if module is not None else ())]
    weights = [weight for weight in weights if weight.requires_grad]
    with changed(nn.Module() if module is None else module):
        forward, first = _run(call)
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        try:
            _, later = _run(call)
        finally:
            for weight in weights:
                weight.grad = None
    return NodePeak(forward, first, later)


def _run(call: Call) -> tuple[int, int]:
    """(most in the forward, most in the backward beyond what there was at its begin)."""
    with Live() as live, FusedAttention():
        results = call.forward()
        forward, begin = live.peak, live.now
        if results:
            live.peak = begin
            torch.autograd.backward(results, [torch.empty_like(result) for result in results])
        backward = live.peak - begin
    for tensor in (*call.inputs, *call.weights):
        tensor.grad = None
    return forward, backward


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that exist, of those made within it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        key, storage = storage_id(tensor), tensor.untyped_storage()
        if key not in self._known:
            self._known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


# --- the operators of one recorded node, run alone on meta ----------------------------------------


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


# --- how long one recorded node takes on a device, alone ------------------------------------------


Times = tuple[float, float, float]  # seconds: forward, backward, weight gradients that wait for it


def node_times(
    node: Node, model: nn.Module, device: torch.device, deferring: Deferring, repeats: int = 15
) -> Times:
    """Medians, of random values; weights have gradients already, as in most microbatches."""
    module = module_of(node, model)
    if module is not None:
        module = copy.deepcopy(module).to_empty(device=device)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(0, 0.02)
            for buffer in module.buffers():
                buffer.fill_(1 if buffer.is_floating_point() else 0)
    found: list[Times] = []
    with (
        kept_rng(device),
        deferring(nn.Module() if module is None else module) as wait,
    ):
        call = Call(node, module, device, lambda tensor: random_like(tensor, device))
        for _ in range(2 + repeats):
            arguments = call.arguments()
            moments = [now(device)]
            results = call.forward(arguments)
            moments.append(now(device))
            ones: list[Tensor] = [torch.ones_like(result) for result in results]
            moments.append(now(device))
            if results:
                torch.autograd.backward(results, ones)
            moments.append(now(device))
            wait()
            moments.append(now(device))
            forward, _, inputs, weights = (b - a for a, b in pairwise(moments))
            found.append((forward, inputs, weights))
            for tensor in call.inputs:
                tensor.grad = None
    first, second, third = zip(*found[2:], strict=True)
    return statistics.median(first), statistics.median(second), statistics.median(third)


def now(device: torch.device) -> float:
    """Of one thread of a CPU its own time, which other programs do not lengthen."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time()
    synchronize(device)
    return time.perf_counter()
