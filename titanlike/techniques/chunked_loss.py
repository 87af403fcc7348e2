"""Fuse the language model head with the cross entropy, `chunk` tokens at a time.

With a large vocabulary, logits take more memory than everything else on the last stage. The head (a
linear layer, then at most a soft cap or a cast) and the cross entropy work token by token, so the
last stage receives the targets and returns the summed loss instead of logits. Only the logits of
`chunk` tokens exist at a time; they are freed once their loss and gradients are computed.

1. `find_head` finds the head in the last stage's graph: a linear layer, then token-wise operations
   (the epilogue) whose result the forward returns.
2. `with_chunked_loss` replaces head and epilogue by one node.
3. `ChunkedHead.loss_function` makes the function of that node. If the head is a module, the module
   is called once with a patched forward, so that FSDP's hooks run once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from titanlike.core.distributed.placement import gathered_parts, style_of
from titanlike.core.graph.cut import StageGraph
from titanlike.core.graph.loss import Loss, OutputError
from titanlike.core.graph.recording import Node, RecordError, with_values
from titanlike.core.optim.loss import logits_of
from titanlike.core.torch_private.tensors import add_values

_LINEAR = ("linear", "matmul", "__matmul__")
_FIX = "loss=cross_entropy"


class HeadNested(RecordError):
    """The last unit is a container whose last module may be the head, if it is split at `points`."""

    def __init__(self, points: list[str]) -> None:
        super().__init__("its last module is not a linear layer", _FIX)
        self.points = points


@dataclass(frozen=True)
class ChunkedHead:
    """A head, x [..., D] -> logits [..., V] token by token, and its loss."""

    head: Node  # a unit (nn.Linear) called with x, or a function of x and weights
    epilogue: tuple[Node, ...]  # operations on the logits and constants
    chunk: int  # tokens
    loss: Loss

    @property
    def x(self) -> Node:
        return self.head.input_nodes[0]

    @property
    def weights(self) -> list[Node]:
        """Arguments other than x, if the head is a function."""
        return self.head.input_nodes[1:]

    def loss_function(self, module: nn.Module | None) -> Callable[..., Tensor]:
        """Make a function (x, targets, *weights) -> summed loss, fp32 [1].

        module: the head on this stage, or None if it is a function.
        """
        if module is None:
            return partial(self._in_chunks, self.head.target, ())

        def with_module(x: Tensor, targets: Tensor) -> Tensor:
            forward = partial(self._in_chunks, module.forward, tuple(module.parameters()))
            with patch.object(module, "forward", forward):
                return module(x, targets)

        return with_module

    def _in_chunks(
        self,
        head: Callable[..., Tensor],
        parameters: tuple[Tensor, ...],
        x: Tensor,
        targets: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        """Compute the summed loss. parameters: of the head's module; weights: arguments of `head`."""

        def logits_of(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
            values = dict(zip([self.x, *self.weights], [x, *weights], strict=True))
            return self.apply_epilogue(_call(head, self.head, values))

        totals: list[Tensor] = []
        for part, goals, weight in self.loss.predictions(x, targets):
            watch = None if totals else self.loss.watch
            chunks = _Chunks(logits_of, self, torch.is_grad_enabled(), len(weights), watch)
            total = _LossInChunks.apply(chunks, part, goals, *weights, *parameters)
            totals.append(total if weight == 1.0 else weight * total)
        return sum(totals[1:], start=totals[0])

    def apply_epilogue(self, logits: Tensor) -> Tensor:
        values = {self.head: logits}
        for node in self.epilogue:
            logits = values[node] = _call(node.target, node, values)
        return logits


class _LossInChunks(torch.autograd.Function):
    """The summed loss of a head's logits, a chunk of tokens at a time.

    Gradients are linear in the incoming gradient, so the forward computes those of x and of the
    weights as well, and the backward scales them: three matmuls per chunk, without recomputing the
    logits. The weights' gradients stay in memory until the backward; where several forwards precede
    it, they are computed in the backward instead. They are accumulated in fp32 and rounded once, as
    in a single matmul. Idea: arXiv 2410.10989.
    """

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, x: Tensor, targets: Tensor, *tensors: Tensor) -> Tensor:
        """tensors: weights, then parameters."""
        x_needed, _, *others = ctx.needs_input_grad[1:]
        needed = [chunks.trained and need for need in (x_needed, *others)]
        ctx.chunks, ctx.needed = replace(chunks, watch=None), needed  # `watch` is called here alone
        ctx.done = any(needed) and chunks.head.loss.backward_follows
        if ctx.done:
            total, gradients = chunks.gradients(x, targets, tensors, needed)
            ctx.dtypes = [tensor.dtype for tensor in (x, *tensors)]
            ctx.save_for_backward(*gradients)
            return total
        ctx.parameters = tensors[chunks.weights :]
        ctx.save_for_backward(x, targets, *tensors[: chunks.weights])
        return chunks.total(x, targets, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        if ctx.done:
            assert ctx.chunks is not None, "the gradients are scaled in place, once"
            ctx.chunks = None
        else:
            x, targets, *weights = gradients
            tensors = *weights, *ctx.parameters
            _, gradients = ctx.chunks.gradients(x, targets, tensors, ctx.needed)
            ctx.dtypes = [tensor.dtype for tensor in (x, *tensors)]
        grad_x, *grad_tensors = (
            None if gradient is None else _scaled(gradient, scale, dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return None, grad_x, None, *grad_tensors


def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if gradient.dtype == dtype:
        return gradient.mul_(scale)
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))  # rounds


@dataclass(frozen=True)
class _Chunks:
    """The settings of one call of `_LossInChunks`."""

    logits_of: Callable[[Tensor, Sequence[Tensor]], Tensor]  # (x, weights) -> logits
    head: ChunkedHead
    trained: bool  # whether gradients are computed
    weights: int  # number of leading tensors passed to `logits_of`; the rest are module parameters
    watch: Callable[[Any, Tensor], object] | None  # see `Loss`

    def total(self, x: Tensor, targets: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Compute the summed loss, fp32 [1]; in training with the same bits as `gradients`."""
        total = torch.zeros(1, dtype=torch.float32, device=x.device)
        for part, goals, _ in _chunks(x, targets, self.head.chunk):
            logits = self.logits_of(part, tensors[: self.weights])
            if self.watch is not None:
                self.watch(logits, goals.view(logits.shape[:-1]))
            if self.trained:
                total += self.head.loss.total_and_gradient(logits, goals)[0]
            else:
                total += self.head.loss.evaluated(logits, goals)
        return total

    def gradients(
        self, x: Tensor, targets: Tensor, tensors: Sequence[Tensor], needed: Sequence[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Compute the summed loss, fp32 [1], and gradients: x's in its dtype, the tensors' in fp32,
        None where `needed` is False."""
        total = torch.zeros(1, dtype=torch.float32, device=x.device)
        weights = [t.detach().requires_grad_(t.requires_grad) for t in tensors[: self.weights]]
        pairs = zip([*weights, *tensors[self.weights :]], needed[1:], strict=True)
        trained = [tensor for tensor, need in pairs if need]
        sums: list[Tensor] = []
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = grad_x.view(-1, x.shape[-1])
        for part, goals, place in _chunks(x, targets, self.head.chunk):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                logits = self.logits_of(part, weights)
            if self.watch is not None:
                self.watch(logits, goals.view(logits.shape[:-1]))
            part_total, gradient = self.head.loss.total_and_gradient(logits, goals)
            total += part_total
            edge = get_gradient_edge(logits)  # the backward does not need the logits themselves
            del logits
            grad_part, *grads = torch.autograd.grad([edge], [part, *trained], [gradient])
            del edge, gradient
            rows[place] = grad_part.view(-1, x.shape[-1])
            if sums:
                add_values(sums, grads)
            else:
                sums = [each.float() for each in grads]
            del grad_part, grads
        summed = iter(sums)
        grad_tensors = (next(summed) if need else None for need in needed[1:])
        return total, [grad_x if needed[0] else None, *grad_tensors]


def _chunks(x: Tensor, targets: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Yield (x, targets, rows) of each chunk of x [..., D], without changing x's number of dims."""
    rows, goals = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    for start in range(0, len(rows), size):
        place = slice(start, start + size)
        part = rows[place]
        yield part.view(*[1] * (x.dim() - 2), *part.shape), goals[place], place


def find_head(graph: StageGraph, model: nn.Module, loss: Loss) -> ChunkedHead:
    """Find the head in the last stage's graph. Raises RecordError if it cannot be chunked."""
    assert loss.chunk is not None
    try:
        logits = logits_of(graph.output)
    except OutputError as error:
        raise RecordError(str(error), _FIX) from None
    epilogue: list[Node] = []
    node = logits
    while not _is_head(node):
        before = list(dict.fromkeys(node.input_nodes))
        if node.kind != "function" or len(before) != 1 or node.value is None or node.random:
            raise _no_head_error(node, model)
        epilogue.insert(0, node)
        node = before[0]
    ends = {node, *epilogue}
    for other in graph.nodes:
        if other not in ends and ends.intersection(other.input_nodes):
            raise RecordError("its logits are used for more than the loss", _FIX)
    module = model.get_submodule(node.target) if node.kind == "unit" else None
    if module is not None and not isinstance(module, nn.Linear):
        raise _no_head_error(node, model)
    if node not in graph.nodes or node.value is None:
        raise RecordError("its last linear layer is not in the last stage", _FIX)
    head = ChunkedHead(node, tuple(epilogue), loss.chunk, loss)
    tokens = list(head.x.shape[:-1]) if head.x.value is not None else [-1]
    if module is not None and tokens:  # it all-gathers the tokens of sequence-parallel ranks
        tokens[-1] *= gathered_parts(module)
    if tokens != list(logits.value.shape[:-1]):
        raise RecordError("its last linear layer does not return logits for each token", _FIX)
    style = "" if module is None else style_of(module)
    if style not in ("", "vocab", "sequence", "replicate"):
        reason = f"tensor parallelism divides its last linear layer as {style}"
        raise RecordError(reason, f"vocab in its tp_plan, or {_FIX}")
    if epilogue and not _is_token_wise(head):
        names = ", ".join(dict.fromkeys(node.name for node in epilogue))
        reason = f"what it does after its last linear layer ({names}) is not done token by token"
        raise RecordError(reason, _FIX)
    return head


def with_chunked_loss(graph: StageGraph, chunked: ChunkedHead) -> StageGraph:
    """Return the last stage's graph with the summed loss in place of the logits."""
    targets = Node("input", "targets")
    empty = torch.empty(1, device="meta").requires_grad_(bool(chunked.x.tensor.requires_grad))
    args = (chunked.x, targets, *chunked.weights)
    loss = replace(chunked.head, args=args, kwargs={}, value=empty, chunked_head=chunked)
    remaining = [node for node in graph.nodes if node not in (chunked.head, *chunked.epilogue)]
    return replace(
        graph,
        nodes=[*remaining, targets, loss],
        sends=[loss],
        output=loss,
        differentiated_later=frozenset([loss]),
    )


def _call(function: Callable[..., Any], node: Node, values: dict[Node, Tensor]) -> Any:
    """Call a function with a node's arguments, its input nodes replaced by tensors."""
    device = next(iter(values.values())).device
    args, kwargs = with_values((node.args, node.kwargs), values, device)
    return function(*args, **kwargs)


def _is_head(node: Node) -> bool:
    if node.kind == "unit":
        return len(node.input_nodes) == 1 and len(node.args) == 1 and not node.kwargs
    if node.kind != "function" or node.name not in _LINEAR or node.value is None:
        return False
    first, *others = node.input_nodes
    return node.args[:1] == (first,) and all(map(_is_weight, others))


def _is_weight(node: Node) -> bool:
    """Whether a node is a weight, or computed only from weights."""
    inputs = node.input_nodes if node.kind == "function" else ()
    return node.kind == "weight" or (bool(inputs) and all(map(_is_weight, inputs)))


def _no_head_error(node: Node, model: nn.Module) -> RecordError:
    """Return the error for a node that is neither head nor epilogue."""
    if node.kind == "unit":
        module = model.get_submodule(node.target)
        children = [name for name, _ in module.named_children()]
        if children:
            return HeadNested([f"{node.target}.{name}" for name in children])
        reason = f"its last module, {node.target}, is a {type(module).__name__}"
        return RecordError(f"{reason} and not a linear layer called with one tensor", _FIX)
    return RecordError(f"its forward ends with {node.name} and not with a linear layer", _FIX)


def _is_token_wise(head: ChunkedHead) -> bool:
    """Whether the epilogue gives the same result token by token as for all tokens, on random
    logits."""
    shape = head.head.shape
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*[1] * (len(shape) - 2), 4, shape[-1], generator=generator)
    logits = logits.to(head.head.tensor.dtype)
    try:
        alone = [head.apply_epilogue(logits[..., i : i + 1, :].clone()) for i in range(4)]
        return torch.equal(head.apply_epilogue(logits.clone()), torch.cat(alone, dim=-2))
    except RuntimeError:  # the epilogue contains sizes of the full batch
        return False
