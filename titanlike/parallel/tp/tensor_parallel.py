"""What a run has to do with tensor parallelism once its model is divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from titanlike.parallel.mesh import Mesh
from titanlike.parallel.placement import Placement
from titanlike.parallel.tp.collectives import TensorRanks
from titanlike.parallel.tp.gradients import PartialGradients
from titanlike.parallel.tp.plan import Entry
from titanlike.parallel.tp.random_numbers import Draws, RandomRegions, drawing_parts
from titanlike.parallel.tp.styles import divide
from titanlike.parallel.transform import Transform


@dataclass(frozen=True)
class TensorDraft:
    """How a model is divided; the same on every rank."""

    modules: Mapping[str, Entry]  # see `plan.named`
    sequence: bool  # activations between divided layers are divided along the sequence
    whole_logits: bool  # the loss needs all of the vocabulary
    vocabulary: int | None  # logits that are divided
    placements: Mapping[str, Placement]  # of each parameter, on the first rank
    like: TensorRanks  # with which the model on meta is recorded: the first rank has the most
    draws: Draws = field(default_factory=dict)  # modules that draw random numbers in training
    draws_whole: Draws = field(
        default_factory=dict
    )  # with whole activations between divided layers
    wrong_whole: str = ""  # why it would be wrong with these
    context: int = 1  # context-parallel ranks, which have parts of every sequence before
    unchecked: str = ""  # why the plan was not compared with the whole model's forward, if so

    def divide(self, model: nn.Module, ranks: TensorRanks) -> dict[str, Placement]:
        """Divide a model on meta in place; see `styles.divide`."""
        return divide(model, dict(self.modules), ranks, whole_logits=self.whole_logits)

    def why_not_compiled(self, block: str) -> str:
        drawn = "it draws random numbers for each tensor-parallel rank's part (dropout)"
        either = drawing_parts(self.draws, block) or drawing_parts(self.draws_whole, block)
        return drawn if either else ""

    def prepare(self, ranks: TensorRanks, fields: Mapping[str, Any]) -> None:
        """Before a forward on a batch of these fields (see `graph.model_graph.Field`)."""
        length = self.length(fields)
        ranks.sequence = self.sequence and length % (ranks.size * self.context) == 0
        if self.sequence and not ranks.sequence and self.wrong_whole:
            raise ValueError(
                f"tp={ranks.size}: {length} tokens, which are not a multiple, are computed with whole "
                f"activations between layers, and {self.wrong_whole}; write lengths that are a multiple"
            )

    def length(self, fields: Mapping[str, Any]) -> int:
        """Tokens of a sequence in a batch of these fields."""
        return next(iter(fields["inputs"].shape), 1)


class TensorParallel(Transform):
    def __init__(self, draft: TensorDraft, ranks: TensorRanks, mesh: Mesh, timeout: float) -> None:
        """timeout: seconds, of the process groups."""
        self.draft, self.ranks = draft, ranks
        self._mesh, self._timeout = mesh, timeout
        self._regions = RandomRegions(ranks, mesh.device)
        ranks.group = mesh.axes.get_group("tp")

    def on_model(self, model: nn.Module, placements: dict[str, Placement]) -> None:
        placements.update(self.draft.divide(model, self.ranks))

    def on_stage(self, index: int, stage: nn.Module, units: Sequence[str]) -> None:
        self._regions.add(stage, self.draft.draws, self.draft.draws_whole)

    def on_states(self, states: Mapping[int, Any]) -> None:
        parameters = (item for state in states.values() for item in state.placed_parameters())
        of_model = self.draft.placements.values()
        common = self.ranks, self._mesh, self._timeout
        self._partial = PartialGradients(parameters, of_model, *common)

    def why_not_compiled(self, block: str) -> str:
        return self.draft.why_not_compiled(block)

    def prepare(self, fields: Mapping[str, Any]) -> None:
        self.draft.prepare(self.ranks, fields)

    def after_backward(self) -> None:
        self._partial.sum()
