"""The interface of everything that changes a model or a stage.

A technique (tensor parallelism, recomputation, compiled blocks, expert load balancing, ...) is one
`Transform` per rank. `core/training/transforms.py` makes those that a config asks for, in the order in
which they are applied; building, the pipeline and the step call their methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from titanlike.core.distributed.mesh import Mesh
from titanlike.core.distributed.placement import Placement, StageState

if TYPE_CHECKING:
    from titanlike.core.distributed.collectives import GroupInfo
    from titanlike.core.graph.loss import Loss
    from titanlike.core.graph.model_graph import Fields, ModelGraph, SequenceParts
    from titanlike.core.torch_private.pipeline_stage import GradientSums


@dataclass(frozen=True)
class Recomputed:
    """The blocks with activation checkpointing, and for `fit` the memory that decided it."""

    blocks: list[list[str]]  # by stage
    limit: int | None = None  # memory budget of a rank in bytes
    memory: list[int] = field(default_factory=list)  # estimated bytes on each pipeline rank

    @property
    def count(self) -> int:
        return sum(map(len, self.blocks))

    @property
    def names(self) -> list[str]:
        return [name for blocks in self.blocks for name in blocks]


class Plan(Protocol):
    """What a transform reads of a run's plan (`TrainPlan`)."""

    @property
    def model_graph(self) -> ModelGraph: ...
    @property
    def fields(self) -> Fields:
        """Fields of the batch that the model takes."""

    @property
    def variable(self) -> bool:
        """Whether batches differ in length."""

    @property
    def whole_numel(self) -> int:
        """The number of parameter elements of the full model; tied parameters count once."""

    @property
    def recomputed(self) -> Recomputed: ...
    @property
    def deferred(self) -> frozenset[int]:
        """Stages whose weight gradients are computed in W actions, not in I."""

    def microbatches_of(self, rows: int) -> int:
        """Microbatches of a batch with so many rows on a dp rank."""

    @property
    def microbatches(self) -> int: ...
    @property
    def zero(self) -> int: ...
    @property
    def transforms(self) -> Mapping[str, Transform]:
        """The transforms that were applied to the model before it was recorded, by name."""

    def blocks(self, stage: int) -> list[str]:
        """Names of a stage's blocks."""


@dataclass(frozen=True)
class Recorded:
    """A transformed model and the recording of its forward on a microbatch, on meta."""

    graph: ModelGraph
    batch: dict[str, Tensor]  # one full sequence, before `Transform.batch`
    loss: Loss
    output: Any  # the model's output for a microbatch
    targets: Tensor
    variable: bool  # batches differ in length
    unchanged: Callable[[], nn.Module]  # makes the model without any transform


