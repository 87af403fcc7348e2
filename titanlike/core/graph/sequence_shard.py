"""Derive the recording of a rank that has a shard of each sequence from that of full sequences.

Each rank has the full batch, whose ids, masks and positions are small: values computed only from
the batch and constants stay full. Where such a value meets a weight, or a value computed with one,
it is sliced to the rank's tokens; from there on every tensor has only those. So positions are those
in the full sequence, and models need no code for it.

A second recording, with shorter sequences, shows which dimensions are tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from titanlike.core.graph.recording import Node, Recording, UnknownTokens, tree_flatten, with_values
from titanlike.core.graph.units import DependsOn


@dataclass(frozen=True)
class SequenceShard:
    """Which shard of a sequence a rank has."""

    ranks: int
    take: Callable[[Tensor, int], Tensor]  # (tensor, token dimension) -> the rank's shard
    # whether tensors with two token dimensions, such as masks, are sharded along the first
    rows: bool
    # replaces a function that is called between units
    replaced: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    # functions whose results cover all tokens whatever their shape, e.g. offsets of documents
    whole: frozenset[Callable[..., Any]] = frozenset()


def shard_sequence(recording: Recording, shorter: Recording, shard: SequenceShard) -> Recording:
    """Shard `recording`, of full sequences; shorter: a recording of shorter ones. Raises
    UnknownTokens."""
    calls, shorter_calls = (
        [(node.kind, node.name, len(node.input_nodes)) for node in each.nodes]
        for each in (recording, shorter)
    )
    if calls != shorter_calls:
        reason = "it makes other calls for shorter sequences, such as one for each token"
        raise UnknownTokens("its forward", reason)
    inputs_index = calls.index(("input", "inputs", 0))
    lengths = [each.nodes[inputs_index].shape[1] for each in (recording, shorter)]
    divider = _Divider(shard, *lengths)
    for node, other in zip(recording.nodes, shorter.nodes, strict=True):
        divider.add(node, other)
    new, taken = divider.new, divider.taken

    def last_uses(trained: Iterable[Tensor]) -> dict[Node, int]:
        position = {node: index for index, node in enumerate(divider.nodes)}
        places = [*(position[new[node]] for node in recording.nodes), len(position)]
        uses: dict[Node, int] = {}
        for node, place in recording.last_uses(trained).items():
            uses[new[node]] = places[place]
            if node in taken:
                uses[taken[node]] = places[place]
        return uses

    return Recording(divider.nodes, with_values(recording.output, new), last_uses, recording.traced)


class _Divider:
    def __init__(self, shard: SequenceShard, length: int, shorter: int) -> None:
        """length, shorter: sequence lengths in the two recordings."""
        self._shard, self._length, self._shorter = shard, length, shorter
        self._dims: dict[Node, list[int]] = {}  # dims whose size depends on the sequence length
        self._whole: set[Node] = set()  # values that stay full on each rank
        self._weighted: set[Node] = set()  # those of `_whole` that depend on parameters
        self.new: dict[Node, Node] = {}  # node of the recording -> what a rank computes
        self.taken: dict[Node, Node] = {}  # full value -> its slice of the rank's tokens
        self.nodes: list[Node] = []

    def add(self, node: Node, other: Node) -> None:
        """Add the rank's version of a node; other: the same node with shorter sequences."""
        self._dims[node] = []
        if node.value is not None and other.value is not None:
            sizes = enumerate(zip(node.shape, other.shape, strict=True))
            self._dims[node] = [dim for dim, (size, less) in sizes if size != less]
        if self._stays_whole(node):
            self._whole.add(node)
            if node.has_parameters or self._weighted.intersection(node.input_nodes):
                self._weighted.add(node)
            self.new[node] = node
        else:
            inputs = {use: self._argument(use, node) for use in node.input_nodes}
            leaves, build = tree_flatten((node.args, node.kwargs))
            shorter, _ = tree_flatten((other.args, other.kwargs))
            args, kwargs = build(
                [
                    inputs[leaf] if isinstance(leaf, Node) else self._number(leaf, less, node)
                    for leaf, less in zip(leaves, shorter, strict=True)
                ]
            )
            target = node.target if node.kind == "unit" else self._shard.replaced(node.target)
            value = None if node.value is None else self._part(node, self._divided(node))
            self.new[node] = replace(node, target=target, args=args, kwargs=kwargs, value=value)
        self.nodes.append(self.new[node])

    def _stays_whole(self, node: Node) -> bool:
        if node.kind in ("input", "weight"):
            return True
        inputs = node.input_nodes
        if not self._whole.issuperset(inputs) or (node.kind == "unit" and node.has_parameters):
            return False
        # computed only from weights, e.g. a position table; but not from weights and tokens
        weighted = self._weighted.intersection(inputs)
        return not (weighted and any(self._dims[use] for use in inputs if use not in weighted))

    def _argument(self, use: Node, user: Node) -> Node:
        """The rank's version of an input of `user`, which computes with the rank's tokens."""
        if use not in self._whole or not self._divided(use):
            return self.new[use]
        name = user.name
        writes = name == "__setitem__" or (name.endswith("_") and name[:2] != "__")
        if use.mutated and use.value is not None and writes and user.args[:1] == (use,):
            raise UnknownTokens(name, "it writes to a tensor that is made for all tokens")
        if use not in self.taken:
            [dim] = self._divided(use)
            taken = Node("function", self._shard.take, (use, dim), value=self._part(use, [dim]))
            taken.grad_enabled = use.grad_enabled
            self.taken[use] = taken
            self.nodes.append(taken)
        return self.taken[use]

    def _number(self, leaf: Any, shorter: Any, node: Node) -> Any:
        """Convert a number among a call's arguments: a sequence length becomes the rank's."""
        if isinstance(leaf, slice) and isinstance(shorter, slice):
            ends = ("start", "stop", "step")
            pairs = [(getattr(leaf, end), getattr(shorter, end)) for end in ends]
            return slice(*(self._number(a, b, node) for a, b in pairs))
        if type(leaf) is not int or type(shorter) is not int or leaf == shorter:
            return leaf
        if leaf * self._shorter != shorter * self._length or leaf % self._shard.ranks:
            reason = f"it is given {leaf}, which is computed from the length of the sequence"
            raise UnknownTokens(node.name, reason)
        return leaf // self._shard.ranks

    def _divided(self, node: Node) -> list[int]:
        """The dimension along which the rank has a shard of a node: [] or one."""
        dims = [] if node.target in self._shard.whole else self._dims[node]
        return dims[:1] if len(dims) == 1 or self._shard.rows else []

    def _part(self, node: Node, dims: Sequence[int]) -> Tensor:
        """A meta tensor like the node's, with the rank's size of `dims` and the same autograd
        history."""
        shape = [
            size // (self._shard.ranks if dim in dims else 1) for dim, size in enumerate(node.shape)
        ]
        result = torch.empty(shape, dtype=node.tensor.dtype, device="meta")
        return DependsOn.apply(result, node.tensor) if node.tensor.requires_grad else result
