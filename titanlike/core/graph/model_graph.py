"""A model on the meta device, and the graphs of its stages for batches of any shape."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from titanlike.core.config.errors import Problem
from titanlike.core.graph.cut import StageGraph, cut, same_messages, start_offsets
from titanlike.core.graph.record_forward import record_forward
from titanlike.core.graph.recording import Recording, UnknownTokens, with_values
from titanlike.core.graph.units import Unit, find_units

if TYPE_CHECKING:  # imported where a rank has a part of every sequence
    from titanlike.core.graph.sequence_shard import SequenceShard


class Field(NamedTuple):
    """Shape (without the batch dimension) and dtype of a batch field."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Fields = dict[str, Field]


class SequenceParts(Protocol):
    """How sequences are sharded over ranks (context parallelism)."""

    @property
    def name(self) -> str:
        """A name that differs if units compute something different for equal shapes."""

    def whole(self) -> AbstractContextManager[None]:
        """A context in which the model computes with full sequences."""

    def shorter(self, fields: Fields) -> Fields:
        """The same fields with shorter sequences."""

    def shard(self, recording: Recording, shorter: Recording) -> SequenceShard:
        """Find each value's token dimension by comparing recordings of full and shorter sequences."""

    def problem(self, error: UnknownTokens) -> Problem:
        """The problem of a model in whose recordings token dimensions cannot be identified."""


