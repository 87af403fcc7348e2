"""From a config to everything that a run is made of, in the order in which it happens.

1. `draft` decides: the stages and the order of computing.
2. This rank's stages are taken out of the model on the meta device, sharded, allocated and
   initialized; each gets an optimizer.
3. The pipeline is laid over them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.config.schema import Config, Muon
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
from titanlike.parallel.busy import BusyTime
from titanlike.parallel.cast_parameters import CastParameters
from titanlike.parallel.compiled_blocks import CompiledBlocks
from titanlike.parallel.cp.tokens import ContextRanks
from titanlike.parallel.expert_balance import ExpertBalance
from titanlike.parallel.expert_parallel import ExpertRanks, divide_experts
from titanlike.parallel.initialize import initialize, piece_seed
from titanlike.parallel.late import Late, on_device
from titanlike.parallel.mesh import Mesh
from titanlike.parallel.placement import Placement
from titanlike.parallel.reached import Reached
from titanlike.parallel.sharding import compute_dtype, shard_stage, wrapped_in_fsdp
from titanlike.parallel.tied import tie
from titanlike.parallel.tp.collectives import TensorRanks
from titanlike.parallel.tp.gradients import PartialGradients
from titanlike.parallel.tp.random_numbers import RandomRegions
from titanlike.parallel.tp.tensor_parallel import TensorParallel
from titanlike.parallel.weight_gradients import DeferredWeightGradients
from titanlike.pipeline.pipeline import Pipeline
from titanlike.split.auto_split import measured_times
from titanlike.split.rank_memory import saved_operators
from titanlike.split.state_bytes import state_bytes
from titanlike.torch_private.async_tensor_parallel import overlap_in_compiled_blocks
from titanlike.training.draft import Draft, draft, memory_for_training
from titanlike.training.ranges import Ranges
from titanlike.training.tensor_draft import loss_of

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
    balance: ExpertBalance
    late: Late  # takes numbers off the device
    compiled: CompiledBlocks | None  # with compile=true
    origin: str  # of the initial weights, for the opening table
    ranges: Ranges = field(default_factory=Ranges)  # what a profile shows
    busy: BusyTime | None = None  # how long this rank waits for others, where that is measured

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Of all stages of this rank."""
        return [parameter for state in self.stage_states for _, parameter in state.parameters()]

    @cached_property
    def owned(self) -> list[nn.Parameter]:
        """The same, a tied parameter on one of the ranks that hold a copy."""
        return [p for state in self.stage_states for n, p in state.parameters() if state.owns(n)]

    @cached_property
    def shares(self) -> Tensor | None:
        """Of each of `owned`: 1 / the tensor-parallel ranks that have the same elements, fp32 on the
        device; None without tensor parallelism."""
        if self.draft.tensor is None:
            return None
        placements = self.draft.tensor.placements
        names = [n for state in self.stage_states for n, _ in state.parameters() if state.owns(n)]
        copies = [float(placements[name].copies) for name in names]
        return on_device(1.0 / torch.tensor(copies), self.mesh.device)

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
    ranks = TensorRanks(mesh.tp, mesh.tp_rank)
    context_ranks = ContextRanks(mesh.cp, mesh.cp_rank)
    plan = draft(config, data, times, memory, ranks, context_ranks)
    if memory_is_short(config, plan, mesh, memory):
        return_freed_memory()
    return assemble(config, mesh, plan, ranks, context_ranks, say)


def assemble(
    config: Config,
    mesh: Mesh,
    plan: Draft,
    ranks: TensorRanks,
    context_ranks: ContextRanks,
    say: Callable[[str], object] = lambda _: None,
    fill: Callable[..., object] = initialize,
) -> Run:
    """Build what was decided. Collective.

    ranks, context_ranks: those that the draft was made with; fill: allocates a stage and gives it its
    weights, called as `initialize`.
    """
    if mesh.tp > 1:
        ranks.group = mesh.axes.get_group("tp")  # not before: rank 0 may have timed units alone
    if mesh.cp > 1:
        timeout = timedelta(seconds=config.launch.timeout)
        members = mesh.context_ranks()
        context_ranks.group = dist.new_group(
            members, timeout=timeout, use_local_synchronization=True
        )

    # 2. stages, weights, optimizers
    canonical = plan.model_graph.canonical_names()
    made = _make_stages(config, mesh, plan, ranks, canonical, partial(fill, say=say))
    stages = made.stages
    # of each parameter the stages that hold it: of a tied one, the first is its owner
    holders = {
        name: [index for index, names in enumerate(plan.stage_parameters) if name in names]
        for name in canonical.values()
    }
    states = _make_states(config, mesh, plan, made, canonical, holders)

    # 3. the pipeline
    local_parameters = {index: dict(state.parameters()) for index, state in states.items()}
    tied = tie(holders, plan.order.place, local_parameters, mesh, config.launch.timeout)
    # random numbers of training (dropout) differ on every rank but those that share layers
    torch.manual_seed(piece_seed(config.seed, "rank", mesh.layers_rank))
    loss, tensor = build_loss(config.loss, mesh.device), None
    if plan.tensor is not None:
        loss = loss_of(config, plan.tensor, ranks, mesh.device)
        every = (item for state in states.values() for item in state.placed_parameters())
        of_model = plan.tensor.placements.values()
        partial_gradients = PartialGradients(every, of_model, ranks, mesh, config.launch.timeout)
        tensor = TensorParallel(plan.tensor, ranks, partial_gradients)
    norms = BatchNorms(stages.values(), mesh)
    model = plan.model_graph.model
    balance = ExpertBalance(stages.values(), model, mesh, lambda: ranks.sequence)
    reached = Reached(stages.values(), canonical, mesh, plan.zero)
    casts = []
    if config.precision.low and not wrapped_in_fsdp(config):
        casts = [CastParameters(stage, compute_dtype(config)) for stage in stages.values()]
    more: dict[str, Any] = {"tied": tied, "norms": norms, "balance": balance, "reached": reached}
    more |= {"deferred": made.deferred, "casts": casts}
    common = plan.order, plan.model_graph, stages, loss, mesh, plan.zero
    context = None if plan.context is None else plan.context.parallel
    pipeline = Pipeline(*common, **more, tensor=tensor, context=context)
    lists = [*stages.values()], [*states.values()]
    late = Late(mesh)
    run = Run(mesh, plan, *lists, pipeline, norms, balance, late, made.compiled, made.origin)
    run.train_mode(True)
    built()
    return run


