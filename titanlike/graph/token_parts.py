"""The recording of a rank that has a part of every sequence, of the recording of whole ones.

Each rank has the whole batch, whose ids, masks and positions are small: what is computed of the batch
and of constants alone stays whole. Where it meets a weight, or what was computed with one, the rank's
tokens are taken of it; from there on every tensor has them alone. So a position is that of the token in
the whole sequence, and no model is written for it.

Which dimensions are tokens is seen in a second recording, of shorter sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from titanlike.graph.gradient_flow import GradientFlow
from titanlike.graph.pytree import tree_flatten, tree_map
from titanlike.graph.recording import Node, Recording
from titanlike.graph.run_on_cpu import DependsOn


@dataclass(frozen=True)
class Parts:
    """Which part of a sequence a rank has."""

    ranks: int
    take: Callable[[Tensor, int], Tensor]  # (tensor, dimension of tokens) -> the rank's
    # of tensors with two dimensions of tokens, as masks: take the rank's of the first of them
    rows: bool
    # what stands in for a function that is called between units
    replaced: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    # functions whose results are about all tokens, whatever their shape, as offsets of documents
    whole: frozenset[Callable[..., Any]] = frozenset()


class UnknownTokens(ValueError):
    """A forward that cannot compute with a part of the tokens: the call, and why."""

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(f"{call}: {reason}")
        self.call, self.reason = call, reason


def with_parts(recording: Recording, shorter: Recording, parts: Parts) -> Recording:
    """`recording`, of whole sequences, as a rank computes it; shorter: of shorter ones.

    Raises UnknownTokens.
    """
    if [_call(node) for node in recording.nodes] != [_call(node) for node in shorter.nodes]:
        reason = "it makes other calls for shorter sequences, such as one for each token"
        raise UnknownTokens("its forward", reason)
    lengths = tuple(_tokens(found) for found in (recording, shorter))
    divider = _Divider(recording, parts, lengths)
    for node, other in zip(recording.nodes, shorter.nodes, strict=True):
        divider.add(node, other)
    return divider.result()


def token_dims(node: Node, other: Node) -> list[int]:
    """Dimensions whose size is another for shorter sequences."""
    if node.value is None or other.value is None:
        return []
    pairs = zip(node.value.shape, other.value.shape, strict=True)
    return [dim for dim, (a, b) in enumerate(pairs) if a != b]


def _tokens(recording: Recording) -> int:
    """Of a sequence."""
    node = next(node for node in recording.nodes if (node.kind, node.target) == ("input", "inputs"))
    return node.shape[1]


def _call(node: Node) -> tuple[Any, ...]:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.kind, name, len(node.input_nodes)


class _Divider:
    def __init__(self, recording: Recording, parts: Parts, lengths: tuple[int, ...]) -> None:
        self._recording, self._parts, self._lengths = recording, parts, lengths
        self._dims: dict[Node, list[int]] = {}
        self._whole: set[Node] = set()  # on each rank, and nodes that only take parts of these
        self._weighted: set[Node] = set()  # of these, what is computed of parameters
        self._new: dict[Node, Node] = {}  # of a node of the recording: what a rank computes
        self._taken: dict[Node, Node] = {}  # of whole tensors: the rank's tokens
        self._nodes: list[Node] = []

    def add(self, node: Node, other: Node) -> None:
        self._dims[node] = token_dims(node, other)
        if self._stays_whole(node):
            self._whole.add(node)
            if node.has_parameters or self._weighted.intersection(node.input_nodes):
                self._weighted.add(node)
            self._new[node] = node
            self._nodes.append(node)
            return
        changed = [self._argument(leaf, node) for leaf in node.input_nodes]
        given = dict(zip(node.input_nodes, changed, strict=True))
        leaves, build = tree_flatten((node.args, node.kwargs))
        shorter, _ = tree_flatten((other.args, other.kwargs))
        args, kwargs = build(
            [
                given[leaf] if isinstance(leaf, Node) else self._number(leaf, less, node)
                for leaf, less in zip(leaves, shorter, strict=True)
            ]
        )
        target = node.target if node.kind == "unit" else self._parts.replaced(node.target)
        new = replace(node, target=target, args=args, kwargs=kwargs, value=self._value(node))
        self._new[node] = new
        self._nodes.append(new)

    def _stays_whole(self, node: Node) -> bool:
        if node.kind in ("input", "weight"):
            return True
        inputs = node.input_nodes
        if not self._whole.issuperset(inputs) or (node.kind == "unit" and node.has_parameters):
            return False
        # of weights alone, as a table of positions; but not of weights and of tokens
        weighted = self._weighted.intersection(inputs)
        return not (weighted and any(self._dims[use] for use in inputs if use not in weighted))

    def _argument(self, use: Node, user: Node) -> Node:
        """What a rank has of a node that another uses, which computes with the rank's tokens."""
        if use not in self._whole or not self._divided(use):
            return self._new[use]
        if use.mutated and use.value is not None and _writes(user, use):
            raise UnknownTokens(_name(user), "it writes to a tensor that is made for all tokens")
        if use not in self._taken:
            [dim] = self._divided(use)
            value = _like(use, self._shape(use, [dim]))
            taken = Node("function", self._parts.take, (use, dim), value=value)
            taken.grad_enabled, taken.has_parameters = use.grad_enabled, False
            self._taken[use] = taken
            self._nodes.append(taken)
        return self._taken[use]

    def _number(self, leaf: Any, shorter: Any, node: Node) -> Any:
        """A number among a call's arguments: a length of the sequence becomes the rank's."""
        if isinstance(leaf, slice) and isinstance(shorter, slice):
            pairs = zip(_ends(leaf), _ends(shorter), strict=True)
            return slice(*(self._number(a, b, node) for a, b in pairs))
        if type(leaf) is not int or type(shorter) is not int or leaf == shorter:
            return leaf
        whole, less = self._lengths
        if leaf * less != shorter * whole or leaf % self._parts.ranks:
            reason = f"it is given {leaf}, which is computed from the length of the sequence"
            raise UnknownTokens(_name(node), reason)
        return leaf // self._parts.ranks

    def _value(self, node: Node) -> Tensor | None:
        if node.value is None:
            return None
        return _like(node, self._shape(node, self._divided(node)))

    def _divided(self, node: Node) -> list[int]:
        """The dimension of which the rank has a part, if there is one."""
        dims = [] if node.target in self._parts.whole else self._dims[node]
        return dims[:1] if len(dims) == 1 or self._parts.rows else []

    def _shape(self, node: Node, dims: Iterable[int]) -> list[int]:
        shape = list(node.shape)
        for dim in dims:
            shape[dim] //= self._parts.ranks
        return shape

    def result(self) -> Recording:
        recording = self._recording
        output = tree_map(
            recording.output, lambda leaf: self._new[leaf] if isinstance(leaf, Node) else leaf
        )
        flow = _Flow(recording, self._new, self._taken, self._nodes)
        return Recording(self._nodes, recording.units, output, flow, recording.module_starts)


