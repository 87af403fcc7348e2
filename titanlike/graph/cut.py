"""A recorded forward, cut into stages: what each does, what arrives and what is sent on.

A stage runs the calls from its first unit to the next stage's. A tensor that a later stage needs is
sent from stage to stage until the last one that uses it (a skip connection is relayed by the stages
between), except what costs nothing to have anew: a stage computes masks, positions and whatever
else is made from the batch alone itself, for every rank of a pipeline holds the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from titanlike.graph.pytree import tree_flatten
from titanlike.graph.recording import Node, Recording


@dataclass(frozen=True)
class StageGraph:
    """What one stage does with batches of one shape."""

    nodes: list[Node]  # in the order in which they run; without what arrives
    arrives: list[Node]
    sends: list[Node]  # to the next stage; of the last one: the tensors in `output`
    output: Any  # of the last stage: what the model returns, with nodes in place of tensors

    @property
    def fields(self) -> set[str]:
        """Fields of the batch that it reads."""
        return {node.target for node in self.nodes if node.kind == "input"}

    @property
    def units(self) -> list[str]:
        return list(dict.fromkeys(node.target for node in self.nodes if node.kind == "unit"))

    @property
    def weights(self) -> list[str]:
        """Parameters and buffers that are used outside of units."""
        return list(dict.fromkeys(node.target for node in self.nodes if node.kind == "weight"))


def cut(
    recording: Recording, stages: Sequence[Sequence[str]], back: Sequence[int] | None = None
) -> list[StageGraph]:
    """One graph for each stage; stages: the names of its units, in the recording's order.

    A stage without units sends on what arrives. back: see `calls_before`; None = found anew.
    """
    position = {node: at for at, node in enumerate(recording.nodes)}
    everywhere = _everywhere(recording)
    output = [leaf for leaf in tree_flatten(recording.output)[0] if isinstance(leaf, Node)]
    back = calls_before(recording, stages) if back is None else back
    edges = [0, *_edges(recording, stages, back), len(position)]
    wanted: list[set[Node]] = []  # of each stage: what it uses and does not make itself
    graphs: list[list[Node]] = []
    for start, stop in pairwise(edges):
        last = stop == len(position) and len(graphs) == len(stages) - 1
        nodes = {node for node in recording.nodes[start:stop] if node not in everywhere}
        missing: set[Node] = set()
        todo = [use for node in nodes for use in node.uses] + (output if last else [])
        while todo:
            node = todo.pop()
            if node in nodes:
                continue
            if node in everywhere:
                nodes.add(node)
                todo += node.uses
            else:
                missing.add(node)
        graphs.append(sorted(nodes, key=position.__getitem__))
        wanted.append(missing)
    flows: list[list[Node]] = [[]]  # into each stage
    for stage in range(1, len(stages)):
        later = set().union(*wanted[stage:])
        before = [node for node in later if position[node] < edges[stage]]
        flows.append(sorted(before, key=position.__getitem__))
    return [
        StageGraph(
            nodes,
            flows[stage],
            output if stage == len(stages) - 1 else flows[stage + 1],
            recording.output if stage == len(stages) - 1 else None,
        )
        for stage, nodes in enumerate(graphs)
    ]


def calls_before(recording: Recording, stages: Sequence[Sequence[str]]) -> list[int]:
    """How many calls before its first unit each stage but the first begins.

    To be found once for a model: with other shapes something else may be the cheapest place, and
    weights that the calls use would move to another stage.
    """
    everywhere = _everywhere(recording)
    firsts = _first_calls(recording, stages)
    return [at - _cheapest(recording, at, everywhere) for at in firsts]


def _edges(
    recording: Recording, stages: Sequence[Sequence[str]], back: Sequence[int]
) -> Iterator[int]:
    """Where each stage but the first begins."""
    for at, more in zip(_first_calls(recording, stages), back, strict=True):
        between = recording.nodes[max(0, at - more) : at]
        # of another mode's recording the calls may be others: never into the unit before
        units = [place for place, node in enumerate(between, 1) if node.kind == "unit"]
        yield at - len(between) + (units[-1] if units else 0)


def _first_calls(recording: Recording, stages: Sequence[Sequence[str]]) -> list[int]:
    """Where the first unit of each stage but the first is called."""
    first: dict[str, int] = {}
    for at, node in enumerate(recording.nodes):
        if node.kind == "unit":
            first.setdefault(node.target, at)
    first = first or recording.begins
    places = [len(recording.nodes)]
    for units in reversed(stages[1:]):
        # a unit that runs in training alone is not there in evaluation
        places.append(min((first[name] for name in units if name in first), default=places[-1]))
    return places[:0:-1]


def starts(recording: Recording) -> list[int]:
    """Of each unit: the position in `nodes` where a stage begins whose first unit it is."""
    first: dict[str, int] = {}
    for at, node in enumerate(recording.nodes):
        if node.kind == "unit":
            first.setdefault(node.target, at)
    everywhere = _everywhere(recording)
    others = (first[name] for name in recording.units[1:])
    return [0, *(_cheapest(recording, at, everywhere) for at in others)]


def _cheapest(recording: Recording, at: int, everywhere: set[Node]) -> int:
    """Where to cut between the unit at `at` and the unit before it: where the least flows.

    A `torch.cat` with a skip connection is better done by the stage that needs it.
    """
    if recording.begins:  # the user says where
        return at
    nodes = recording.nodes
    places = [at] if at < len(nodes) else []
    while places and places[-1] > 0 and nodes[places[-1] - 1].kind != "unit":
        places.append(places[-1] - 1)
    if len(places) < 2:
        return at
    used = {use for node in nodes[at:] if node not in everywhere for use in node.uses}
    used.update(leaf for leaf in tree_flatten(recording.output)[0] if isinstance(leaf, Node))
    alive = {node for node in nodes[:at] if node in used and node not in everywhere}
    flow = {}
    for place in places:
        if place < at:  # the call there is the later stage's now
            alive.discard(nodes[place])
            if nodes[place] not in everywhere:
                alive.update(use for use in nodes[place].uses if use not in everywhere)
        flow[place] = sum(node.value.nbytes for node in alive if node.value is not None)
        if any(node.value is None for node in alive):
            flow[place] = float("inf")  # a part of a tuple stays with it
    return min(places, key=lambda place: (flow[place], -place))


def _everywhere(recording: Recording) -> set[Node]:
    """What every stage has without a message: the batch, weights, what is made of the batch alone."""
    pure: set[Node] = set()
    for node in recording.nodes:
        repeatable = not (node.random or node.weighs or node.mutated)
        if node.kind == "input" or (repeatable and pure.issuperset(node.uses)):
            pure.add(node)
    return pure | {node for node in recording.nodes if node.kind == "weight"}


def message_problem(graph: StageGraph) -> str:
    """Why what arrives at a stage cannot be sent; empty where it can."""
    storages: dict[int, list[Node]] = {}
    for node in graph.arrives:
        if node.value.is_complex():
            return f"a stage would begin where a tensor of {node.value.dtype} flows"
        storages.setdefault(node.value.untyped_storage()._cdata, []).append(node)
    for nodes in storages.values():
        if len(nodes) > 1 and any(node.mutated for node in nodes):
            return (
                "a stage would begin between a view of a tensor and a change of it in place, which "
                "the other one would not see"
            )
    return ""


def message(node: Node) -> Tensor:
    """A meta tensor shaped and typed as what is sent of a node's value.

    Only floating-point tensors with a gradient travel between stages (torch 2.11 sends no others):
    whole numbers become fp64, which holds them exactly up to 2**53.
    """
    dtype = node.value.dtype if node.value.is_floating_point() else torch.float64
    return torch.empty(node.value.shape, dtype=dtype, device="meta").requires_grad_()


def messages(graph: StageGraph) -> tuple[list[Tensor], list[Tensor]]:
    """What arrives at a stage and what it sends."""
    return [message(node) for node in graph.arrives], [message(node) for node in graph.sends]


def same_messages(graph: StageGraph, other: StageGraph) -> bool:
    """Whether two stages can take each other's place in a pipeline."""
    pairs = zip(messages(graph), messages(other), strict=True)
    return all(
        [(tensor.shape, tensor.dtype) for tensor in flow]
        == [(tensor.shape, tensor.dtype) for tensor in others]
        for flow, others in pairs
    )