@dataclass(frozen=True)
class _Made:
    """This rank's stages, with their weights."""

    stages: dict[int, Stage]
    deferred: dict[int, DeferredWeightGradients]
    compiled: CompiledBlocks | None
    placements: Mapping[str, Placement]  # of parameters, among tensor-parallel ranks
    origin: str  # of the weights


def _make_stages(
    config: Config,
    mesh: Mesh,
    plan: Draft,
    ranks: TensorRanks,
    canonical: Mapping[str, str],
    fill: Callable[..., object],
) -> _Made:
    weights = initial_weights_of(plan.model, config.seed)
    stages: dict[int, Stage] = {}
    deferred: dict[int, DeferredWeightGradients] = {}
    # the number of documents in a batch is a size, too
    dynamic = plan.variable or "document_ids" in plan.fields
    regions = RandomRegions(ranks, mesh.device)
    group = mesh.expert_group
    expert_ranks = ExpertRanks(config.ep, 0 if group is None else dist.get_rank(group), group)
    placements: Mapping[str, Placement] = {}
    compiled = CompiledBlocks(dynamic) if config.compile else None
    if compiled is not None:
        overlap_in_compiled_blocks(ranks.group if config.tp_async else None)
    for index in plan.order.local(mesh.pp_rank):
        model = build_model(plan.model)
        use_float8(model, config, mesh.device)
        if plan.tensor is not None:
            placements = plan.tensor.divide(model, ranks)
        if config.ep > 1:
            placements = divide_experts(model, expert_ranks, placements)
        stage = stages[index] = Stage(model, *plan.stage_modules[index])
        if plan.tensor is not None:
            regions.add(stage, plan.tensor.draws, plan.tensor.draws_whole)
        if plan.context is not None:
            for name in plan.stage_modules[index][0]:
                plan.context.attention.around(stage.get_submodule(name), name)
        if index in plan.deferred:
            deferred[index] = DeferredWeightGradients(stage, mesh.device)
        checkpoint_blocks(stage, plan.recomputed.blocks[index], saved_operators(config))
        if compiled is not None:
            compiled.add(stage, plan.blocks(index), partial(_why_not_compiled, config, plan, stage))
        _shard(stage, config, plan, *plan.stage_modules[index], mesh)
        device = torch.device("cpu") if config.fsdp.cpu_offload else mesh.device
        parts = {name: placement.part for name, placement in placements.items()}
        fill(stage, weights, device, canonical, parts=parts)
    return _Made(stages, deferred, compiled, placements, weights.origin)


def _why_not_compiled(config: Config, plan: Draft, stage: nn.Module, block: str) -> str:
    """Why a block stays as it is; "" = it is compiled."""
    reason = "" if plan.tensor is None else plan.tensor.why_not_compiled(block)
    if block in plan.model_graph.taking_gradients:
        return "it takes gradients in its forward"
    if plan.context is not None and plan.context.attention.counts(block):
        return "it counts tokens, of which cp ranks have parts"
    return reason


def _make_states(
    config: Config,
    mesh: Mesh,
    plan: Draft,
    made: _Made,
    canonical: Mapping[str, str],
    holders: Mapping[str, list[int]],
) -> dict[int, StageState]:
    """What is trained of each stage; holders: parameter -> the stages that hold it."""
    states: dict[int, StageState] = {}
    group = _weight_group(config, mesh)
    for index, stage in made.stages.items():
        if stage.state_dict():  # a batch norm without weights has buffers to save
            every = stage.named_parameters(remove_duplicate=False)
            names = {name: canonical[name] for name, _ in every}
            owned = frozenset(name for name in names.values() if holders[name][0] == index)
            parameters = {names[name]: parameter for name, parameter in stage.named_parameters()}
            shared = plan.model_graph.model, config, made.placements, group
            optimizers = build_optimizers(parameters, *shared)
            states[index] = StageState(stage, optimizers, names, owned, made.placements)
    return states


def _weight_group(config: Config, mesh: Mesh) -> dist.ProcessGroup | None:
    """The ranks that have parts of this rank's weights, where an optimizer is to ask them; None where
    FSDP has such a group. Collective over them."""
    if config.tp == 1 or not isinstance(config.optimizer, Muon):
        return None
    if config.shards == 1:
        return mesh.axes.get_group("tp")
    timeout = timedelta(seconds=config.launch.timeout)
    ranks = mesh.weight_ranks()
    return dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)


def memory_is_short(
    config: Config, plan: Draft, mesh: Mesh, memory: Callable[[], int | None]
) -> bool:
    """Whether a rank on the CPU may run out of memory if the blocks that it gathers and frees stay
    holes between others, which then take as much again as what is in use.

    memory: bytes that training may take; None = not known.
    """
    if mesh.device.type != "cpu" or config.shards == 1:
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