class _Flow(GradientFlow):
    """That of the recording of whole sequences, with the nodes of a rank."""

    def __init__(
        self,
        recording: Recording,
        new: dict[Node, Node],
        taken: dict[Node, Node],
        nodes: list[Node],
    ) -> None:
        super().__init__()
        self._of_whole, self._new, self._taken = recording, new, taken
        self._at = {node: position for position, node in enumerate(nodes)}

    def last_uses(self, trained: Iterable[Tensor]) -> dict[Node, int]:
        whole, end = self._of_whole, len(self._at)
        places = [self._at[self._new[node]] for node in whole.nodes] + [end]
        found: dict[Node, int] = {}
        for node, position in whole.gradient_flow.last_uses(trained).items():
            found[self._new[node]] = places[position]
            if node in self._taken:
                found[self._taken[node]] = places[position]
        return found


def _like(node: Node, shape: list[int]) -> Tensor:
    """A tensor of another shape, at the same place of the autograd graph."""
    value = node.tensor
    result = torch.empty(shape, dtype=value.dtype, device="meta")
    return DependsOn.apply(result, value) if value.requires_grad else result


def _writes(user: Node, use: Node) -> bool:
    name = _name(user)
    first = user.args[0] if user.args else None
    return first is use and (name == "__setitem__" or name.endswith("_") and name[:2] != "__")


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _ends(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step
