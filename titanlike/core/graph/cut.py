"""Cut a recorded forward into stages: what each computes, receives and sends.

A stage computes the nodes from its first unit to the next stage's first unit. A tensor that later
stages use is sent to each of them by an earlier stage that has it, on the same rank if there is
one: a skip connection bypasses the stages in between. Masks, positions and everything else that
depends only on the batch is not sent but recomputed by each stage, as every rank of a pipeline has
the batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlike.core.graph.recording import Node, Recording, tree_flatten
from titanlike.core.torch_private.tensors import storage_id


@dataclass(frozen=True)
class StageGraph:
    """The part of a recording that one stage computes, and its inputs and outputs."""

    nodes: list[Node]  # in execution order, without received ones
    receives: list[Node]  # from the previous stage, then one for each of `skips_in`
    sends: list[Node]  # to the next stage, then `skips_out`; last stage: the tensors in `output`
    output: Any  # last stage: the model's output, with nodes in place of tensors
    differentiated: frozenset[Node]  # those of `receives` whose gradients are sent back
    differentiated_later: frozenset[Node]  # those of `sends` whose gradients are received
    skips_in: tuple[int, ...] = ()  # source stages of skip connections, the last of `receives`
    skips_out: tuple[int, ...] = ()  # target stages of skip connections, the last of `sends`

    @property
    def fields(self) -> set[str]:
        """The batch fields that the stage reads."""
        return {node.target for node in self.nodes if node.kind == "input"}

    @property
    def units(self) -> list[str]:
        return list(dict.fromkeys(node.target for node in self.nodes if node.kind == "unit"))

    @property
    def weights(self) -> list[str]:
        """Parameters and buffers that are used outside of units."""
        return list(dict.fromkeys(node.target for node in self.nodes if node.kind == "weight"))


def cut(
    recording: Recording,
    stages: Sequence[Sequence[str]],
    offsets: Sequence[int] | None = None,
    trained: Sequence[bool] | None = None,
    place: Sequence[int] | None = None,
    relayed: bool = False,
) -> list[StageGraph]:
    """Cut a recording into one graph for each stage.

    stages: names of each stage's units, in the recording's order; a stage without units sends what
    it receives. offsets: see `start_offsets`; None = computed here. trained: for each tensor of the
    output, whether the loss uses it; None = all. place: the pipeline rank of each stage; None = all
    on different ranks. relayed: skip connections too go only from each stage to the next.
    """
    position = {node: index for index, node in enumerate(recording.nodes)}
    recomputable = recording.recomputable
    output = [leaf for leaf in tree_flatten(recording.output)[0] if isinstance(leaf, Node)]
    offsets = start_offsets(recording, stages) if offsets is None else offsets
    starts = [0]
    for index, offset in zip(_first_calls(recording, stages), offsets, strict=True):
        between = recording.nodes[max(0, index - offset) : index]
        # evaluation and training may record different nodes here: never cut before a unit
        units = [place for place, node in enumerate(between, 1) if node.kind == "unit"]
        starts.append(index - len(between) + (units[-1] if units else 0))
    graphs: list[list[Node]] = []
    needed: list[set[Node]] = []  # by stage: nodes that it uses but does not compute
    for stage, (start, stop) in enumerate(pairwise([*starts, len(position)])):
        nodes = {node for node in recording.nodes[start:stop] if node not in recomputable}
        todo = [use for node in nodes for use in node.input_nodes]
        if stage == len(stages) - 1:
            todo += output
        received: set[Node] = set()
        while todo:
            node = todo.pop()
            if node in nodes:
                continue
            if node in recomputable:
                nodes.add(node)
                todo += node.input_nodes
            else:
                received.add(node)
        graphs.append(sorted(nodes, key=position.__getitem__))
        needed.append(received)
    if trained is None or len(trained) != len(output):
        trained = [True] * len(output)
    losses = [leaf.tensor for leaf, used in zip(output, trained, strict=True) if used]
    last_uses = recording.last_uses(losses)
    passed_on = sorted(set().union(*needed), key=position.__getitem__)
    homes = {node: bisect_right(starts, position[node]) - 1 for node in passed_on}
    hops = _hops(needed, homes, place or range(len(stages)), relayed)
    hops.sort(key=lambda hop: (hop.to > hop.source + 1, hop.source, hop.to, position[hop.node]))
    graphs_of_stages = []
    for stage, nodes in enumerate(graphs):
        last = stage == len(stages) - 1
        arriving = [hop for hop in hops if hop.to == stage]
        leaving = [hop for hop in hops if hop.source == stage]
        # a gradient is sent back to the source if anything after the source needs it
        back, forth = (
            frozenset(h.node for h in side if last_uses.get(h.node, -1) >= starts[h.source + 1])
            for side in (arriving, leaving)
        )
        graph = StageGraph(
            nodes,
            receives=[hop.node for hop in arriving],
            sends=output if last else [hop.node for hop in leaving],
            output=recording.output if last else None,
            differentiated=back,
            differentiated_later=frozenset(output) if last else forth,
            skips_in=tuple(hop.source for hop in arriving if hop.source < stage - 1),
            skips_out=tuple(hop.to for hop in leaving if hop.to > stage + 1),
        )
        graphs_of_stages.append(graph)
    return graphs_of_stages


class _Hop(NamedTuple):
    """A transfer of a value from one stage to another."""

    source: int
    to: int
    node: Node


def _hops(
    needed: Sequence[set[Node]], homes: dict[Node, int], place: Sequence[int], relayed: bool
) -> list[_Hop]:
    """Choose for each value and stage that uses it the stage that sends it.

    needed: by stage, nodes that it uses but does not compute; homes: node -> the stage that
    computes it; relayed: values pass through all stages in between.
    """
    holders = {node: {home} for node, home in homes.items()}
    for stage, nodes in enumerate(needed):
        for node in nodes:
            holders[node].update(range(homes[node], stage + 1) if relayed else (stage,))

    def source(node: Node, stage: int) -> int:
        if (node, stage) in forced:
            return stage - 1
        before = [holder for holder in holders[node] if holder < stage]
        return max(
            [candidate for candidate in before if place[candidate] == place[stage]] or before
        )

    # torch's runtime waits for the previous stage only, so if a stage receives anything, something
    # must come from there: the smallest value
    forced: set[tuple[Node, int]] = set()
    for stage in range(1, len(needed)):
        passing = [node for node in homes if homes[node] < stage <= max(holders[node])]
        if passing and all(
            stage not in holders[node] or source(node, stage) < stage - 1 for node in passing
        ):
            smallest = min(passing, key=_bytes)
            holders[smallest] |= {stage - 1, stage}
            forced.add((smallest, stage))
    return [
        _Hop(source(node, stage), stage, node)
        for node in homes
        for stage in holders[node]
        if stage > homes[node]
    ]


def _bytes(node: Node) -> float:
    return float("inf") if node.value is None else node.value.nbytes


def start_offsets(recording: Recording, stages: Sequence[Sequence[str]]) -> list[int]:
    """For each stage but the first, how many nodes before its first unit it begins.

    Computed once for a model: with other shapes another cut may be cheaper, and the weights that
    those nodes use would move to another stage.
    """
    firsts = _first_calls(recording, stages)
    return [first - _cheapest_cut(recording, first) for first in firsts]


def _first_calls(recording: Recording, stages: Sequence[Sequence[str]]) -> list[int]:
    """The positions where the first unit of each stage but the first is called."""
    first = recording.starts
    places = [len(recording.nodes)]
    for units in reversed(stages[1:]):
        # a unit that runs in training only is not in the recording of evaluation
        places.append(min((first[name] for name in units if name in first), default=places[-1]))
    return places[:0:-1]


def unit_starts(recording: Recording) -> list[int]:
    """For each unit: the index in `nodes` where a stage begins if this is its first unit."""
    _, *later_units = recording.starts.values()
    return [0, *(_cheapest_cut(recording, position) for position in later_units)]


def _cheapest_cut(recording: Recording, first_call: int) -> int:
    """The index between the unit called at `first_call` and the unit before it where the fewest
    bytes flow.

    A `torch.cat` with a skip connection, for example, is best left to the stage that uses it.
    """
    if recording.traced is not None:  # split=trace: exactly where the user says
        return first_call
    nodes, recomputable = recording.nodes, recording.recomputable
    places = [first_call] if first_call < len(nodes) else []
    while places and places[-1] > 0 and nodes[places[-1] - 1].kind != "unit":
        places.append(places[-1] - 1)
    if len(places) < 2:
        return first_call
    used = {
        use for node in nodes[first_call:] if node not in recomputable for use in node.input_nodes
    }
    used.update(leaf for leaf in tree_flatten(recording.output)[0] if isinstance(leaf, Node))
    crossing = {node for node in nodes[:first_call] if node in used and node not in recomputable}
    cost: dict[int, float] = {}
    for place in places:
        if place < first_call:  # this node is now the later stage's
            crossing.discard(nodes[place])
            if nodes[place] not in recomputable:
                inputs = nodes[place].input_nodes
                crossing.update(use for use in inputs if use not in recomputable)
        cost[place] = sum(map(_bytes, crossing))  # never between a tuple and its parts
    return min(places, key=lambda place: (cost[place], -place))


# --- P2P between stages ------------------------------------------------------------------------


def message_problem(graph: StageGraph) -> str:
    """Why a stage's inputs cannot be sent; empty where they can."""
    storages: dict[int, list[Node]] = {}
    for node in graph.receives:
        if node.tensor.is_complex():
            return f"a stage would begin where a tensor of {node.tensor.dtype} is passed on"
        if node.sized_by_values:
            return (
                "a stage would begin where a tensor is passed on whose size depends on values, as "
                "x[mask] has it, and sizes of messages are fixed; x * mask instead"
            )
        storages.setdefault(storage_id(node.tensor), []).append(node)
    for nodes in storages.values():
        if len(nodes) > 1 and any(node.mutated for node in nodes):
            between = "a view of a tensor and a change of it in place"
            return f"a stage would begin between {between}, which the view would not reflect"
    return ""


