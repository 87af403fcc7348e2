"""The costs of a model's units: parameters, FLOPs, memory, operators, or seconds on a device.

A unit's cost includes the operations between it and its neighbours (a residual, a product with a
weight) that a stage would run which begins or ends there; the last unit's includes the loss. Each
call is run alone: on meta, where one dispatch mode counts all that it costs (`count`), with
attention as fused kernels compute it; or on a device, timed (`node_times`). Equal calls (modules of
one class with equal settings, on tensors of equal shapes) are run once.
"""

from __future__ import annotations

import copy
import hashlib
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from titanlike.device.accelerator import kept_rng, synchronize
from titanlike.distributed.collectives import GroupInfo
from titanlike.graph.cut import cut, unit_starts
from titanlike.graph.model_graph import ModelGraph
from titanlike.graph.recording import Node, tree_map, with_values
from titanlike.optim.loss import Loss
from titanlike.torch_private.operators import TorchDispatchMode
from titanlike.torch_private.tensors import storage_id, tree_leaves

if TYPE_CHECKING:  # imported where a schedule defers them
    from titanlike.parallel.weight_gradients import DeferredWeightGradients

# Attributes with a module's own position, which do not change its cost
_POSITIONS = ("index", "idx", "layer_number", "layer_id")

Times = tuple[float, float, float]  # seconds: forward, backward, weight gradients that wait for it
_T = TypeVar("_T")


class CostError(ValueError):
    """A call that cannot be run alone."""


class UnitPeak(NamedTuple):
    """Bytes of a unit at the most while it runs, what it saves and is given included; without
    parameters and their gradients that were there."""

    forward: int
    first: int  # in its backward, where gradients of weights are new
    later: int  # where they are added to what is there