class ModelGraph:
    """Records the model's forward once for each batch shape, and cuts it at `stages`."""

    def __init__(
        self,
        model: nn.Module,
        fields: Fields,
        microbatch_size: int,
        points: Sequence[str],
        *,
        traced: bool = False,
        device: str = "cpu",
        buffers: Callable[[], dict[str, Tensor]] = dict,
        before: Callable[[Fields], object] = lambda fields: None,
        sequence: SequenceParts | None = None,
    ) -> None:
        """model: on meta, in the dtype in which it computes; fields: its forward's arguments;
        points: modules where a stage begins, so they are not inside a unit; traced: with
        torch.export, so that every module, at any depth, is a unit; device: type of the run's
        device; buffers: returns the model's buffers with their values; before: called before a
        forward on such fields is recorded; sequence: if sequences are sharded over ranks. Raises
        RecordError, and UnknownTokens with `sequence`."""
        self.model, self.microbatch_size = model, microbatch_size
        self._device, self._buffers, self._before = device, buffers, before
        self._sequence = sequence
        units = {unit.name: unit for unit in find_units(model, points)}
        self._names, self._traced = list(units), traced
        self._first_names = {id(p): name for name, p in model.named_parameters()}
        self._recordings: dict[tuple[object, bool], Recording] = {}
        # mode -> module -> its `training` flag, which the model's own train() may set otherwise
        self.training_flags: dict[bool, dict[str, bool]] = {}
        self.fields = fields
        names = self.recording(fields, True).starts
        self.units = [units.get(name, Unit(name, block=False)) for name in names]
        self.stages: list[list[str]] = []  # names of each stage's units
        # each stage sends only to the next: gradients are then added from last use to first
        self.relayed = False
        self.place: Sequence[int] | None = None  # each stage's pipeline rank; None = all different
        # for each tensor of the output, whether the loss uses it; None = all
        self.trained_outputs: list[bool] | None = None
        # changes the last stage's graph: puts the loss at its end, see techniques/chunked_loss.py
        self.last_stage: Callable[[StageGraph], StageGraph] = lambda graph: graph

    @property
    def sequence_parts(self) -> str:
        """The name of `SequenceParts`; "" = sequences are not sharded."""
        return "" if self._sequence is None else self._sequence.name

    @property
    def taking_gradients(self) -> frozenset[str]:
        """Units whose forward calls autograd.grad: torch can neither recompute nor compile them."""
        nodes = self.recording(self.fields, True).nodes
        return frozenset(node.target for node in nodes if node.gradients_inside)

    def with_microbatches_of(self, size: int) -> ModelGraph:
        """Make the same stages for microbatches of `size` samples."""
        other = copy.copy(self)
        other.microbatch_size, other._recordings = size, {}
        return other

    def recording(self, fields: Fields, training: bool) -> Recording:
        """Record the model's forward on a microbatch of these fields (cached)."""
        key = (shapes(fields), training)
        if key not in self._recordings:
            self._before(fields)
            self.model.train(training)
            flags = {name: module.training for name, module in self.model.named_modules()}
            self.training_flags[training] = flags
            self._recordings[key] = (
                self._sharded(fields) if self._sequence else self._record(fields)
            )
        return self._recordings[key]

    def _sharded(self, fields: Fields) -> Recording:
        from titanlike.core.graph.sequence_shard import shard_sequence

        sequence = self._sequence
        assert sequence is not None
        with sequence.whole():
            recording, shorter = self._record(fields), sequence.shorter(fields)
            try:
                other = self._record(shorter)
            except Exception as error:  # raised by the model's forward
                text = (str(error).strip().splitlines() or [""])[0]
                tokens = shorter["inputs"].shape[0]
                reason = f"cannot be called with sequences of {tokens} tokens: {text}"
                raise UnknownTokens("its forward", reason) from error
        return shard_sequence(recording, other, sequence.shard(recording, other))

    def _record(self, fields: Fields) -> Recording:
        batch = {
            name: torch.empty(self.microbatch_size, *shape, dtype=dtype, device="meta")
            for name, (shape, dtype) in fields.items()
        }
        if self._traced:
            from titanlike.core.graph.trace_forward import trace_forward

            return trace_forward(self.model, batch)
        return record_forward(self.model, batch, self._names, self._device, self._buffers)

    def graphs(self, fields: Fields, training: bool) -> list[StageGraph]:
        """Cut the recording for such a microbatch into the graph of each stage (cached)."""
        graphs = self._cut(fields, training)
        if any(graph.skips_in for graph in graphs):  # evaluation must send the same skips, or none
            other = self._cut(fields, not training)
            if not all(map(same_messages, graphs[:-1], other)):
                graphs = self._cut(fields, training, relayed=True)
        return [*graphs[:-1], self.last_stage(graphs[-1])]

    def _cut(self, fields: Fields, training: bool, relayed: bool = False) -> list[StageGraph]:
        offsets = start_offsets(self.recording(self.fields, True), self.stages)
        recording = self.recording(fields, training)
        place, relayed = (None, True) if self.relayed else (self.place, relayed)
        return cut(recording, self.stages, offsets, self.trained_outputs, place, relayed)

    def stage_modules(
        self, training: Sequence[StageGraph], evaluation: Sequence[StageGraph]
    ) -> list[tuple[list[str], list[str]]]:
        """(units, weights used outside of units) of each stage, in training or evaluation; the
        first stage also has the parameters that the forward does not use."""
        stages = [
            (list(dict.fromkeys(a.units + b.units)), list(dict.fromkeys(a.weights + b.weights)))
            for a, b in zip(training, evaluation, strict=True)
        ]
        used = {name for stage in stages for name in self.parameters_of(*stage)}
        stages[0][1].extend(name for name, _ in self.model.named_parameters() if name not in used)
        return stages

    def meta_output(self, fields: Fields, training: bool) -> Any:
        """The model's output for such a microbatch, on meta."""
        recording = self.recording(fields, training)
        return with_values(recording.output, {node: node.value for node in recording.nodes})

    def parameters_of(
        self, units: Sequence[str], weights: Sequence[str]
    ) -> dict[str, nn.Parameter]:
        """A stage's parameters by their canonical names."""
        parameters = [p for unit in units for p in self.model.get_submodule(unit).parameters()]
        everything = dict(self.model.named_parameters(remove_duplicate=False))
        parameters += [everything[name] for name in weights if name in everything]
        return {self._first_names[id(p)]: p for p in parameters}

    def canonical_names(self) -> dict[str, str]:
        """Map each name of each parameter to its first; a tied parameter has several names."""
        everything = self.model.named_parameters(remove_duplicate=False)
        return {name: self._first_names[id(p)] for name, p in everything}


def fields_of(batch: Mapping[str, Tensor]) -> Fields:
    """The batch fields that are arguments of the model."""
    return {
        name: Field(tuple(tensor.shape[1:]), tensor.dtype)
        for name, tensor in batch.items()
        if name not in ("targets", "real_tokens")
    }


def shapes(fields: Fields) -> tuple[tuple[str, Field], ...]:
    """A hashable key: a recording is valid for batches with an equal one."""
    return tuple(sorted(fields.items()))
