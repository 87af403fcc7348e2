"""The costs of one recorded call, run alone: counted on meta, in one dispatch mode (`count`), with
attention as fused kernels compute it; or timed on a device (`node_times`)."""

from __future__ import annotations

import copy
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from titanlike.core.device.accelerator import kept_rng, synchronize
from titanlike.core.graph.recording import Node, with_values
from titanlike.core.torch_private.operators import TorchDispatchMode, arguments_of
from titanlike.core.torch_private.tensors import storage_id, tensors_in

if TYPE_CHECKING:  # imported where a layout has them
    from titanlike.core.distributed.collectives import GroupInfo
    from titanlike.techniques.weight_gradients import DeferredWeightGradients

_META = torch.device("meta")
Times = tuple[float, float, float]  # seconds: forward, backward, deferred weight gradients


class UnitPeak(NamedTuple):
    """Peak bytes of a unit while it runs, including its inputs and saved activations; without
    parameters and existing gradients."""

    forward: int
    first: int  # in a step's first backward, which allocates weight gradients
    later: int  # in later backwards, which accumulate them


class Call:
    """A node's function, with its own copies of the arguments."""

    def __init__(
        self,
        node: Node,
        model: nn.Module,
        device: torch.device = _META,
        make: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """make: copies an argument, on `device`, and the module is copied as well; None: arguments
        are copied without values, and the module itself is used."""
        self._node, self._device = node, device
        module = model.get_submodule(node.target) if node.kind == "unit" else None
        if module is not None and make is not None:
            module = copy.deepcopy(module).to_empty(device=device)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.normal_(0, 0.02)
                for buffer in module.buffers():
                    buffer.fill_(1 if buffer.is_floating_point() else 0)
        self.module = nn.Module() if module is None else module
        copies = make or _empty_like
        self._inputs = {use: copies(use.tensor) for use in dict.fromkeys(node.input_nodes)}
        self.inputs = [*self._inputs.values()]
        self.weights = [self._inputs[use] for use in self._inputs if _is_weight(use)]
        self.weights += self.module.parameters()
        if node.chunked_head is not None:
            self._function = node.chunked_head.loss_function(module)
        else:
            self._function = node.target if module is None else module

    def arguments(self) -> Any:
        """Arguments of one forward: (args, kwargs)."""
        values = {  # clones, as a leaf that requires a gradient must not be changed in place
            use: tensor.clone() if tensor.requires_grad and not _is_weight(use) else tensor
            for use, tensor in self._inputs.items()
        }
        return with_values((self._node.args, self._node.kwargs), values, self._device)

    def forward(self, arguments: Any = None) -> list[Tensor]:
        """Run the forward; returns the results that require a gradient."""
        args, kwargs = self.arguments() if arguments is None else arguments
        with torch.set_grad_enabled(self._node.grad_enabled), self._device:
            result = self._function(*args, **kwargs)
        return [leaf for leaf in tensors_in(result) if leaf.requires_grad]

    @contextmanager
    def weight_gradients(self, deferred: bool) -> Iterator[DeferredWeightGradients | None]:
        """A context in which the module's linear layers defer their weight gradients, if asked to."""
        if not deferred:
            yield None
            return
        from titanlike.techniques.weight_gradients import DeferredWeightGradients

        waiting = DeferredWeightGradients(self.module, _META)
        try:
            yield waiting
        finally:
            waiting.undo()


def _is_weight(node: Node) -> bool:
    return isinstance(node.value, nn.Parameter)


def _empty_like(tensor: Tensor) -> Tensor:
    """An uninitialized tensor with the same requires_grad; a parameter itself."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return torch.empty_like(tensor).requires_grad_(tensor.requires_grad)


# --- costs counted on meta ------------------------------------------------------------------------


# Operators that scaled_dot_product_attention may call on a device.
_ATTENTION = (
    "aten._scaled_dot_product_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "torch_attn._varlen_attn",
    "flex_attention",
)
EXPERTS_PRODUCT = "titanlike.expert_linear"  # the operator of `techniques/mixture/experts.py`
ATTENTION = "attention"
_KERNELS = "_scaled_dot_product_"  # part of their names
_FREE = ("detach", "alias", "empty", "new_empty", "_unsafe_view", "lift", "unbind")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class Operator(NamedTuple):
    """An operator and its work. sizes: of a (batched) matmul rows, columns, inner dimension; of
    attention queries, keys, head dimension. groups: matmuls of these sizes: of a batch, of
    experts."""

    name: str  # "aten.mm"; ATTENTION
    flops: int
    bytes: int  # read and written
    itemsize: int  # bytes per element of its results
    sizes: tuple[int, int, int] | None = None
    groups: int = 1


def attention_share(keys: int, width: int) -> float:
    """Throughput of fused attention on a GPU for this number of keys and head dimension, relative
    to 8,192 and 128: as cuDNN's on an H200 (docs/proof.md), forward and backward together."""
    return min(1.0, keys / 8192) ** 0.19 * min(1.0, width / 128) ** 0.43


Operators = Mapping[Operator, int]  # operator -> number of calls
# axis -> (bytes that a rank sends, number of sends, bytes sent while attention runs)
Exchanges = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class NodeCosts:
    """Costs of a call for one microbatch. Bytes are of storages, without parameters."""

    flops: int = 0  # forward and backward, causal attention counted in full
    saved: int = 0  # bytes that the forward saves for the backward
    inputs: int = 0  # bytes of inputs that require a gradient
    # operator -> bytes of its results in the forward
    results: Mapping[str, int] = field(default_factory=dict)
    # bytes held for deferred weight gradients; the same in compiled blocks, where each layer has a
    # copy
    queued: tuple[int, int] = (0, 0)
    # in the forward with inputs and results; in the backward relative to its begin
    peak: UnitPeak = UnitPeak(0, 0, 0)
    # in the forward, in the backward, and in deferred weight gradients
    forward: Operators = field(default_factory=dict)
    input_gradient: Operators = field(default_factory=dict)
    weight_gradient: Operators = field(default_factory=dict)
    # communication of each axis in the forward and in the backward
    exchanged_forward: Exchanges = field(default_factory=dict)
    exchanged_backward: Exchanges = field(default_factory=dict)

    def kept(self, save: Sequence[str]) -> int:
        """Bytes kept if the call is recomputed in the backward: its inputs, and results of
        operators that match `save`."""

        def matches(operator: str) -> bool:
            names = _ATTENTION if operator == ATTENTION else (operator,)
            return any(fnmatchcase(name, pattern) for name in names for pattern in save)

        return self.inputs + sum(size for name, size in self.results.items() if matches(name))


def count(
    node: Node,
    model: nn.Module,
    deferred: bool = False,
    peers: Mapping[str, GroupInfo] = MappingProxyType({}),
) -> NodeCosts:
    """Count a node's costs. deferred: with deferred weight gradients; peers: axis -> group to
    count."""
    call = Call(node, model)
    trained = [weight for weight in call.weights if weight.requires_grad]
    with call.weight_gradients(deferred) as waiting:
        first = _Counter(call, peers, waiting)
        for weight in trained:
            weight.grad = torch.empty_like(weight)
        try:
            later = _Counter(call, peers, waiting)
        finally:
            for weight in trained:
                weight.grad = None
    inputs = (use for use in dict.fromkeys(node.input_nodes) if not _is_weight(use))
    values = [use.value for use in inputs if use.value is not None]
    return NodeCosts(
        flops=first.flops,
        saved=first.saved,
        inputs=sum(value.nbytes for value in values if value.requires_grad),
        results=first.results,
        queued=first.queued,
        peak=UnitPeak(first.forward_peak, first.backward_peak, later.backward_peak),
        forward=later.operators[0],
        input_gradient=later.operators[1],
        weight_gradient=later.operators[2],
        exchanged_forward=later.exchanged[0],
        exchanged_backward=later.exchanged[1],
    )


class _Counter(TorchDispatchMode):
    """Runs a call forward and backward, and records its operators and live storages."""

    def __init__(
        self, call: Call, peers: Mapping[str, GroupInfo], waiting: DeferredWeightGradients | None
    ) -> None:
        super().__init__()
        self.flops = self.saved = self._now = self._peak = 0
        self._results: Counter[str] = Counter()
        self.queued = 0, 0
        self._live: set[int] = set()
        self._noted: Counter[Operator] = Counter()
        self._attention: Counter[Operator] = Counter()
        weights = {storage_id(weight) for weight in call.weights}
        saved: dict[int, int] = {}

        def save(tensor: Tensor) -> Tensor:
            saved[storage_id(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        begin = {axis: ranks.traffic for axis, ranks in peers.items()}
        with self, _FusedAttention(self):
            with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
                results = call.forward()
            self.saved = sum(size for key, size in saved.items() if key not in weights)
            forward, self.results = self._noted + self._attention, self._results.copy()
            middle = {axis: ranks.traffic for axis, ranks in peers.items()}
            self._noted, self.forward_peak, before = Counter(), self._peak, self._now
            self._peak = self._now
            if results:
                torch.autograd.backward(results, [torch.empty_like(result) for result in results])
                for operator, times in self._attention.items():
                    # flash attention's backward has five matmuls for the forward's two
                    flops, nbytes = operator.flops * 5 // 2, 2 * operator.bytes
                    self._noted[operator._replace(flops=flops, bytes=nbytes)] += times
            inputs, self.backward_peak = self._noted, self._peak - before
            self._noted = Counter()
            if waiting is not None:  # also if each layer has a copy of its input
                queue = [t for w in waiting.queue for t in (w.kept, *(g for g, *_ in w.products))]
                sizes = {storage_id(t): t.untyped_storage().nbytes() for t in queue}
                self.queued = sum(sizes.values()), sum(sizes[storage_id(t)] for t in queue)
                waiting.take()()
        self.operators = forward, inputs, self._noted
        end = {axis: ranks.traffic for axis, ranks in peers.items()}
        self.exchanged = _difference(begin, middle), _difference(middle, end)
        for tensor in (*call.inputs, *call.weights):
            tensor.grad = None

    def attention(self, q: Tensor, k: Tensor, v: Tensor, result: Tensor, causal: bool) -> None:
        """Record a call of fused attention, which is not an operator on meta."""
        width = q.shape[-1]
        flops = 2 * (q.numel() // width) * k.shape[-2] * (width + v.shape[-1])
        touched = sum(tensor.nbytes for tensor in (q, k, v, result))
        self.flops += 3 * flops
        flops //= 2 if causal else 1
        sizes = q.shape[-2], k.shape[-2], width
        self._attention[Operator(ATTENTION, flops, touched, q.itemsize, sizes)] += 1
        # results include a logsumexp per query
        self._results[ATTENTION] += result.nbytes + 4 * (result.numel() // result.shape[-1])

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        made = tensors_in(result)
        for tensor in made:
            key, storage = storage_id(tensor), tensor.untyped_storage()
            if key not in self._live and function is not torch.ops.aten.detach.default:
                self._live.add(key)
                self._now += storage.nbytes()
                self._peak = max(self._peak, self._now)
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        packet = getattr(function, "overloadpacket", function)
        name = str(packet)
        saved_as = "aten.mm" if name == EXPERTS_PRODUCT else name
        self._results[saved_as] += sum(tensor.nbytes for tensor in made)
        short = name.rpartition(".")[2]
        if getattr(function, "is_view", False) or short.startswith(_FREE) or not made:
            return result
        arguments = tensors_in([args, {k: v for k, v in kwargs.items() if k != "out"}])
        if short in ("_to_copy", "contiguous", "reshape", "clone") and not {
            *map(storage_id, arguments)
        }.isdisjoint(map(storage_id, made)):
            return result  # nothing was copied
        sizes, flops, groups = None, 0, 1
        if short in _PRODUCTS:
            a, b = arguments[-2:]
            sizes = a.shape[-2], b.shape[-1], a.shape[-1]
            flops = 2 * made[0].numel() * a.shape[-1]
            groups = made[0].numel() // (sizes[0] * sizes[1] or 1)
            self.flops += flops
        elif packet in flop_registry:
            flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
            self.flops += flops
            if _KERNELS in name:  # a kernel called directly, by ring attention
                name, (q, k) = ATTENTION, arguments[:2]
                sizes = q.shape[-2], k.shape[-2], q.shape[-1]
                causal = arguments_of(function, args, kwargs).get("is_causal")
                flops //= 2 if causal else 1
            elif name.startswith(EXPERTS_PRODUCT):
                sizes, groups = _of_an_expert(arguments[0], arguments[1], made[0])
        # an expanded tensor has less memory than elements
        read = sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in arguments)
        written = sum(tensor.nbytes for tensor in made)
        if "embedding" in short or short in ("gather", "index", "index_select"):
            read = written  # reads only some rows of a table
        work = flops, read + written, made[0].itemsize, sizes, groups
        self._noted[Operator(name, *work)] += 1
        return result

    def _gone(self, key: int, nbytes: int) -> None:
        self._live.discard(key)
        self._now -= nbytes


def _difference(before: Exchanges, after: Exchanges) -> Exchanges:
    pairs = {axis: zip(before[axis], after[axis], strict=True) for axis in before}
    return {axis: tuple(b - a for a, b in both) for axis, both in pairs.items()}


def _of_an_expert(a: Tensor, b: Tensor, result: Tensor) -> tuple[tuple[int, int, int], int]:
    """Sizes of one expert's matmul, assuming equally many rows for all, and the number of experts:
    a [N, I] and b [E, O, I], or gradients a [N, O] and rows b [N, I] of a weight [E, O, I]."""
    if b.dim() == 3:
        return (a.shape[0] // b.shape[0], b.shape[1], b.shape[2]), b.shape[0]
    return (result.shape[1], result.shape[2], a.shape[0] // result.shape[0]), result.shape[0]


class _FusedAttention(TorchFunctionMode):
    """Replaces scaled_dot_product_attention, which on meta saves all probabilities."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention:
            return function(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        named = dict(zip(names, args, strict=False)) | kwargs
        q, k, v = (named[name] for name in names[:3])
        result = _Attention.apply(q, k, v, named.get("attn_mask"))
        self._counter.attention(q, k, v, result, bool(named.get("is_causal")))
        return result


class _Attention(torch.autograd.Function):
    """Saves what fused attention saves: its arguments, its result, a logsumexp per query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        rows = q.transpose(-3, -2) if q.dim() > 2 else q  # kernels write [..., T, H, E]
        result = rows.new_empty(*rows.shape[:-1], v.shape[-1])
        result = result.transpose(-3, -2) if q.dim() > 2 else result
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, mask, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors[:3]
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


# --- times measured on a device -------------------------------------------------------------------


def node_times(
    node: Node, model: nn.Module, device: torch.device, deferred: bool, repeats: int = 15
) -> Times:
    """Measure median seconds of a call on random values; weights have gradients already, as in most
    microbatches. deferred: whether weight gradients of linear layers are."""

    def random_like(tensor: Tensor) -> Tensor:
        """Random floats; 0 for integers, which is always a valid index; True."""
        if tensor.is_floating_point():
            scale = 0.02 if isinstance(tensor, nn.Parameter) else 1.0
            values = scale * torch.randn(tensor.shape, dtype=tensor.dtype, device=device)
            return values.requires_grad_(tensor.requires_grad)
        full = 1 if tensor.dtype == torch.bool else 0
        return torch.full(tensor.shape, full, dtype=tensor.dtype, device=device)

    seconds: list[list[float]] = []
    with kept_rng(device):
        call = Call(node, model, device, random_like)
        with call.weight_gradients(deferred) as waiting:
            for _ in range(2 + repeats):
                arguments = call.arguments()
                moments = [now(device)]
                results = call.forward(arguments)
                moments.append(now(device))
                ones = [torch.ones_like(result) for result in results]
                moments.append(now(device))
                if results:
                    torch.autograd.backward(results, ones)
                moments.append(now(device))
                if waiting is not None:
                    waiting.take()()
                moments.append(now(device))
                seconds.append([b - a for a, b in pairwise(moments)])
                for tensor in call.inputs:
                    tensor.grad = None
    forward, _, inputs, weights = map(statistics.median, zip(*seconds[2:], strict=True))
    return forward, inputs, weights


def now(device: torch.device) -> float:
    """Seconds on a clock. With one CPU thread it is CPU time, which other processes do not
    lengthen."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time()
    synchronize(device)
    return time.perf_counter()
