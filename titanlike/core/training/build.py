"""Build a run's stages, optimizers and pipeline from its config, in this order:

1. `make_plan` decides the stages and the pipeline schedule.
2. This rank's stages are taken out of the model on the meta device, sharded, allocated and
   initialized; each gets an optimizer.
3. The pipeline is made of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from titanlike.core.config.schema import Config
from titanlike.core.data.sources import Data
from titanlike.core.device.memory import return_freed_memory
from titanlike.core.distributed.async_reads import AsyncScalars, on_device
from titanlike.core.distributed.initialize import initialize, piece_seed
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.distributed.placement import Placement, StageState
from titanlike.core.distributed.sharding import StateBytes, shard_stage
from titanlike.core.distributed.transform import Transform
from titanlike.core.graph.stage import Stage, fsdp_groups
from titanlike.core.launch.process_end import built
from titanlike.core.models.registry import build_model, initial_weights_of
from titanlike.core.optim.loss import build_loss
from titanlike.core.optim.optimizer import build_optimizers, moment_bytes
from titanlike.core.pipeline.pipeline import Pipeline
from titanlike.core.training.train_plan import TrainPlan, make_plan, memory_for_training
from titanlike.core.training.transforms import stage_transforms

if TYPE_CHECKING:
    from titanlike.core.optim.custom_metrics import CustomMetrics
    from titanlike.planning.costs.unit_costs import UnitCosts
    from titanlike.techniques.compiled_blocks import CompiledBlocks
    from titanlike.watch.stragglers import BusyTime

# multiplies a rank's parameters, gradients and optimizer state: activations, fragmentation
_FRAGMENTATION = 3


class StepObserver(Protocol):
    def begin(self, phase: str) -> None:
        """Called when the next phase of a step begins."""

    def start_action(self, action: Any) -> None:
        """Called when an action of the schedule begins; None: all are done."""

    def action_queued(self, action: Any, received: bool) -> None:
        """Called when a computation, all-gather or reduce-scatter has been launched; with
        `received`, when only the receives that it waits for have been launched."""


class StepPhases:
    """Notifies observers of a step's phases and actions, one after the other."""

    def __init__(self) -> None:
        self.observers: list[StepObserver] = []

    def begin(self, phase: str) -> None:
        for observer in self.observers:
            observer.begin(phase)

    def start_action(self, action: Any) -> None:
        for observer in self.observers:
            observer.start_action(action)

    def action_queued(self, action: Any, received: bool) -> None:
        for observer in self.observers:
            observer.action_queued(action, received)

    def remove(self, observer: StepObserver) -> None:
        """Remove an observer, if it is there."""
        self.observers = [other for other in self.observers if other is not observer]


@dataclass(frozen=True)
class Run:
    """This rank's share of the model, ready to train."""

    mesh: Mesh
    plan: TrainPlan
    stages: list[Stage]
    stage_states: list[StageState]
    pipeline: Pipeline
    transforms: dict[str, Transform]  # those applied to model and stages, see `transforms.py`
    async_scalars: AsyncScalars  # copies metrics off the device asynchronously
    weights_source: str  # where initial weights come from, for the opening table
    own: CustomMetrics | None = None  # by `metrics.own`
    phases: StepPhases = field(default_factory=StepPhases)  # for watchdog, profile and timeline
    busy: BusyTime | None = None  # how long this rank of several waits for others

    @property
    def compiled(self) -> CompiledBlocks | None:
        """The compiled blocks, with compile=true."""
        compiled: Any = self.transforms.get("compile")
        return compiled

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of all stages of this rank."""
        return [parameter for state in self.stage_states for _, parameter in state.parameters()]

    @cached_property
    def owned(self) -> dict[str, nn.Parameter]:
        """Parameters that this rank counts, by name: a tied one is owned by one of the ranks with a
        copy."""
        states = self.stage_states
        return {n: p for state in states for n, p in state.parameters() if state.owns(n)}

    @cached_property
    def shares(self) -> Tensor | None:
        """For each of `owned` 1 / (tensor- or expert-parallel ranks that hold the same elements),
        fp32 on the device; None without such an axis."""
        placements = self.plan.placements
        if not placements:
            return None
        copies = [float(placements[name].copies) for name in self.owned]
        return on_device(1.0 / torch.tensor(copies), self.mesh.device)

    def train_mode(self, on: bool) -> None:
        """Set each module to training or evaluation as the whole model's `train(on)` does."""
        flags = self.plan.model_graph.training_flags[on]
        for stage in self.stages:
            stage.train(on)
            for name, module in stage.named_modules():
                if name in flags and name:
                    module.training = flags[name]


def build(
    config: Config,
    mesh: Mesh,
    data: Data | None = None,
    say: Callable[[str], object] = lambda _: None,
    more: Mapping[str, Transform] | None = None,
) -> Run:
    """Build this rank's stages and the pipeline over them. Collective.

    data: see `make_plan`; say: called with lines of progress where it takes long; more: transforms
    of stages that no config asks for, applied last.
    """

    # 1. decide
    def times(unit_costs: UnitCosts) -> list[int]:
        from titanlike.planning.costs.auto_split import measured_times

        return measured_times(config, mesh, unit_costs)

    memory = functools.cache(partial(_least_memory, config, mesh))
    plan = make_plan(config, data, times, memory, mesh)
    if memory_is_short(config, plan, mesh, memory):
        return_freed_memory()
    return build_planned(config, mesh, plan, say, more=more)


