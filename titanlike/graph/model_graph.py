"""A model on the meta device and the stages that it is cut into, for batches of any shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlike.graph.cut import StageGraph, calls_before, cut
from titanlike.graph.find_units import find_units
from titanlike.graph.pytree import tree_map
from titanlike.graph.record_forward import record_forward
from titanlike.graph.recording import Node, Recording
from titanlike.graph.trace_forward import trace_forward
from titanlike.graph.unit import Unit

Batch = dict[str, Tensor]


class Field(NamedTuple):
    """Shape and dtype of a batch's field, without its first dimension (sequences)."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Fields = dict[str, Field]


class ModelGraph:
    """Gives each stage's graph; a shape that was met before costs nothing."""

    def __init__(
        self,
        model: nn.Module,
        fields: Fields,
        microbatch_size: int,
        points: Sequence[str],
        *,
        traced: bool = False,
    ) -> None:
        """model: on meta, in the dtype in which it computes; fields: of what the model takes;
        microbatch_size: sequences in a microbatch; points: modules that must not be inside of a unit;
        traced: by torch's tracer, so that the units are all modules, at any depth.

        Raises RecordError.
        """
        self.model, self.microbatch_size = model, microbatch_size
        found = {unit.name: unit for unit in find_units(model, points)}
        self._names, self._traced = list(found), traced
        self._recordings: dict[tuple[object, bool], Recording] = {}
        # of each module, in training and in evaluation: a model's own train() may say otherwise
        self.training_flags: dict[bool, dict[str, bool]] = {}
        self.fields = fields
        # in the order in which they run
        names = self.recording(fields, True).units
        self.units = [found.get(name, Unit(name, block=False)) for name in names]
        self.stages: list[list[str]] = []
        # of the last stage's graph: the same with the loss at its end, see `optim/chunked_loss.py`
        self.last_stage: Callable[[StageGraph], StageGraph] = lambda graph: graph

    def recording(self, fields: Fields, training: bool) -> Recording:
        """The model's forward on a microbatch of such fields."""
        key = (shapes(fields), training)
        if key not in self._recordings:
            batch = {
                name: torch.empty(
                    self.microbatch_size, *field.shape, dtype=field.dtype, device="meta"
                )
                for name, field in fields.items()
            }
            self.model.train(training)
            self.training_flags[training] = {
                name: m.training for name, m in self.model.named_modules()
            }
            if self._traced:
                self._recordings[key] = trace_forward(self.model, batch)
            else:
                self._recordings[key] = record_forward(self.model, batch, self._names)
        return self._recordings[key]

    def graphs(self, fields: Fields, training: bool) -> list[StageGraph]:
        """What each of `stages` does with such a microbatch."""
        first = self.recording(self.fields, True)
        back = calls_before(first, self.stages)
        *others, last = cut(self.recording(fields, training), self.stages, back)
        return [*others, self.last_stage(last)]

    def stage_modules(self) -> list[tuple[list[str], list[str]]]:
        """Units and weights of each stage, of what it does in training or in evaluation."""
        both = (self.graphs(self.fields, training) for training in (True, False))
        return [
            (
                list(dict.fromkeys([*graph.units, *other.units])),
                list(dict.fromkeys([*graph.weights, *other.weights])),
            )
            for graph, other in zip(*both, strict=True)
        ]

    def meta_output(self, fields: Fields, training: bool) -> Any:
        """What the model returns for such a microbatch, on meta."""
        output = self.recording(fields, training).output
        return tree_map(output, lambda leaf: leaf.value if isinstance(leaf, Node) else leaf)

    def parameters_of(self, graph: StageGraph) -> dict[str, nn.Parameter]:
        """What a stage holds, under the names that the whole model lists them by.

        A tied weight has one name there, whichever module uses it.
        """
        names = {id(p): name for name, p in self.model.named_parameters()}
        held = [p for unit in graph.units for p in self.model.get_submodule(unit).parameters()]
        for name in graph.weights:
            path, _, last = name.rpartition(".")
            value = getattr(self.model.get_submodule(path), last)
            held += [value] if isinstance(value, nn.Parameter) else []
        return {names[id(p)]: p for p in held}

    def reuses_weights(self, graph: StageGraph) -> bool:
        """Whether a stage uses a weight more than once in a forward."""
        used: Counter[int] = Counter()
        for node in graph.nodes:
            if node.kind == "unit":
                used.update(id(p) for p in self.model.get_submodule(node.target).parameters())
            used.update(id(use.value) for use in node.uses if use.kind == "weight" and use.weighs)
        return max(used.values(), default=0) > 1 or any(node.repeats for node in graph.nodes)

    def canonical_names(self) -> dict[str, str]:
        """Every name of every parameter -> the one that the whole model lists it by."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        everything = self.model.named_parameters(remove_duplicate=False)
        return {name: names[id(p)] for name, p in everything}


def fields_of(batch: Batch) -> Fields:
    """What the model takes of a batch: all but the targets."""
    return {
        name: Field(tuple(tensor.shape[1:]), tensor.dtype)
        for name, tensor in batch.items()
        if name != "targets"
    }


def shapes(fields: Fields) -> tuple[tuple[str, Field], ...]:
    """What a recording holds for."""
    return tuple(sorted(fields.items()))
