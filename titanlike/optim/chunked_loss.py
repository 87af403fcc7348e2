"""The end of a model and its loss, computed together, a few tokens at a time.

The logits of a large vocabulary take more memory than all else in the last stage. What makes them
treats each token by itself (a matrix, then at most a soft cap or a cast), and so does the cross
entropy. So the last stage takes the targets and gives the summed loss in place of logits; forward
and backward make the logits of `chunk` tokens at a time, and throw them away.

1. `find_head` looks for that end in a stage's graph: a linear layer whose result, after calls that
   treat tokens one by one, is what the forward returns.
2. `with_chunked_loss` puts one node in its place.
3. `ChunkedHead.loss_function` makes what that node calls. A layer that is a module is called once, so that FSDP's
   hooks run once around it, with another forward inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from titanlike.graph.cut import StageGraph
from titanlike.graph.pytree import tree_flatten, tree_map
from titanlike.graph.recording import DEVICE, Node, RecordError
from titanlike.optim.loss import Loss, OutputError, logits_of

_LINEAR = ("linear", "matmul", "__matmul__")
_FIX = "loss=cross_entropy"


class HeadNested(RecordError):
    """The last unit is made of modules, of which the last may do: `points` would take it apart."""

    def __init__(self, points: list[str]) -> None:
        super().__init__("its last module is no linear layer", _FIX)
        self.points = points


@dataclass(frozen=True)
class ChunkedHead:
    """x [..., D] -> logits [..., V], each token by itself."""

    head: Node  # a unit (nn.Linear) called with x, or a function of x and other tensors
    epilogue: tuple[Node, ...]  # calls on the logits and constants
    chunk: int
    loss: Loss

    @property
    def x(self) -> Node:
        return self.head.input_nodes[0]

    @property
    def others(self) -> list[Node]:
        """What a head that is a function takes beside x: weights."""
        return self.head.input_nodes[1:]

    def logits(self, head: Callable[..., Tensor], x: Tensor, others: Sequence[Tensor]) -> Tensor:
        """head: the function, or the forward of the module."""
        given = dict(zip([self.x, *self.others], [x, *others], strict=True))
        return self.glued(_called(head, self.head, given))

    def glued(self, logits: Tensor) -> Tensor:
        given = {self.head: logits}
        for node in self.epilogue:
            logits = given[node] = _called(node.target, node, given)
        return logits

    def loss_function(self, module: nn.Module | None) -> Callable[..., Tensor]:
        """(x, targets, *others) -> the summed loss, [1] fp32; module: the head, in a stage."""
        if module is None:

            def of_function(x: Tensor, targets: Tensor, *others: Tensor) -> Tensor:
                return self._sum(self.head.target, x, targets, others, ())

            return of_function

        def of_module(x: Tensor, targets: Tensor) -> Tensor:
            forward = module.forward
            own = "forward" in vars(module)

            def summed(x: Tensor, targets: Tensor) -> Tensor:
                return self._sum(forward, x, targets, (), tuple(module.parameters()))

            module.forward = summed  # type: ignore[method-assign]
            try:
                return module(x, targets)
            finally:
                if own:
                    module.forward = forward  # type: ignore[method-assign]
                else:
                    del module.forward

        return of_module

    def _sum(
        self,
        head: Callable[..., Tensor],
        x: Tensor,
        targets: Tensor,
        others: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
    ) -> Tensor:
        def loss_of(x: Tensor, targets: Tensor, others: Sequence[Tensor]) -> Tensor:
            return self.loss.total(self.logits(head, x, others), targets)

        return _InChunks.apply(loss_of, self.chunk, len(others), x, targets, *others, *weights)


class _InChunks(torch.autograd.Function):
    """The sum of `loss_of(x, targets, others)` over chunks of tokens, which backward computes again.

    Gradients of weights are added up in fp32 and rounded once, as one matrix product rounds them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss_of: Callable[..., Tensor],
        chunk: int,
        others: int,
        x: Tensor,
        targets: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        """tensors: `others` many that `loss_of` is given, then weights that it has already."""
        ctx.loss_of, ctx.chunk, ctx.weights = loss_of, chunk, tensors[others:]
        ctx.save_for_backward(x, targets, *tensors[:others])
        total = torch.zeros(1, dtype=torch.float32, device=x.device)
        for part, goals, _ in _chunks(x, targets, chunk):
            total += loss_of(part, goals, tensors[:others])
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, targets, *others = ctx.saved_tensors
        needed = ctx.needs_input_grad[5:]
        others = [t.detach().requires_grad_(t.requires_grad) for t in others]
        tensors = [*others, *ctx.weights]
        wanted = [tensor for tensor, need in zip(tensors, needed, strict=True) if need]
        sums = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in wanted]
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = of_x.view(-1, x.shape[-1])
        with torch.enable_grad():
            for part, goals, place in _chunks(x, targets, ctx.chunk):
                part = part.detach().requires_grad_()
                loss = ctx.loss_of(part, goals, others).reshape(1)
                of_part, *of_wanted = torch.autograd.grad(loss, [part, *wanted], gradient)
                rows[place] = of_part.view(-1, x.shape[-1])
                for total, more in zip(sums, of_wanted, strict=True):
                    total += more
                del loss, of_part, of_wanted
        found = iter(sums)
        of_tensors = [
            next(found).to(tensor.dtype) if need else None
            for tensor, need in zip(tensors, needed, strict=True)
        ]
        return None, None, None, of_x, None, *of_tensors