def build_planned(
    config: Config,
    mesh: Mesh,
    plan: TrainPlan,
    say: Callable[[str], object] = lambda _: None,
    more: Mapping[str, Transform] | None = None,
) -> Run:
    """Build from a plan. Collective: process groups are made here, not during planning, when rank 0
    may be timing units alone."""
    transforms = stage_transforms(config, mesh, plan) | dict(more or {})

    # 2. stages, weights, optimizers
    ordered = [*transforms.values()]
    # parameter -> stages that hold it; the first stage owns a tied parameter
    holders = {
        name: [index for index, names in enumerate(plan.stage_parameters) if name in names]
        for name in plan.model_graph.canonical_names().values()
    }
    stages, states, weights_source = _make_stages(config, mesh, plan, ordered, holders, say)

    # 3. the pipeline
    if any(len(holding) > 1 for holding in holders.values()):
        from titanlike.core.distributed.gradients import TiedWeights

        parameters = {index: dict(state.parameters()) for index, state in states.items()}
        transforms["tied weights"] = TiedWeights(
            holders, plan.order.stage_to_rank, parameters, mesh, config.launch.timeout
        )
    # random numbers of training (dropout) differ on every rank but those that share layers
    torch.manual_seed(piece_seed(config.seed, "rank", mesh.layers_rank))
    losses = (transform.loss(mesh.device) for transform in ordered)
    loss = next(filter(None, losses), None) or build_loss(config.loss, mesh.device)
    for transform in ordered:
        transform.on_states(states)
    pipeline = Pipeline(
        plan.order,
        plan.model_graph,
        stages,
        loss,
        mesh,
        zero=plan.zero,
        transforms=[*transforms.values()],
        orders=plan.orders,
    )
    custom = None
    if config.metrics.own:
        from titanlike.core.optim.custom_metrics import CustomMetrics, functions_of

        custom = CustomMetrics(
            functions_of(config), mesh, loss, transforms.get("tp"), pipeline.sums
        )
        loss.watch = custom.watch
    run = Run(
        mesh,
        plan,
        [*stages.values()],
        [*states.values()],
        pipeline,
        transforms,
        async_scalars=AsyncScalars(mesh),
        weights_source=weights_source,
        own=custom,
    )
    pipeline.on_action, pipeline.on_queued = run.phases.start_action, run.phases.action_queued
    run.train_mode(True)
    built()
    return run


def _make_stages(
    config: Config,
    mesh: Mesh,
    plan: TrainPlan,
    transforms: Sequence[Transform],
    holders: Mapping[str, list[int]],
    say: Callable[[str], object],
) -> tuple[dict[int, Stage], dict[int, StageState], str]:
    """(this rank's stages with their weights, the state of each with its optimizers, where weights
    are from); holders: parameter -> stages that hold it."""
    weights = initial_weights_of(plan.model, config.seed, lambda here: bool(mesh.max_of(here)))
    canonical = plan.model_graph.canonical_names()
    stages: dict[int, Stage] = {}
    placements: dict[str, Placement] = {}
    for index in plan.order.local(mesh.pp_rank):
        model, placements = build_model(plan.model), {}
        for transform in transforms:
            transform.on_model(model, placements)
        units, used = plan.stage_modules[index]
        stage = stages[index] = Stage(model, units, used)
        for transform in transforms:
            transform.on_stage(index, stage, units)
        held = [unit for unit in plan.model_graph.units if unit.name in units]
        shard_stage(stage, fsdp_groups(stage, held, used), config, mesh, plan.zero)
        device = torch.device("cpu") if config.fsdp.cpu_offload else mesh.device
        parts = {name: placement.part for name, placement in placements.items()}
        initialize(stage, weights, device, canonical, say, parts)
    for stage in stages.values():
        for transform in transforms:
            transform.on_weights(stage)
    states: dict[int, StageState] = {}
    matrices = getattr(config.optimizer, "whole_matrices", False)  # gathered from their shards
    group = mesh.weight_group(config.launch.timeout) if matrices else None
    for index, stage in stages.items():
        if stage.state_dict():  # even without parameters, e.g. batch norm buffers
            every = stage.named_parameters(remove_duplicate=False)
            names = {name: canonical[name] for name, _ in every}
            owned = frozenset(name for name in names.values() if holders[name][0] == index)
            parameters = {names[name]: parameter for name, parameter in stage.named_parameters()}
            model = plan.model_graph.model
            optimizers = build_optimizers(parameters, model, config, placements, group)
            states[index] = StageState(stage, optimizers, names, owned, placements)
    return stages, states, weights.origin


def memory_is_short(
    config: Config, plan: TrainPlan, mesh: Mesh, memory: Callable[[], int | None]
) -> bool:
    """Whether a rank on the CPU may run out of memory if memory freed after all-gathers is
    fragmented, which can double what is in use.

    memory: returns bytes available for training, None if unknown.
    """
    if mesh.device.type != "cpu" or config.shards == 1:
        return False
    limit = memory()
    numel = sum(plan.stage_numel(stage) for stage in plan.order.local(mesh.pp_rank))
    each = moment_bytes(config.optimizer, plan.model_graph.model).values()
    moments = min(filter(None, each), default=0)  # frozen parameters have none
    state = StateBytes.of(config, plan.zero, moments).whole * numel
    return limit is None or _FRAGMENTATION * state > limit


def _least_memory(config: Config, mesh: Mesh) -> int | None:
    """The minimum over all ranks of the memory available for training, so that all decide alike.
    Collective."""
    available = memory_for_training(config)
    least = -mesh.max_of(-1e18 if available is None else -available)
    return None if least >= 1e18 else int(least)
