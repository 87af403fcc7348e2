"""What a run has to do with tensor parallelism once its model is divided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.config.schema import Config
from titanlike.distributed.mesh import Mesh
from titanlike.distributed.placement import Placement
from titanlike.distributed.transform import Recorded, Transform
from titanlike.optim.loss import Loss, build_loss
from titanlike.parallel.tp.collectives import DividedVocabulary, TensorRanks
from titanlike.parallel.tp.draft import check_draws
from titanlike.parallel.tp.plan import Entry
from titanlike.parallel.tp.random_numbers import Draws, RandomRegions, drawing_parts
from titanlike.parallel.tp.styles import divide
from titanlike.torch_private.compiler import overlap_in_compiled_blocks
from titanlike.torch_private.dtensor import local


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
    def __init__(self, config: Config, draft: TensorDraft, ranks: TensorRanks) -> None:
        """ranks: of this process."""
        self._config, self.draft, self._ranks = config, draft, ranks
        self.first, self.ranks = draft.like, ranks
        self.placements, self.unchecked = draft.placements, ""
        if draft.unchecked:
            what = "the tensor-parallel plan against the whole model's forward, and dropout masks"
            self.unchecked = f"{what}: {draft.unchecked}"

    def loss(self, device: torch.device | None = None) -> Loss:
        size = self.draft.vocabulary
        vocabulary = None if size is None else DividedVocabulary(size, self._ranks)
        return build_loss(self._config.loss, device, vocabulary)

    def check(self, recorded: Recorded) -> None:
        check_draws(self._config, self.draft, [unit.name for unit in recorded.graph.units])

    def describe(self, plan: Any) -> Iterator[tuple[str, str]]:
        """Which layers are divided, and whether activations between them are."""
        config, tp = self._config, self._config.tp
        divided, repeated = (
            {name: p for name, p in self.placements.items() if p.part is not None and wanted(p)}
            for wanted in (lambda p: p.copies == 1, lambda p: p.copies > 1)
        )
        parts = [p.part for p in (divided | repeated).values()]
        share = sum(part.shape.numel() for part in parts if part is not None) / plan.whole_numel
        text = f"{share:.0%} of the parameters divided: {_modules(divided)}"
        if repeated:
            most = max(p.copies for p in repeated.values())
            text += f", and {_modules(repeated)} with each head on {most} ranks"
        length = self.draft.length(plan.fields)
        if not config.tp_sequence:
            activations = "whole (tp_sequence=false)"
        elif not self.draft.sequence:
            activations = "whole: the plan has no style sequence"
        elif plan.variable:
            activations = (
                f"divided along the sequence in batches whose length {tp} divides, else whole"
            )
        elif length % tp:
            fits = -(-length // tp) * tp
            activations = f"whole: {tp} does not divide {length} tokens (it would {fits})"
        else:
            activations = "divided along the sequence"
        yield "tensor parallel", f"{text}; activations between them {activations}"

    def open(self, mesh: Mesh, plan: Any) -> None:
        self._mesh, self._regions = mesh, RandomRegions(self._ranks, mesh.device)
        self._ranks.group = mesh.axes.get_group("tp")
        group = self._ranks.group if self._config.tp_async else None
        overlap_in_compiled_blocks(group)

    def on_model(self, model: nn.Module, placements: dict[str, Placement]) -> None:
        placements.update(self.draft.divide(model, self._ranks))

    def on_stage(self, index: int, stage: nn.Module, units: Sequence[str]) -> None:
        self._regions.add(stage, self.draft.draws, self.draft.draws_whole)

    def on_states(self, states: Mapping[int, Any]) -> None:
        parameters = (item for state in states.values() for item in state.placed_parameters())
        of_model = self.placements.values()
        common = self._ranks, self._mesh, self._config.launch.timeout
        self._partial = PartialGradients(parameters, of_model, *common)

    def why_not_compiled(self, block: str) -> str:
        return self.draft.why_not_compiled(block)

    def prepare(self, fields: Mapping[str, Any]) -> None:
        for ranks in (self.draft.like, self._ranks):
            self.draft.prepare(ranks, fields)

    def after_backward(self) -> None:
        self._partial.sum()

    def logits(self, part: Tensor) -> Tensor:
        size, ranks = self.draft.vocabulary, self._ranks
        if size is None:
            return part
        each = -(-size // ranks.size)
        padded = F.pad(part.float(), (0, each - part.size(-1)))
        parts = [torch.empty_like(padded) for _ in range(ranks.size)]
        dist.all_gather(parts, padded.contiguous(), group=ranks.group)
        return torch.cat(parts, -1)[:, :size]


def _modules(parameters: Mapping[str, object]) -> str:
    """The last names of their modules: wq, wk"""
    return ", ".join(dict.fromkeys(name.split(".")[-2] for name in parameters if "." in name))


# --- gradients of parameters that several ranks hold: a norm's weight, repeated heads -------------
#
# Where the ranks computed with different tokens or heads, each has a part of the sum. It is made once
# a step, in one message for all of these parameters, and not in each backward.


class PartialGradients:
    """Of this rank's parameters."""

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Parameter, Placement]],
        placements: Iterable[Placement],
        ranks: TensorRanks,
        mesh: Mesh,
        timeout: float,
    ) -> None:
        """Collective over all ranks; placements: of all parameters of the model, by which each rank makes
        as many groups: torch counts them, to name the next one."""
        self._ranks = ranks
        found: dict[tuple[str, int], list[nn.Parameter]] = {}
        for parameter, placement in dict(parameters).items():
            if placement.partial != "never" and parameter.requires_grad:
                key = placement.partial, placement.copies
                found.setdefault(key, []).append(parameter)
        counts = {placement.copies for placement in placements if placement.partial != "never"}
        groups = {copies: _group(copies, ranks, mesh, timeout) for copies in sorted(counts)}
        self._of_group = [(when, ps, groups[copies]) for (when, copies), ps in found.items()]

    @torch.no_grad()
    def sum(self) -> None:
        """Collective over the tensor-parallel ranks; a gradient that is missing counts as zeros."""
        for when, parameters, group in self._of_group:
            if when == "sequence" and not self._ranks.sequence:
                continue
            by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradient = local(parameter.grad)
                by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
            for gradients in by_kind.values():
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                dist.all_reduce(flat, group=group)
                sizes = [gradient.numel() for gradient in gradients]
                for gradient, total in zip(gradients, flat.split(sizes), strict=True):
                    gradient.copy_(total.view_as(gradient))


def _group(copies: int, ranks: TensorRanks, mesh: Mesh, timeout: float) -> dist.ProcessGroup:
    """This rank and its neighbours that hold the same elements."""
    if copies == ranks.size:
        assert ranks.group is not None
        return ranks.group
    return dist.new_group(
        mesh.tensor_ranks(copies),
        timeout=timedelta(seconds=timeout),
        use_local_synchronization=True,
    )