class UnitCosts:
    """The calls of each unit in the training forward of one microbatch, and their costs.

    All that counts or measures raises CostError for a call that cannot be run alone.
    """

    def __init__(self, model_graph: ModelGraph, targets: Tensor, loss: Loss) -> None:
        """targets: of one microbatch, on meta."""
        self.model, self.microbatch_size = model_graph.model, model_graph.microbatch_size
        recording = model_graph.recording(model_graph.fields, True)
        end = model_graph.last_stage(cut(recording, [list(recording.starts)])[0]).nodes[-1]
        if end.chunked_head is not None:  # the head and the loss are one call
            replaced = {end.chunked_head.head, *end.chunked_head.epilogue}
            next(node for node in end.input_nodes if node.target == "targets").value = targets
        else:
            replaced = set()
            end = Node("function", loss.total, (recording.output, Node("input", "", value=targets)))

        def is_call(node: Node) -> bool:
            return node.kind in ("unit", "function") and node not in replaced

        edges = [*unit_starts(recording), len(recording.nodes)]
        self._calls = [list(filter(is_call, recording.nodes[a:b])) for a, b in pairwise(edges)]
        self._calls[-1].append(end)
        self._end = end
        self._keys: dict[Node, str] = {}
        # attention is of other tokens than those that a unit is called with
        self._parts = model_graph.sequence_parts
        self._counted: dict[Hashable, list[list[NodeCosts]]] = {}
        self.model.train()

    def parameter_table(self, size: Callable[[nn.Parameter], int]) -> np.ndarray:
        """[start, stop] -> size of the parameters of units start ... stop - 1.

        A weight that several of these units use (a tied weight) counts once.
        """
        units = [{id(p): size(p) for p in self._parameters(calls)} for calls in self._calls]
        table = np.zeros((len(units) + 1, len(units) + 1), dtype=np.int64)
        for start in range(len(units)):
            seen: set[int] = set()
            total = 0
            for stop, parameters in enumerate(units[start:], start + 1):
                total += sum(size for key, size in parameters.items() if key not in seen)
                seen.update(parameters)
                table[start, stop] = total
        return table

    def parameter_sizes(self, size: Callable[[nn.Parameter], int]) -> list[int]:
        """Sizes of the parameters of each unit together."""
        units = ({id(p): p for p in self._parameters(calls)} for calls in self._calls)
        return [sum(map(size, parameters.values())) for parameters in units]

    def flops(self) -> list[int]:
        """FLOPs of each unit, forward and backward of a microbatch: matrix products, convolutions
        and attention (without the saving of causal kernels)."""
        return [sum(node.flops for node in nodes) for nodes in self._counts(False)]

    def saved_bytes(self) -> list[int]:
        """Bytes of each unit that a microbatch saves for the backward."""
        return [sum(node.saved for node in nodes) for nodes in self._counts(False)]

    def recomputed_bytes(self, save: Sequence[str]) -> list[int]:
        """`saved_bytes` where a unit is recomputed but for the results of the operators `save` (as
        "aten.mm")."""

        def kept(call: Node, costs: NodeCosts) -> int:
            return costs.kept(save) if call.kind == "unit" else costs.saved

        pairs = zip(self._calls, self._counts(False), strict=True)
        return [sum(map(kept, calls, nodes)) for calls, nodes in pairs]

    def queued_bytes(self, compiled: bool) -> list[int]:
        """Bytes of each unit that wait for deferred weight gradients of a microbatch: inputs of its
        linear layers, and gradients of their results; compiled: of blocks that are."""
        counts = self._counts(True)
        return [sum(node.queued[compiled] for node in nodes) for nodes in counts]

    def peaks(self, deferred: bool) -> list[UnitPeak]:
        """The most that each unit takes while it runs: its calls, one after the other, and their
        backwards in reverse.

        deferred: weight gradients of linear layers are not computed in the backward.
        """
        peaks = []
        for calls, saved, nodes in zip(
            self._calls, self._counts(False), self._counts(deferred), strict=True
        ):
            weights = [
                sum({id(p): p.nbytes for p in self._parameters([c])}.values()) for c in calls
            ]
            forward = first = later = before = 0
            after = sum(weights)
            for node, kept, weight in zip(nodes, saved, weights, strict=True):
                after -= weight  # gradients of the calls that come before in the backward
                forward = max(forward, before + node.peak.forward)
                before += kept.saved
                first = max(first, before + node.peak.first + after)
                later = max(later, before + node.peak.later)
            peaks.append(UnitPeak(forward, first, later))
        return peaks

    def operators(self, peers: Mapping[str, GroupInfo]) -> list[list[NodeCosts]]:
        """What each call of each unit computes, as it is on the first rank of each axis, with
        weight gradients apart; those of equal calls are one object. Linear layers in float8 are
        counted in bf16.
        """
        return self._counts(True, peers)

    def times(self, device: torch.device, deferred: bool, repeats: int = 15) -> list[Times]:
        """Measured seconds of each unit and a microbatch, see `node_times`; deferred: where weight
        gradients wait, for which layers are replaced.

        Functions between units without matrix products count as free.
        """

        def measured(node: Node) -> Times:
            between = node.kind == "function" and node is not self._end
            if between and count(node, self.model, False).flops == 0:
                return 0.0, 0.0, 0.0
            return node_times(node, self.model, device, deferred, repeats)

        of_calls = self._costs(measured, (0.0, 0.0, 0.0))
        sums = ([sum(part) for part in zip(*calls, strict=True)] for calls in of_calls)
        return [(forward, inputs, weights) for forward, inputs, weights in sums]

    @property
    def signature(self) -> str:
        """A hash of what is computed: measured times are valid for an equal one."""
        keys = [[self._key(node) for node in calls] for calls in self._calls]
        return hashlib.blake2b(f"{self._parts}{keys}".encode(), digest_size=16).hexdigest()

    def _parameters(self, calls: Sequence[Node]) -> Iterator[nn.Parameter]:
        for node in calls:
            if node.kind == "unit":
                yield from self.model.get_submodule(node.target).parameters()
            values = (use.value for use in node.input_nodes)
            yield from (value for value in values if isinstance(value, nn.Parameter))

    def _counts(
        self, deferred: bool, peers: Mapping[str, GroupInfo] | None = None
    ) -> list[list[NodeCosts]]:
        """Counts of each unit's calls; peers: also what they exchange, and as if in bf16."""
        key = deferred, peers is not None

        def counted(node: Node) -> NodeCosts:
            if peers is None or node.kind != "unit":
                return count(node, self.model, deferred, peers or {})
            from titanlike.parallel.float8 import in_bf16

            with in_bf16(self.model.modules()):
                return count(node, self.model, deferred, peers)

        if key not in self._counted:
            self._counted[key] = self._costs(counted, NodeCosts())
        return self._counted[key]

    def _costs(self, cost: Callable[[Node], _T], free: _T) -> list[list[_T]]:
        """Costs of each unit's calls; equal ones are run once."""
        costs: dict[str, _T] = {}
        for node in (node for calls in self._calls for node in calls):
            key = self._key(node)
            if key not in costs:
                # getting an item of a tuple or dict is free
                on_tensors = all(use.value is not None for use in node.input_nodes)
                try:
                    costs[key] = cost(node) if on_tensors else free
                except Exception as error:  # of any kind, from the user's model
                    name = getattr(node.target, "__name__", node.target)
                    text = (str(error).strip().splitlines() or [""])[0]
                    raise CostError(
                        f"{name} alone raised {type(error).__name__}: {text}"
                    ) from error
        return [[costs[self._key(node)] for node in calls] for calls in self._calls]

    def _key(self, node: Node) -> str:
        """Equal for calls of equal cost."""
        if node not in self._keys:
            target: Hashable = getattr(node.target, "__name__", str(node.target))
            if node.kind == "unit":
                target = _settings(self.model.get_submodule(node.target))
            arguments = tree_map([list(node.args), node.kwargs], _describe)
            chunk = None if node.chunked_head is None else node.chunked_head.chunk
            is_end = node is self._end
            self._keys[node] = repr((target, arguments, node.grad_enabled, chunk, is_end))
        return self._keys[node]


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, Node):
        value = leaf.value
        return value if value is None else (tuple(value.shape), value.dtype, value.requires_grad)
    plain = leaf is None or isinstance(leaf, (bool, int, float, str, slice, torch.dtype))
    return leaf if plain else type(leaf).__name__  # without addresses, which differ between runs