def _chunks(x: Tensor, targets: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Tokens of x [..., D] with their targets, in as many dimensions as x has."""
    rows, goals = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    for start in range(0, len(rows), size):
        place = slice(start, start + size)
        part = rows[place]
        yield part.view(*[1] * (x.dim() - 2), *part.shape), goals[place], place


def find_head(graph: StageGraph, model: nn.Module, loss: Loss) -> ChunkedHead:
    """The end of the last stage's graph. Raises RecordError where it is another."""
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
            return _no_tail(node, model)
        epilogue.insert(0, node)
        node = before[0]
    ends = {node, *epilogue}
    for other in graph.nodes:
        if other not in ends and ends.intersection(other.input_nodes):
            raise RecordError("its logits are used for something else than the loss", _FIX)
    if node.kind == "unit" and not isinstance(model.get_submodule(node.target), nn.Linear):
        return _no_tail(node, model)
    if node not in graph.nodes or node.value is None:
        raise RecordError("its last linear layer is not in the last stage", _FIX)
    head = ChunkedHead(node, tuple(epilogue), loss.chunk, loss)
    if head.x.value is None or head.x.value.shape[:-1] != logits.value.shape[:-1]:
        raise RecordError("its last linear layer gives no logits for each token", _FIX)
    if epilogue and not _one_by_one(head):
        names = ", ".join(dict.fromkeys(_name(node) for node in epilogue))
        reason = f"what it does after its last linear layer ({names}) is not done token by token"
        raise RecordError(reason, _FIX)
    return head


def with_chunked_loss(graph: StageGraph, chunked: ChunkedHead) -> StageGraph:
    """The last stage's graph with the summed loss in place of the logits."""
    targets = Node("input", "targets")
    empty = torch.empty(1, device="meta").requires_grad_(bool(chunked.x.value.requires_grad))
    head, gone = chunked.head, {chunked.head, *chunked.epilogue}
    args = (chunked.x, targets, *chunked.others)
    loss = replace(head, args=args, kwargs={}, value=empty, chunked_head=chunked)
    nodes = [node for node in graph.nodes if node not in gone]
    return replace(graph, nodes=[*nodes, targets, loss], sends=[loss], output=loss)


def loss_of_output(loss: Loss, graph: StageGraph, output: Any, targets: Tensor) -> Tensor:
    """The scaled loss of what the last stage gives."""
    tensors = [output] if isinstance(output, Tensor) else list(output)
    if graph.sends and graph.sends[0].chunked_head is not None:
        return tensors[0].sum() * loss.scale
    leaves, build = tree_flatten(graph.output)
    given = iter(tensors)
    made = [_as_made(next(given), x) if isinstance(x, Node) else x for x in leaves]
    return loss(build(made), targets)


def _as_made(tensor: Tensor, node: Node) -> Tensor:
    """In the dtype in which the model gave it: see `stage_forward.to_send`."""
    return (
        tensor
        if tensor.is_floating_point() == node.value.is_floating_point()
        else (tensor.to(node.value.dtype))
    )


def _called(call: Callable[..., Any], node: Node, given: dict[Node, Tensor]) -> Any:
    """`call` with a node's arguments, tensors in place of nodes."""
    device = next(iter(given.values())).device

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return given[leaf]
        return device if leaf is DEVICE else leaf

    args, kwargs = tree_map((node.args, node.kwargs), real)
    return call(*args, **kwargs)


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _is_head(node: Node) -> bool:
    if node.kind == "unit":
        return len(node.input_nodes) == 1 and len(node.args) == 1 and not node.kwargs
    if node.kind != "function" or _name(node) not in _LINEAR or node.value is None:
        return False
    first, *others = node.input_nodes
    return node.args[:1] == (first,) and all(map(_of_weights, others))


def _of_weights(node: Node) -> bool:
    """Whether it is a weight, or made of weights alone."""
    return node.kind == "weight" or (
        node.kind == "function"
        and bool(node.input_nodes)
        and all(map(_of_weights, node.input_nodes))
    )


def _no_tail(node: Node, model: nn.Module) -> ChunkedHead:
    """Raises what there is to say of a node that is no head and no epilogue."""
    if node.kind == "unit":
        module = model.get_submodule(node.target)
        children = [name for name, _ in module.named_children()]
        if children:
            raise HeadNested([f"{node.target}.{name}" for name in children])
        reason = f"its last module, {node.target}, is a {type(module).__name__}"
        raise RecordError(f"{reason} and not a linear layer called with one tensor", _FIX)
    raise RecordError(f"its forward ends with {_name(node)} and not with a linear layer", _FIX)


def _one_by_one(head: ChunkedHead) -> bool:
    """Whether the epilogue makes of each token's logits what it makes of them among others: tried."""
    shape = head.head.value.shape
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*[1] * (len(shape) - 2), 4, shape[-1], generator=generator)
    logits = logits.to(head.head.value.dtype)
    try:
        each = [head.glued(logits[..., i : i + 1, :].clone()) for i in range(4)]
        return torch.equal(head.glued(logits.clone()), torch.cat(each, dim=-2))
    except RuntimeError:  # sizes of the whole batch are written in it
        return False
