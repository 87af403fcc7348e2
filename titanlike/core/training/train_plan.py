"""Plan a run on the meta device: model, stages, pipeline schedule, sharding.

It needs no process group and allocates nothing. The launcher plans a run to find errors before a
worker starts (`preflight.py`), and every rank plans it again before it builds.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from titanlike.core.config.errors import ConfigError, Problem, Refused
from titanlike.core.config.groups import pipeline
from titanlike.core.config.groups.hardware import Hardware
from titanlike.core.config.groups.user_code import Custom, CustomOptimizer
from titanlike.core.config.schema import Config
from titanlike.core.config.validate import broken_rules
from titanlike.core.data.loader import example_batch, field_problems, opened
from titanlike.core.data.registry import vocab_size
from titanlike.core.data.sources import Batch, Data
from titanlike.core.device.choose import first_device, ranks_of
from titanlike.core.device.memory import total_memory
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.distributed.placement import Placement
from titanlike.core.distributed.transform import Transform
from titanlike.core.graph.cut import StageGraph
from titanlike.core.graph.model_graph import Fields, ModelGraph, fields_of
from titanlike.core.graph.recording import RecordError
from titanlike.core.models.registry import build_model, resolve_model
from titanlike.core.optim.loss import build_loss
from titanlike.core.pipeline.order import Action, Order
from titanlike.core.training import checks
from titanlike.core.training.memory_choices import MemoryChoices, choose_by_memory
from titanlike.core.training.recorded_model import record_model
from titanlike.core.training.transforms import model_transforms

if TYPE_CHECKING:  # each is imported where a config asks for it
    from titanlike.core.distributed.collectives import GroupInfo
    from titanlike.planning.costs.auto_split import AutoSplitResult, MeasureTimes
    from titanlike.planning.costs.unit_costs import UnitCosts


@dataclass(frozen=True, kw_only=True)
class TrainPlan(MemoryChoices):
    """The decisions that are made before anything is allocated."""

    model: Custom  # with all arguments, defaults included
    order: Order
    why_microbatches: str
    model_graph: ModelGraph  # the model, its units, and the graph of each stage
    stage_modules: list[tuple[list[str], list[str]]]  # see `ModelGraph.stage_modules`
    # by stage: parameter (a tied one under its first name) -> number of elements, on the
    # tensor-parallel rank with the most
    stage_parameters: list[dict[str, int]]
    whole_numel: int  # elements of the model's parameters, tied ones once
    unused: list[str]  # parameters that the forward does not use: they stay as they are
    flops_per_token: float | None  # as the model declares; None if batches differ in length
    unit: str  # what a batch has so many of: "tokens", or "samples" of data without
    variable: bool  # whether batches differ in length
    transforms: Mapping[str, Transform]  # applied to the model before it was recorded
    orders: Mapping[int, Order]  # with `ramp`: rows of a batch on a dp rank -> schedule
    auto_split: AutoSplitResult | None = None  # how split=auto found the stages

    @property
    def microbatches(self) -> int:
        return self.order.microbatches

    def microbatches_of(self, rows: int) -> int:
        return self.orders.get(rows, self.order).microbatches

    @property
    def peers(self) -> dict[str, GroupInfo]:
        """The process-group info of each axis that communicates inside of layers."""
        return {n: t.first for n, t in self.transforms.items() if t.first is not None}

    @property
    def placements(self) -> dict[str, Placement]:
        """How parameters are sharded over these axes, on the first rank of each."""
        return {n: p for t in self.transforms.values() for n, p in t.placements.items()}

    @property
    def fields(self) -> Fields:
        """Fields of the batch that the model takes."""
        return self.model_graph.fields

    @property
    def stages(self) -> list[list[str]]:
        """Names of the units of each stage."""
        return self.model_graph.stages

    def blocks(self, stage: int) -> list[str]:
        """Names of a stage's blocks: modules that can be recomputed and compiled."""
        blocks = {unit.name for unit in self.model_graph.units if unit.block}
        return [name for name in self.stages[stage] if name in blocks]

    def stage_numel(self, stage: int) -> int:
        """The number of parameter elements of a stage on a tensor-parallel rank."""
        return sum(self.stage_parameters[stage].values())

    def peak_bytes(self) -> int | None:
        """Peak bytes of the rank that needs most; None where activations cannot be estimated."""
        memory = self.memory()
        return None if memory.unknown else max(memory.of_ranks(self.recomputed.blocks))


