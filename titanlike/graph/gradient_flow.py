"""Between which calls of a recorded forward a gradient flows.

A stage may use a tensor of an earlier one without needing its gradient: `x.detach()`, `x > 0`, an
output that the loss ignores. The backward of one process then computes no gradient along that way,
and a parameter that has no other way to the loss has none at all: it is neither updated nor
decayed. So such a tensor is sent as a value, and no gradient flows back, see `cut.py`.

The recorded values have autograd graphs (on meta): they are read here and never run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from titanlike.graph.recording import Node

_Edge = tuple[Hashable, int]  # a function of the autograd graph, and which of its results


class GradientFlow:
    """Which call made each function of the autograd graph, while a forward is recorded."""

    def __init__(self) -> None:
        self._position: dict[Hashable, int] = {}  # of the node whose call made the function
        self._edges: dict[Node, _Edge] = {}
        self._nodes: list[Node] = []

    def add(self, node: Node) -> None:
        """To be called with each node when it is recorded: its value may be changed later."""
        value = node.value
        if value is not None and value.grad_fn is not None:
            self._edges[node] = _edge(value)
            for function in _functions_before([value], self._position.__contains__):
                self._position[function] = len(self._nodes)
        self._nodes.append(node)

    def last_uses(self, trained: Iterable[Tensor]) -> dict[Node, int]:
        """Node -> the position of the last call from which it gets a gradient; the number of nodes
        where the loss itself uses it. Without an entry it gets none.

        trained: the outputs of the model that the loss depends on.
        """
        end = len(self._nodes)
        trained = [value for value in trained if value.grad_fn is not None]
        last = {_edge(value): end for value in trained}
        for function in _functions_before(trained):
            position = self._position.get(function, end)
            for edge in function.next_functions:
                last[edge] = max(position, last.get(edge, -1))
        found = {node: last[edge] for node, edge in self._edges.items() if edge in last}
        for node in self._nodes:
            if node.mutated and node.tensor.requires_grad:
                found[node] = end  # its place in the graph changed: any later call may use it
        return found


def used_by(total: Tensor, outputs: Sequence[Tensor]) -> list[bool]:
    """For each output, whether `total` is computed of it, and not only of what is computed of it."""
    ends = {value.grad_fn for value in outputs}
    functions = _functions_before([total], ends.__contains__)
    edges = {edge for f in functions for edge in f.next_functions}
    edges.add(_edge(total))
    return [value.grad_fn is not None and _edge(value) in edges for value in outputs]


def _edge(value: Tensor) -> _Edge:
    return value.grad_fn, value.output_nr


def _functions_before(
    values: Iterable[Tensor], is_end: Callable[[Any], bool] = lambda _: False
) -> list[Any]:
    """The functions of the autograd graphs of these values, not the ends, nor what is before them."""
    found: dict[Hashable, None] = {}
    todo = [value.grad_fn for value in values]
    while todo:
        function = todo.pop()
        if function is not None and function not in found and not is_end(function):
            found[function] = None
            todo += [before for before, _ in function.next_functions]
    return list(found)