def message(node: Node, differentiated: bool = True) -> Tensor:
    """A meta tensor with the shape and dtype in which a node's value is sent.

    differentiated: whether a gradient comes back; sets `requires_grad`.

    Only floating-point tensors with a gradient are sent between stages (torch 2.11 sends no
    others): integers become fp64, which holds them exactly up to 2**53.
    """
    value = node.tensor
    dtype = value.dtype if value.is_floating_point() else torch.float64
    return torch.empty(value.shape, dtype=dtype, device="meta", requires_grad=differentiated)


def messages(graph: StageGraph) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that a stage receives and those it sends, on meta, skip connections last."""

    def metas(nodes: list[Node], skips: int, differentiated: frozenset[Node]) -> list[Tensor]:
        adjacent = len(nodes) - skips  # torch's runtime sends a gradient for each of these
        return [
            message(n, index < adjacent or n in differentiated) for index, n in enumerate(nodes)
        ]

    return (
        metas(graph.receives, len(graph.skips_in), graph.differentiated),
        metas(graph.sends, len(graph.skips_out), graph.differentiated_later),
    )


def same_messages(graph: StageGraph, other: StageGraph) -> bool:
    """Whether two stages send and receive tensors of equal shapes and dtypes, so that one can
    replace the other; a last stage's output is not sent."""

    def forms(graph: StageGraph) -> list[Any]:
        if graph.output is not None:
            graph = replace(graph, sends=[])
        both = [[(tensor.shape, tensor.dtype) for tensor in part] for part in messages(graph)]
        return [*both, graph.skips_in, graph.skips_out]

    return forms(graph) == forms(other)
