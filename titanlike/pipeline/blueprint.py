"""A model on the meta device and the stages that it is cut into, for batches of any shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from titanlike.pipeline.cut import StageGraph, cut
from titanlike.pipeline.record import Recording, record
from titanlike.pipeline.units import units

Batch = dict[str, Tensor]


class Field(NamedTuple):
    """Shape and dtype of a batch's field, without its first dimension (sequences)."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Fields = dict[str, Field]


class Blueprint:
    """Gives each stage's graph; a shape that was met before costs nothing."""

    def __init__(self, model: nn.Module, fields: Fields, rows: int, points: Sequence[str]) -> None:
        """model: on meta, in the dtype in which it computes; fields: of what the model takes;
        rows: sequences in a microbatch; points: modules that must not be inside of a unit.

        Raises RecordError.
        """
        self.model, self.rows = model, rows
        found = {unit.name: unit for unit in units(model, points)}
        self._names = list(found)
        self._recordings: dict[tuple[object, bool], Recording] = {}
        self.fields = fields
        # in the order in which they run
        self.units = [found[name] for name in self.recording(fields, True).units]
        self.stages: list[list[str]] = []

    def recording(self, fields: Fields, training: bool) -> Recording:
        """The model's forward on a microbatch of such fields."""
        key = (shapes(fields), training)
        if key not in self._recordings:
            batch = {
                name: torch.empty(self.rows, *field.shape, dtype=field.dtype, device="meta")
                for name, field in fields.items()
            }
            self.model.train(training)
            self._recordings[key] = record(self.model, batch, self._names)
        return self._recordings[key]

    def graphs(self, fields: Fields, training: bool) -> list[StageGraph]:
        """What each of `stages` does with such a microbatch."""
        return cut(self.recording(fields, training), self.stages)

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

    def repeats(self, graph: StageGraph) -> bool:
        """Whether a stage uses a weight more than once in a forward."""
        used: Counter[int] = Counter()
        for node in graph.nodes:
            if node.kind == "unit":
                used.update(id(p) for p in self.model.get_submodule(node.target).parameters())
            used.update(id(use.value) for use in node.uses if use.kind == "weight" and use.weighs)
        return max(used.values(), default=0) > 1

    def canonical(self) -> dict[str, str]:
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