def make_plan(
    config: Config,
    data: Data | None = None,
    measure_times: MeasureTimes | None = None,
    device_memory: Callable[[], int | None] | None = None,
    mesh: Mesh | None = None,
    checked: Mapping[str, Transform] | None = None,
) -> TrainPlan:
    """Decide stages, schedule and sharding. Raises ConfigError with every problem found.

    data: the open data; None = custom data is opened here for an example batch. measure_times:
    times units, for split.cost=time; without it FLOPs stand for times. device_memory: returns the
    memory budget (see `memory_for_training`), the same on every rank; mesh: None in the launcher;
    checked: transforms of an earlier plan of the same model and data, whose checks are not
    repeated.
    """
    resolved = resolve_model(config)
    model = build_model(resolved)
    order, why_microbatches = _choose_order(config, model)
    zero, why_zero = _choose_zero(config, order.splits_backward)
    whole_numel = sum(parameter.numel() for parameter in model.parameters())
    own = opened(config, data)
    batch = example_batch(config, own)
    if own is not None:
        checks.check_first_ids(own, checks.vocabulary_of(model, resolved), config)
    unit = _unit(config, data, batch)
    if problems := field_problems(config, model, fields_of(batch)):
        raise ConfigError(problems)
    variable = data is not None and bool(data.variable)  # tokens of a step are then unknown
    declared = getattr(model, "flops_per_token", None)
    # of the whole model, thus before tensor parallelism leaves each layer one rank's part
    flops_per_token = None if variable or declared is None else declared(config.seq_len)
    transforms = model_transforms(config, model, mesh, batch, checked or {})
    loss = next((x for t in transforms.values() if (x := t.loss())), build_loss(config.loss))
    loss.backward_follows, loss.compiled = order.backward_follows, config.compile
    recorded = record_model(
        config, resolved, model, batch, order.microbatches, loss, transforms, variable
    )
    model_graph, targets = recorded.graph, recorded.targets
    peers = {name: t.first for name, t in transforms.items() if t.first is not None}

    @functools.cache
    def unit_costs() -> UnitCosts:
        from titanlike.planning.costs.unit_costs import UnitCosts

        return UnitCosts(model_graph, targets, loss, peers)

    split_and_graphs = _cut_stages(config, model_graph, unit_costs, order, zero, measure_times)
    auto_split, graphs, evaluated = split_and_graphs
    if problems := checks.stage_problems(config, model_graph, graphs, evaluated):
        raise ConfigError(problems)
    stage_modules = model_graph.stage_modules(graphs, evaluated)
    parameters = [
        {name: p.numel() for name, p in model_graph.parameters_of(*stage).items()}
        for stage in stage_modules
    ]

    limit = device_memory or functools.partial(memory_for_training, config)
    chosen = choose_by_memory(
        config,
        model_graph,
        targets,
        unit_costs,
        graphs,
        order,
        parameters,
        zero=(zero, why_zero),
        device_memory=limit,
    )
    used = {
        name for graph in graphs for name in model_graph.parameters_of(graph.units, graph.weights)
    }
    return TrainPlan(
        **vars(chosen),
        model=resolved,
        order=order,
        why_microbatches=why_microbatches,
        model_graph=model_graph,
        stage_modules=stage_modules,
        stage_parameters=parameters,
        whole_numel=whole_numel,
        unused=[name for name, _ in model.named_parameters() if name not in used],
        flops_per_token=flops_per_token,
        unit=unit,
        variable=variable,
        transforms=transforms,
        orders=_orders_of_ramp(config, model),
        auto_split=auto_split,
    )


def local_ranks(config: Config) -> int:
    """The number of ranks on this machine as torchrun or srun says; all ranks in the launcher."""
    if started_outside():
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return config.world_size


def started_outside() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def memory_for_training(config: Config) -> int | None:
    """The default memory budget of a device in bytes: its memory less 8% for fragmentation and
    communication buffers; or that of the planned hardware."""
    ranks = local_ranks(config)
    if isinstance(config.hardware, Hardware):
        return config.hardware.of_each(min(config.launch.ranks_per_device, ranks)).usable
    device = first_device(config.device)
    total = total_memory(device, ranks, ranks_of(device, config.launch, ranks))
    return None if total is None else int(0.92 * total)


def _choose_order(config: Config, model: nn.Module) -> tuple[Order, str]:
    """Return the schedule's Order, and why it has so many microbatches.

    Raises ConfigError with every problem that is found without a forward.
    """
    problems = checks.model_problems(model, config) + checks.norm_problems(config, model)
    problems += broken_rules(checks.MULTI_TOKEN, config, model)
    problems += checks.changed_problems(config, model) + checks.muon_problems(config, model)
    if not isinstance(config.optimizer, CustomOptimizer) and config.optimizer.groups:
        from titanlike.core.optim.groups import group_problems

        problems += group_problems(config.optimizer, model)
    order, why, wrong = _order_of(config)
    problems += wrong
    if order is not None:
        problems += broken_rules(checks.SHARDING, config, order)
    if order is None or problems:  # a forward would only raise the same in other words
        raise ConfigError([*problems, *checks.split_problems(config, model)])
    return order, why