def _settings(module: nn.Module) -> Hashable:
    """Classes, plain attributes and shapes of a module and its submodules."""
    parts = []
    for part in module.modules():
        named = ((key, value) for key, value in vars(part).items() if not key.endswith(_POSITIONS))
        plain = sorted(item for item in named if isinstance(item[1], (bool, int, float, str)))
        parts.append((type(part).__module__, type(part).__qualname__, plain))
    tensors = [*module.named_parameters(), *module.named_buffers()]
    shapes = [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors]
    return repr((parts, shapes))


# --- one recorded call, run alone -----------------------------------------------------------------


_META = torch.device("meta")


class Call:
    """A node's function, with its own copies of the arguments."""

    def __init__(
        self,
        node: Node,
        model: nn.Module,
        device: torch.device = _META,
        make: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """make: an argument's copy, and those of a copy of its module; None: without values, and
        its module itself."""
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
        """Arguments of a forward: (args, kwargs)."""
        values = {  # clones: a leaf that requires a gradient must not be changed in place
            use: tensor.clone() if tensor.requires_grad and not _is_weight(use) else tensor
            for use, tensor in self._inputs.items()
        }
        return with_values((self._node.args, self._node.kwargs), values, self._device)

    def forward(self, arguments: Any = None) -> list[Tensor]:
        """The results that require a gradient."""
        args, kwargs = self.arguments() if arguments is None else arguments
        with torch.set_grad_enabled(self._node.grad_enabled), self._device:
            result = self._function(*args, **kwargs)
        return [leaf for leaf in _tensors(result) if leaf.requires_grad]

    @contextmanager
    def weight_gradients(self, deferred: bool) -> Iterator[DeferredWeightGradients | None]:
        """A context in which those of its linear layers wait, if they are deferred."""
        if not deferred:
            yield None
            return
        from titanlike.parallel.weight_gradients import DeferredWeightGradients

        waiting = DeferredWeightGradients(self.module, _META)
        try:
            yield waiting
        finally:
            waiting.undo()


def _is_weight(node: Node) -> bool:
    return isinstance(node.value, nn.Parameter)


def _empty_like(tensor: Tensor) -> Tensor:
    """A tensor without values, with the same need of a gradient; a parameter itself."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return torch.empty_like(tensor).requires_grad_(tensor.requires_grad)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


# --- what it costs, counted on meta ---------------------------------------------------------------


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
EXPERTS_PRODUCT = "titanlike.expert_linear"  # the operator of `models/experts.py`
ATTENTION = "attention"
_KERNELS = "_scaled_dot_product_"  # in their names
_FREE = ("detach", "alias", "empty", "new_empty", "_unsafe_view", "lift", "unbind")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class Operator(NamedTuple):
    """What an operator does; of a matrix product its sizes, batched: rows x columns, summed
    over."""

    name: str  # "aten.mm"; ATTENTION
    flops: int
    bytes: int  # read and written
    itemsize: int  # of an element of its results, bytes
    sizes: tuple[int, int, int] | None = None  # rows, columns, sum


Operators = Mapping[Operator, int]  # operator -> how often
# axis -> (bytes that a rank sends, messages, bytes of these that are sent while it attends)
Exchanges = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class NodeCosts:
    """What a call costs a microbatch. Bytes are of storages, without those of parameters."""

    flops: int = 0  # forward and backward, of causal attention all
    saved: int = 0  # bytes that the forward keeps for the backward
    inputs: int = 0  # bytes of what it is given, of which gradients are computed
    results: Mapping[str, int] = field(
        default_factory=dict
    )  # bytes of each operator's in the forward
    # bytes that wait for weight gradients, and in compiled blocks, where each layer has a copy
    queued: tuple[int, int] = (0, 0)
    # in the forward with inputs and results; in the backward beyond what was there at its begin
    peak: UnitPeak = UnitPeak(0, 0, 0)
    # of the forward, the backward up to the inputs, and the weight gradients left
    forward: Operators = field(default_factory=dict)
    input_gradient: Operators = field(default_factory=dict)
    weight_gradient: Operators = field(default_factory=dict)
    # what the ranks of each axis exchange in the first two
    exchanged_forward: Exchanges = field(default_factory=dict)
    exchanged_backward: Exchanges = field(default_factory=dict)

    def kept(self, save: Sequence[str]) -> int:
        """Bytes that are kept of a call that runs again in the backward: what it is given, and the
        results of the operators `save`."""

        def matches(operator: str) -> bool:
            names = _ATTENTION if operator == ATTENTION else (operator,)
            return any(fnmatchcase(name, pattern) for name in names for pattern in save)

        return self.inputs + sum(size for name, size in self.results.items() if matches(name))


def count(
    node: Node,
    model: nn.Module,
    deferred: bool = False,
    peers: Mapping[str, GroupInfo] | None = None,
) -> NodeCosts:
    """deferred: the weight gradients of linear layers wait; peers: whose exchanges count."""
    call, ranks = Call(node, model), peers or {}
    trained = [weight for weight in call.weights if weight.requires_grad]
    with call.weight_gradients(deferred) as waiting:
        first = _Counter(call, ranks, waiting)
        for weight in trained:
            weight.grad = torch.empty_like(weight)
        try:
            later = _Counter(call, ranks, waiting)
        finally:
            for weight in trained:
                weight.grad = None
    made = (use for use in dict.fromkeys(node.input_nodes) if not _is_weight(use))
    values = [use.value for use in made if use.value is not None]
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
    """Runs a call forward and backward, and notes its operators and the storages that live."""

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
                    # five products for the forward's two, as many tensors again
                    flops, nbytes = operator.flops * 5 // 2, 2 * operator.bytes
                    self._noted[operator._replace(flops=flops, bytes=nbytes)] += times
            inputs, self.backward_peak = self._noted, self._peak - before
            self._noted = Counter()
            if waiting is not None:  # and where each layer has a copy of its input
                queue = [t for inputs, gradient, *_ in waiting._queue for t in (inputs, gradient)]
                sizes = {storage_id(t): t.untyped_storage().nbytes() for t in queue}
                self.queued = sum(sizes.values()), sum(sizes[storage_id(t)] for t in queue)
                waiting.take()()
        self.operators = forward, inputs, self._noted
        end = {axis: ranks.traffic for axis, ranks in peers.items()}
        self.exchanged = _difference(begin, middle), _difference(middle, end)
        for tensor in (*call.inputs, *call.weights):
            tensor.grad = None

    def attention(self, q: Tensor, k: Tensor, v: Tensor, result: Tensor, causal: bool) -> None:
        """Note a call of fused attention, which is no operator on meta."""
        width = q.shape[-1]
        flops = 2 * (q.numel() // width) * k.shape[-2] * (width + v.shape[-1])
        touched = sum(tensor.nbytes for tensor in (q, k, v, result))
        self.flops += 3 * flops
        flops //= 2 if causal else 1
        self._attention[Operator(ATTENTION, flops, touched, q.itemsize)] += 1
        # with a logsumexp for each query
        self._results[ATTENTION] += result.nbytes + 4 * (result.numel() // result.shape[-1])

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        made = _tensors(result)
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
        arguments = _tensors([args, kwargs])
        if short in ("_to_copy", "contiguous", "reshape", "clone") and not {
            *map(storage_id, arguments)
        }.isdisjoint(map(storage_id, made)):
            return result  # it was as it is to be
        sizes, flops = None, 0
        if short in _PRODUCTS:
            a, b = arguments[-2:]
            sizes = a.shape[-2], b.shape[-1], a.shape[-1]
            flops = 2 * made[0].numel() * a.shape[-1]
            self.flops += flops
        elif packet in flop_registry:
            flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
            self.flops += flops
            if _KERNELS in name:  # called by name: a ring's blocks
                name = ATTENTION
                at = [argument.name for argument in function._schema.arguments].index("is_causal")
                flops //= 2 if len(args) > at and args[at] else 1
            elif name.startswith(EXPERTS_PRODUCT):
                sizes = _of_an_expert(arguments[0], arguments[1], made[0])
        # of an expanded tensor less is read than it has elements
        read = sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in arguments)
        written = sum(tensor.nbytes for tensor in made)
        if "embedding" in short or short in ("gather", "index", "index_select"):
            read = written  # of a table only some rows
        self._noted[Operator(name, flops, read + written, made[0].itemsize, sizes)] += 1
        return result

    def _gone(self, key: int, nbytes: int) -> None:
        self._live.discard(key)
        self._now -= nbytes


def _difference(before: Exchanges, after: Exchanges) -> Exchanges:
    pairs = {axis: zip(before[axis], after[axis], strict=True) for axis in before}
    return {axis: tuple(b - a for a, b in both) for axis, both in pairs.items()}


def _of_an_expert(a: Tensor, b: Tensor, result: Tensor) -> tuple[int, int, int]:
    """Sizes of the product of one expert, where all have equally many rows: a [N, I] and b [E, O,
    I], or gradients a [N, O] and rows b [N, I] of a weight [E, O, I]."""
    if b.dim() == 3:
        return a.shape[0] // b.shape[0], b.shape[1], b.shape[2]
    return result.shape[1], result.shape[2], a.shape[0] // result.shape[0]


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


# --- how long it takes on a device ----------------------------------------------------------------


def node_times(
    node: Node, model: nn.Module, device: torch.device, deferred: bool, repeats: int = 15
) -> Times:
    """Medians, of random values; weights have gradients already, as in most microbatches.

    deferred: the weight gradients of linear layers wait.
    """

    def random_like(tensor: Tensor) -> Tensor:
        """Random floats; 0 as integer, which is a valid index anywhere; True."""
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
    """Seconds on a clock; of one thread of a CPU its own time, which other programs do not
    lengthen."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time()
    synchronize(device)
    return time.perf_counter()
