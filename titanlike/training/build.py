"""From a config to everything that a run is made of, in the order in which it happens.

1. `draft` decides: the stages and the order of computing.
2. This rank's stages are taken out of the model on the meta device, sharded, allocated and
   initialized; each gets an optimizer.
3. torch's pipeline runtime is laid over them, for each shape of batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanlike.config.schema import Config
from titanlike.data.sources import Data
from titanlike.graph.cut import StageGraph, messages, same_messages
from titanlike.graph.model_graph import Fields, fields_of, shapes
from titanlike.graph.stage import Stage, fsdp_groups
from titanlike.models.registry import build_model, initial_weights_of
from titanlike.optim.chunked_loss import loss_of_output
from titanlike.optim.loss import Loss, build_loss
from titanlike.optim.optimizer import build_optimizer
from titanlike.optim.stage_state import StageState
from titanlike.parallel.batchnorm import BatchNorms
from titanlike.parallel.initialize import initialize, piece_seed
from titanlike.parallel.mesh import Mesh
from titanlike.parallel.sharding import fill_missing_gradients, shard_stage
from titanlike.parallel.tied import tie
from titanlike.pipeline.run import Pipeline
from titanlike.split.auto_split import measured_times
from titanlike.torch_private.pipelining import OrderRuntime, halves_are_exact, make_stage
from titanlike.training.draft import Draft, draft


@dataclass(frozen=True)
class Run:
    """This rank's share of the model, ready to train."""

    mesh: Mesh
    draft: Draft
    stages: list[Stage]
    stage_states: list[StageState]
    pipeline: Pipeline
    norms: BatchNorms
    origin: str  # of the initial weights, in words

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Of all stages of this rank."""
        return [parameter for state in self.stage_states for _, parameter in state.parameters()]

    @cached_property
    def owned(self) -> list[nn.Parameter]:
        """The same, but tied ones on one of the ranks that hold a copy."""
        return [p for state in self.stage_states for n, p in state.parameters() if state.owns(n)]

    def train_mode(self, on: bool) -> None:
        modes = self.draft.model_graph.training_flags[on]
        for stage in self.stages:
            stage.train(on)
            for name, module in stage.named_modules():
                if name in modes and name:
                    module.training = modes[name]


def build(config: Config, mesh: Mesh, data: Data | None = None) -> Run:
    """Build this rank's stages and the pipeline over them. Collective.

    data: see `draft`.
    """
    plan = draft(config, data, partial(measured_times, config, mesh))
    start = initial_weights_of(plan.model, config.seed)
    holds = plan.model_graph.stage_modules()
    graphs = plan.model_graph.graphs(plan.fields, True)
    canonical = plan.model_graph.canonical_names()
    stages: dict[int, Stage] = {}
    states: dict[int, StageState] = {}
    for index in plan.order.local(mesh.pp_rank):
        held, weights = holds[index]
        stage = stages[index] = Stage(build_model(plan.model), held, weights)
        if config.dp > 1:
            fill_missing_gradients(
                [stage.get_submodule(n.target) for n in graphs[index].nodes if n.data_dependent]
            )
        units = [unit for unit in plan.model_graph.units if unit.name in held]
        shard_stage(stage, fsdp_groups(stage, units, weights), config, mesh, plan.zero)
        everything = stage.named_parameters(remove_duplicate=False)
        names = {name: canonical[name] for name, _ in everything}
        initialize(stage, start, _home(config, mesh), names)
        owned = [name for name in names.values() if _owner(plan, name) == index]
        if stage.state_dict():  # a batch norm without weights still has something to save
            optimizer = build_optimizer(stage, config.optimizer)
            states[index] = StageState(stage, optimizer, names, frozenset(owned))
    origin = start.origin
    del start  # of some models it holds all weights
    holders = {
        name: [stage for stage, held in enumerate(plan.stage_parameters) if name in held]
        for name in canonical.values()
    }
    here = {index: dict(state.parameters()) for index, state in states.items()}
    tied = tie(holders, plan.order.place, here, mesh, config.launch.timeout)
    # what a model draws while it trains (dropout) differs on every rank
    torch.manual_seed(piece_seed(config.seed, "rank", dist.get_rank()))
    loss = build_loss(config.loss, mesh.device)

    def runtime_for(fields: Fields) -> OrderRuntime:
        return _runtime(plan, stages, fields, loss, mesh)

    mine = list(stages.values())
    norms = BatchNorms(mine, mesh)
    count = partial(_count, plan, loss)
    pipeline = Pipeline(mine, runtime_for, loss, mesh, tied, norms, count)
    run = Run(mesh, plan, mine, list(states.values()), pipeline, norms, origin)
    run.train_mode(True)
    return run


def _runtime(
    plan: Draft, stages: dict[int, Stage], fields: Fields, loss: Loss, mesh: Mesh
) -> OrderRuntime:
    """torch's pipeline over this rank's stages, for batches of such fields."""
    training, evaluation = (plan.model_graph.graphs(fields, on) for on in (True, False))
    rows = plan.model_graph.microbatch_size
    example = {
        name: torch.empty(rows, *field.shape, dtype=field.dtype, device="meta")
        for name, field in fields.items()
    }
    wrapped = []
    for index, stage in stages.items():
        graph, other = training[index], evaluation[index]
        assert same_messages(graph, other), "the draft has looked"
        for which in (graph, other):
            if lost := [name for name in which.units if not _has(stage, name)]:
                shown = ", ".join(f"{name} {list(field.shape)}" for name, field in fields.items())
                raise ValueError(f"model: for a batch of {shown} its forward also uses {lost[0]}")
        stage.add_forwards(shapes(fields), {True: graph, False: other}, index, mesh.device)
        arrives, sends = messages(graph)
        wrapped.append(
            make_stage(
                stage,
                index,
                plan.order.stages,
                device=mesh.device,
                group=mesh.axes.get_group("pp"),
                inputs=[example["inputs"]] if index == 0 else arrives,
                outputs=sends,
                zero=plan.zero,
                splits_weights=_may_split(plan, index, graph)
                and halves_are_exact(stage, plan.model_graph.model),
            )
        )
    used = [training[index].fields | evaluation[index].fields for index in stages]
    wanted = set().union(*used)
    last = plan.order.stages - 1

    def loss_of(output: Any, targets: torch.Tensor) -> torch.Tensor:
        graphs = training if stages[last].training else evaluation
        return loss_of_output(loss, graphs[last], output, targets)

    return OrderRuntime(plan.order, wrapped, loss_of, sorted(wanted), zero=plan.zero)


def _has(stage: Stage, name: str) -> bool:
    return any(name == here for here, _ in stage.named_modules())


def _may_split(plan: Draft, index: int, graph: StageGraph) -> bool:
    """Whether a schedule may compute a stage's gradients of weights later than those of inputs."""
    if any(
        node.chunked_head is not None or node.checkpointed or node.data_dependent
        for node in graph.nodes
    ):
        return False  # it would compute what both are made of twice
    return bool(plan.stage_parameters[index]) and not plan.model_graph.reuses_weights(graph)


def _count(plan: Draft, loss: Loss, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """How many terms the loss of a batch has."""
    targets = batch["targets"]
    count = loss.count(targets)
    if count is None:
        rows = plan.model_graph.microbatch_size
        part = torch.empty(rows, *targets.shape[1:], dtype=targets.dtype, device="meta")
        terms = loss.terms(plan.model_graph.meta_output(fields_of(batch), True), part)
        count = torch.tensor(terms * (len(targets) // rows), device=targets.device)
    return count


def _owner(plan: Draft, name: str) -> int:
    """The stage that answers for a parameter: in the gradient norm, in a checkpoint."""
    return next(stage for stage, held in enumerate(plan.stage_parameters) if name in held)


def _home(config: Config, mesh: Mesh) -> torch.device:
    """Where parameters live between steps."""
    return torch.device("cpu") if config.fsdp.cpu_offload else mesh.device
