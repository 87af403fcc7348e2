"""The seam at which everything that is done to a stage attaches.

A technique (tensor parallelism, recomputation, compiled blocks, the balance of experts, ...) is one
`Transform` a rank. `training/transforms.py` lists them in the order in which they are applied, and
imports those that a config asks for; building, the pipeline and the step go through the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from titanlike.distributed.mesh import Mesh
from titanlike.distributed.placement import Placement, StageState

if TYPE_CHECKING:
    from titanlike.distributed.collectives import GroupInfo
    from titanlike.graph.loss import Loss
    from titanlike.graph.model_graph import Fields, ModelGraph, SequenceParts
    from titanlike.torch_private.pipeline_stage import GradientSums


@dataclass(frozen=True)
class Recomputed:
    """The blocks that are recomputed, and for `fit` why so many."""

    blocks: list[list[str]]  # of each stage
    limit: int | None = None  # bytes that training may take on a rank
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
        """Elements of the model's parameters, tied ones once."""

    @property
    def recomputed(self) -> Recomputed: ...
    @property
    def deferred(self) -> frozenset[int]:
        """Stages whose weight gradients wait for W."""

    @property
    def microbatches(self) -> int: ...
    @property
    def zero(self) -> int: ...
    @property
    def transforms(self) -> Mapping[str, Transform]:
        """Those that have changed the model."""

    def blocks(self, stage: int) -> list[str]:
        """Names of a stage's blocks."""


@dataclass(frozen=True)
class Recorded:
    """A changed model whose forward on a microbatch is recorded, on meta."""

    graph: ModelGraph
    batch: dict[str, Tensor]  # of one whole sequence, without what transforms make of it
    loss: Loss
    output: Any  # of the model, for a microbatch
    targets: Tensor
    variable: bool  # batches differ in length
    unchanged: Callable[[], nn.Module]  # another one, as the transforms were given it


class StepSums(Protocol):
    """Adds what the microbatches of a step have, in place of autograd, FSDP and an all-reduce."""

    def of_stage(self, stage: int) -> GradientSums | None:
        """None for a stage without parameters."""

    def losses(self, losses: list[Tensor]) -> Tensor:
        """A vector that, summed over all ranks, has the loss of each microbatch of the global
        batch; losses: of this rank's, [] where another has the last stage."""

    def total(self, losses: Tensor) -> Tensor:
        """The sum of such a vector, a scalar."""

    def norms(self, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
        """(the 2-norm of all gradients of the model, of this rank's part of each), fp32.
        Collective; parameters: of this rank, each of the model's on one pipeline rank."""


class Transform:
    """Does nothing; a technique overrides what concerns it. On every rank the list is the same."""

    # --- while a run is planned: the model is on meta, and there are no process groups

    # Ranks with which layers exchange activations, if they do: the first of them, as which the
    # model is recorded, and this one, whose group `open` makes. Their transform is named after
    # their mesh axis.
    first: GroupInfo | None = None
    ranks: GroupInfo | None = None
    # of parameters that several of these ranks have, on the first one
    placements: Mapping[str, Placement] = {}
    sequence: SequenceParts | None = None  # how a rank has a part of every sequence
    sums: StepSums | None = None  # where they are not those of autograd and FSDP
    unchecked: str = ""  # what of it is not known to be right, and why
    # Whether results depend on how a batch is split into microbatches, as those of a batch norm:
    # the reference of `titanlike verify` then computes the layout's microbatches
    by_microbatch: bool = False

    def loss(self, device: torch.device | None = None) -> Loss | None:
        """The loss of what the changed model returns; None = as the config says."""

    def recorded(self, graph: ModelGraph) -> None:
        """Called when the changed model's forward is recorded."""

    def check(self, recorded: Recorded) -> None:
        """Raise ConfigError where the changed model would compute other results."""

    def describe(self, plan: Plan) -> Iterator[tuple[str, str]]:
        """Rows (title, text) of the opening table."""
        return iter(())

    # --- while this rank's stages are built

    def open(self, mesh: Mesh, plan: Plan) -> None:
        """Make process groups, before any stage is built. Collective."""

    def on_model(self, model: nn.Module, placements: dict[str, Placement]) -> None:
        """Change a model on meta in place, before a stage takes its modules out of it; placements:
        of the parameters that concern it, by their names, to be added to."""

    def on_stage(self, index: int, stage: nn.Module, units: Sequence[str]) -> None:
        """Change a stage on meta in place, before it is sharded; units: the names of its own."""

    def on_weights(self, stage: nn.Module) -> None:
        """Change a stage that has its weights."""

    def on_states(self, states: Mapping[int, StageState]) -> None:
        """Once all stages have optimizers, by stage. Collective."""

    def why_not_compiled(self, block: str) -> str:
        """Why a block stays as it is with compile=true; "" = nothing of this is in the way."""
        return ""

    # --- in a step

    def begin_step(self, step: int) -> None:
        """Called before the forwards of a training step, from 1."""

    def begin_microbatch(self, stage: int, microbatch: int) -> None:
        """Called before a stage's forward, in training and evaluation. microbatch: its place in
        the global batch, the same in every layout of as many microbatches."""

    def batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What this rank computes with, of a batch [B, ...] of its data-parallel rank."""
        return batch

    def prepare(self, fields: Fields) -> None:
        """Called before forwards on a batch of these fields."""

    def training(self, tokens: Tensor) -> AbstractContextManager[None]:
        """Around the forwards and backwards of a training step. tokens: of the global batch,
        padding included, a scalar on the device."""
        return nullcontext()

    def computing(self) -> AbstractContextManager[None]:
        """Around all forwards, of training and evaluation."""
        return nullcontext()

    def weight_gradients(self, stage: int) -> Callable[[], Callable[[], None]] | None:
        """What takes the queued weight gradients of a stage where they wait, in a schedule that
        splits the backward; what that returns computes them."""
        return None

    def after_backward(self) -> None:
        """Called when this rank's backwards are done, in reversed order. Collective."""

    def after_update(self, skip: Tensor | None) -> None:
        """Called when the optimizers have stepped. Collective. skip: a scalar on the device, 1 =
        the step is not applied; None = 0."""

    def logits(self, part: Tensor) -> Tensor:
        """Logits of whole sequences and of the whole vocabulary [B, ..., V]; part: what this rank's
        last stage returns. Collective over the ranks that have parts."""
        return part

    # --- in the reference of `titanlike verify`

    def in_one_process(self, model: nn.Module) -> Transform | None:
        """Change the whole model, which has its weights, to compute in one process, in plain torch,
        what a layout computes. Returns what is to be told of its steps (`begin_step`,
        `begin_microbatch`, `training`, `after_update`), often this transform; None = nothing."""
        return None

    # --- for metrics.jsonl

    def measured(self) -> dict[str, Tensor]:
        """fp32 scalars on the device, always the same names; the largest of all ranks counts."""
        return {}

    def record(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """What a step's record shows of these; numbers: all that the step has measured."""
        return {}
