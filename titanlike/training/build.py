"""From a config to everything that a run is made of, in the order in which it happens.

1. `draft` decides: the stages and the order of computing.
2. This rank's stages are taken out of the model on the meta device, sharded, allocated and
   initialized; each gets an optimizer.
3. The pipeline is laid over them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import nn

from titanlike.config.schema import Config
from titanlike.data.sources import Data
from titanlike.device.memory import return_freed_memory
from titanlike.graph.stage import Stage, fsdp_groups
from titanlike.launch.process_end import built
from titanlike.models.float8 import use_float8
from titanlike.models.registry import build_model, initial_weights_of
from titanlike.optim.loss import build_loss
from titanlike.optim.optimizer import StageState, build_optimizers
from titanlike.parallel.activation_checkpoint import checkpoint_blocks
from titanlike.parallel.batchnorm import BatchNorms
from titanlike.parallel.cast_parameters import CastParameters
from titanlike.parallel.compiled_blocks import CompiledBlocks
from titanlike.parallel.initialize import initialize, piece_seed
from titanlike.parallel.late import Late
from titanlike.parallel.mesh import Mesh
from titanlike.parallel.reached import Reached
from titanlike.parallel.sharding import compute_dtype, shard_stage, wrapped_in_fsdp
from titanlike.parallel.tied import tie
from titanlike.parallel.weight_gradients import DeferredWeightGradients
from titanlike.pipeline.pipeline import Pipeline
from titanlike.split.auto_split import measured_times
from titanlike.split.rank_memory import saved_operators
from titanlike.split.state_bytes import state_bytes
from titanlike.training.draft import Draft, draft, memory_for_training
from titanlike.training.ranges import Ranges

_HOLES = 3  # times a rank's parameters, gradients and optimizer state: with activations and holes


@dataclass(frozen=True)
class Run:
    """This rank's share of the model, ready to train."""

    mesh: Mesh
    draft: Draft
    stages: list[Stage]
    stage_states: list[StageState]
    pipeline: Pipeline
    norms: BatchNorms
    late: Late  # takes numbers off the device
    compiled: CompiledBlocks | None  # with compile=true
    origin: str  # of the initial weights, for the opening table
    ranges: Ranges = field(default_factory=Ranges)  # what a profile shows

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Of all stages of this rank."""
        return [parameter for state in self.stage_states for _, parameter in state.parameters()]

    @cached_property
    def owned(self) -> list[nn.Parameter]:
        """The same, a tied parameter on one of the ranks that hold a copy."""
        return [p for state in self.stage_states for n, p in state.parameters() if state.owns(n)]

    def train_mode(self, on: bool) -> None:
        """Set each module to training or evaluation as the whole model's `train(on)` does."""
        flags = self.draft.model_graph.training_flags[on]
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
) -> Run:
    """Build this rank's stages and the pipeline over them. Collective.

    data: see `draft`; say: called with lines of progress where it takes long.
    """
    # 1. decide
    times = partial(measured_times, config, mesh)
    memory = functools.cache(partial(_least_memory, config, mesh))
    plan = draft(config, data, times, memory)

    if memory_is_short(config, plan, mesh, memory):
        return_freed_memory()

    # 2. stages, weights, optimizers
    local = plan.order.local(mesh.pp_rank)
    weights = initial_weights_of(plan.model, config.seed)
    canonical = plan.model_graph.canonical_names()
    stages: dict[int, Stage] = {}
    deferred: dict[int, DeferredWeightGradients] = {}
    # the number of documents in a batch is a size, too
    dynamic = plan.variable or "document_ids" in plan.fields
    compiled = CompiledBlocks(dynamic) if config.compile else None
    for index in local:
        model = build_model(plan.model)
        use_float8(model, config, mesh.device)
        stage = stages[index] = Stage(model, *plan.stage_modules[index])
        if index in plan.deferred:
            deferred[index] = DeferredWeightGradients(stage, mesh.device)
        checkpoint_blocks(stage, plan.recomputed.blocks[index], saved_operators(config))
        if compiled is not None:
            compiled.add(stage, plan.blocks(index))
        _shard(stage, config, plan, *plan.stage_modules[index], mesh)
        device = torch.device("cpu") if config.fsdp.cpu_offload else mesh.device
        initialize(stage, weights, device, canonical, say)
    origin = weights.origin
    del weights  # some initial weights are a whole model in memory
    # of each parameter the stages that hold it: of a tied one, the first is its owner
    holders = {
        name: [index for index, names in enumerate(plan.stage_parameters) if name in names]
        for name in canonical.values()
    }
    states: dict[int, StageState] = {}
    for index, stage in stages.items():
        if stage.state_dict():  # a batch norm without weights has buffers to save
            every = stage.named_parameters(remove_duplicate=False)
            names = {name: canonical[name] for name, _ in every}
            owned = frozenset(name for name in names.values() if holders[name][0] == index)
            parameters = {names[name]: parameter for name, parameter in stage.named_parameters()}
            optimizers = build_optimizers(parameters, plan.model_graph.model, config)
            states[index] = StageState(stage, optimizers, names, owned)

    # 3. the pipeline
    local_parameters = {index: dict(state.parameters()) for index, state in states.items()}
    tied = tie(holders, plan.order.place, local_parameters, mesh, config.launch.timeout)
    # random numbers of training (dropout) differ on every rank
    torch.manual_seed(piece_seed(config.seed, "rank", dist.get_rank()))
    loss = build_loss(config.loss, mesh.device)
    norms = BatchNorms(stages.values(), mesh)
    reached = Reached(stages.values(), canonical, mesh, plan.zero)
    casts = []
    if config.precision.low and not wrapped_in_fsdp(config):
        casts = [CastParameters(stage, compute_dtype(config)) for stage in stages.values()]
    parts = {"tied": tied, "norms": norms, "reached": reached, "deferred": deferred, "casts": casts}
    pipeline = Pipeline(plan.order, plan.model_graph, stages, loss, mesh, plan.zero, **parts)
    lists = [*stages.values()], [*states.values()]
    run = Run(mesh, plan, *lists, pipeline, norms, Late(mesh), compiled, origin)
    run.train_mode(True)
    built()
    return run


def memory_is_short(
    config: Config, plan: Draft, mesh: Mesh, memory: Callable[[], int | None]
) -> bool:
    """Whether a rank on the CPU may run out of memory if the blocks that it gathers and frees stay
    holes between others, which then take as much again as what is in use.

    memory: bytes that training may take; None = not known.
    """
    if mesh.device.type != "cpu" or config.dp == config.replicate:
        return False
    limit = memory()
    numel = sum(plan.stage_numel(stage) for stage in plan.order.local(mesh.pp_rank))
    return limit is None or _HOLES * state_bytes(config, plan.zero, False) * numel > limit


def _least_memory(config: Config, mesh: Mesh) -> int | None:
    """What training may take on each device, by the smallest of all ranks, which decide alike."""
    mine = memory_for_training(config)
    least = torch.tensor([-1e18 if mine is None else -mine], dtype=torch.float64)
    least = -mesh.max(least.to(mesh.device)).item() if mesh.world_size > 1 else -least.item()
    return None if least >= 1e18 else int(least)


def _shard(
    stage: Stage, config: Config, plan: Draft, modules: list[str], used: list[str], mesh: Mesh
) -> None:
    """modules: the stage's; used: weights that it uses outside of them."""
    units = [unit for unit in plan.model_graph.units if unit.name in modules]
    shard_stage(stage, fsdp_groups(stage, units, used), config, mesh, plan.zero)