def _order_of(config: Config) -> tuple[Order | None, str, list[Problem]]:
    """As `from_config.choose_order`, but gradient accumulation without a pipeline is planned
    here."""
    if config.pp == 1 and config.schedule.name == "1f1b" and not config.exact:
        asked = getattr(config.schedule, "microbatches", None)
        if asked is None or asked > 0:  # 1F1B with one stage is gradient accumulation
            count = asked or 1
            acts = tuple(Action(kind, 0, mb) for mb in range(count) for kind in "FB")
            return Order((acts,), (0,), count), "asked for" if asked else "no pipeline to fill", []
    from titanlike.core.pipeline.from_config import choose_order

    return choose_order(config)


def _orders_of_ramp(config: Config, model: nn.Module) -> dict[int, Order]:
    """For each stage of the batch-size ramp, rows of a batch on a dp rank -> Order. Raises
    ConfigError."""
    orders = {}
    for stage in config.ramp:
        size = stage.batch_size or config.batch_size
        rows = size // config.dp
        order, _ = _choose_order(replace(config, batch_size=size, ramp=[]), model)
        if rows % order.microbatches:
            reason = f"{rows} sequences of a dp rank do not divide into {order.microbatches}"
            fix = f"a batch_size that {order.microbatches * config.dp} divides"
            raise ConfigError([Problem("ramp", f"{{batch_size:{size}}}", reason, fix)])
        orders[rows] = order
    return orders


def _choose_zero(config: Config, splits_backward: bool) -> tuple[int, str]:
    """Choose `fsdp.zero`: (1, 2 or 3, why), see `titanlike.core.distributed.sharding`."""
    if config.fsdp.zero != "auto":
        return config.fsdp.zero, "asked for"
    if config.shards == 1:
        return 1, "nothing is sharded"
    if splits_backward:
        return 1, "the schedule splits the backward"
    if config.pp == 1:
        return 3, "no pipeline: each block is gathered when it runs"
    return 2, "a pipeline: parameters stay gathered for a step, gradients do not"


def _cut_stages(
    config: Config,
    model_graph: ModelGraph,
    unit_costs: Callable[[], UnitCosts],
    order: Order,
    zero: int,
    measure_times: MeasureTimes | None,
) -> tuple[AutoSplitResult | None, list[StageGraph], list[StageGraph]]:
    """(how split=auto found the stages, each stage's graph in training, in evaluation).

    Raises ConfigError.
    """
    fields, auto_split = model_graph.fields, None
    auto = isinstance(config.split, pipeline.AutoSplit)
    model_graph.place, model_graph.relayed = order.stage_to_rank, config.exact
    try:
        if auto and order.stages > 1:
            from titanlike.planning.costs.auto_split import find_auto_split

            auto_split = find_auto_split(
                config, unit_costs(), model_graph.units, order, zero, measure_times
            )
            model_graph.stages = auto_split.stages(model_graph.units)
        else:
            model_graph.stages = _declared_stages(config, model_graph, order.stages)
        return auto_split, model_graph.graphs(fields, True), model_graph.graphs(fields, False)
    except Refused as error:  # raised for the split
        raise ConfigError([error.problem]) from None
    except RecordError as error:  # raised for the loss in the last stage
        problem = Problem("loss.name", config.loss.name, error.reason, error.fix)
        raise ConfigError([problem]) from None


def _declared_stages(config: Config, model_graph: ModelGraph, stages: int) -> list[list[str]]:
    """The unit names of each stage, as `split` says. Raises Refused."""
    units, split = model_graph.units, config.split
    if isinstance(split, pipeline.AutoSplit):
        split = pipeline.EvenSplit()
    if stages == 1 and isinstance(split, pipeline.EvenSplit):
        return [[unit.name for unit in units]]
    from titanlike.core.graph.partition import partition

    return partition(units, split, stages)


def _unit(config: Config, data: Data | None, batch: Batch) -> str:
    """Return what a run counts: tokens, or samples where these have none or not equally many.
    Raises ConfigError if samples have other numbers of tokens than are counted."""
    inputs, variable = batch["inputs"], data is not None and data.variable is not None
    ids = inputs.dim() < 3 and not inputs.is_floating_point()
    known = (vocab_size(config) if data is None else data.vocab_size) is not None
    if ids and known and not variable:
        length = inputs.shape[1] if inputs.dim() == 2 else 1
        if length < config.seq_len:
            reason = f"the samples of data.name={config.data.name} have {length} tokens"
            raise ConfigError([Problem("seq_len", config.seq_len, reason, f"seq_len={length}")])
        return "tokens"
    if config.max_tokens is not None:
        reason = "the samples have no tokens, or not equally many, so tokens are not counted"
        raise ConfigError([Problem("max_tokens", config.max_tokens, reason, "max_tokens=null")])
    return "samples"