class StepSums(Protocol):
    """Sums losses and gradients over microbatches, in place of autograd, FSDP and all-reduce."""

    def of_stage(self, stage: int) -> GradientSums | None:
        """The sums of a stage's gradients; None for a stage without parameters."""

    def losses(self, losses: list[Tensor]) -> Tensor:
        """Return a vector whose sum over all ranks holds the loss of each microbatch of the global
        batch; losses: those of this rank's microbatches, [] on ranks without the last stage."""

    def total(self, losses: Tensor) -> Tensor:
        """The sum of such a vector, a scalar."""

    def norms(self, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
        """(the 2-norm of all gradients of the model, that of this rank's part of each), fp32.
        Collective; parameters: this rank's, with a tied one on one pipeline rank only."""


class Transform:
    """Hooks that do nothing; a technique overrides those it needs. All ranks have the same list."""

    # --- while a run is planned: the model is on meta, and there are no process groups

    # Process-group info of an axis that communicates inside of layers: `first` is its first rank's
    # view, with which the model is recorded; `ranks` is this rank's, whose group `open` creates.
    # Such a transform is named after its mesh axis.
    first: GroupInfo | None = None
    ranks: GroupInfo | None = None
    # how parameters are sharded over this axis, as seen by its first rank
    placements: Mapping[str, Placement] = {}
    sequence: SequenceParts | None = None  # how sequences are sharded over ranks
    reads: frozenset[str] = frozenset()  # fields of a batch that it needs on every rank
    sums: StepSums | None = None  # replaces the sums of autograd and FSDP
    unchecked: str = ""  # what could not be verified, and why
    # Whether results depend on how a batch is split into microbatches, as those of a batch norm:
    # the reference of `titanlike verify` then computes the layout's microbatches
    by_microbatch: bool = False

    def loss(self, device: torch.device | None = None) -> Loss | None:
        """The loss that fits the changed model's output; None = the config's loss."""

    def recorded(self, graph: ModelGraph) -> None:
        """Called once the changed model's forward has been recorded."""

    def check(self, recorded: Recorded) -> None:
        """Raise ConfigError where the changed model would compute other results."""

    def describe(self, plan: Plan) -> Iterator[tuple[str, str]]:
        """Rows (title, text) of the opening table."""
        return iter(())

    # --- while this rank's stages are built

    def open(self, mesh: Mesh, plan: Plan) -> None:
        """Make process groups, before any stage is built. Collective."""

    def on_model(self, model: nn.Module, placements: dict[str, Placement]) -> None:
        """Change a model on meta in place, before stages take their modules out of it; placements:
        by parameter name; the transform adds those that it shards."""

    def on_stage(self, index: int, stage: nn.Module, units: Sequence[str]) -> None:
        """Change a stage on meta in place, before FSDP shards it; units: names of its units."""

    def on_weights(self, stage: nn.Module) -> None:
        """Change a stage after its weights are initialized."""

    def on_states(self, states: Mapping[int, StageState]) -> None:
        """Called once all stages have optimizers; states: by stage. Collective."""

    def why_not_compiled(self, block: str) -> str:
        """Why this transform keeps a block from being compiled; "" = it does not."""
        return ""

    # --- in a step

    def begin_step(self, step: int) -> None:
        """Called before the forwards of a training step, from 1."""

    def begin_microbatch(self, stage: int, microbatch: int) -> None:
        """Called before a stage's forward, in training and evaluation, and before its backward,
        which may recompute. microbatch: its place in
        the global batch, the same in every layout of as many microbatches."""

    def batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Select what this rank computes of the batch [B, ...] of its data-parallel rank."""
        return batch

    def prepare(self, fields: Fields) -> None:
        """Called before forwards on a batch of these fields."""

    def training(self, tokens: Tensor) -> AbstractContextManager[None]:
        """A context around the forwards and backwards of a training step. tokens: the number in the
        global batch, without padding, a scalar on the device."""
        return nullcontext()

    def computing(self) -> AbstractContextManager[None]:
        """A context around all forwards, in training and evaluation."""
        return nullcontext()

    def weight_gradients(self, stage: int) -> Callable[[], Callable[[], None]] | None:
        """For schedules that split the backward: a function that takes the weight-gradient work
        queued by a stage's I, and returns the function that computes it (W)."""
        return None

    def after_backward(self) -> None:
        """Called after all of this rank's backwards, for the last transform first. Collective."""

    def after_update(self, skip: Tensor | None) -> None:
        """Called when the optimizers have stepped. Collective. skip: a scalar on the device, 1 =
        the step is not applied; None = 0."""

    def logits(self, part: Tensor) -> Tensor:
        """Gather logits of full sequences and the full vocabulary [B, ..., V]; part: this rank's
        logits. Collective over the ranks that share them."""
        return part

    # --- in the reference of `titanlike verify`

    def in_one_process(self, model: nn.Module) -> Transform | None:
        """Change the full, initialized model so that plain torch in one process computes what a
        layout computes. Returns the transform whose step hooks (`begin_step`, `begin_microbatch`,
        `training`, `after_update`) are to be called, often this one; None = none."""
        return None

    # --- for metrics.jsonl

    def measured(self) -> dict[str, Tensor]:
        """fp32 scalars on the device, by names that never change; reduced by max over all ranks."""
        return {}

    def record(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The entries of a step's record made from them; numbers: all that the step measured."""
        return {}
