"""What a config decides before anything is allocated: model, stages, order, sharding.

No process group and no memory: everything is on the meta device. The driver drafts a run to find
mistakes before a worker starts (`preflight`), and every rank drafts it again before it builds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch import nn

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import (
    AutoSplit,
    ChunkedCrossEntropy,
    Config,
    Custom,
    EvenSplit,
    PointSplit,
    TraceSplit,
)
from titanlike.data.errors import DataError
from titanlike.data.example_batch import example_batch, field_problems
from titanlike.data.sources import Data
from titanlike.graph.cut import StageGraph, cut, message_problem, same_messages
from titanlike.graph.find_units import find_units
from titanlike.graph.model_graph import Fields, ModelGraph, fields_of
from titanlike.graph.recording import RecordError
from titanlike.models.registry import build_model, model_problems, resolve_model
from titanlike.optim.chunked_loss import HeadNested, find_head, with_chunked_loss
from titanlike.optim.loss import Loss, build_loss, check_loss
from titanlike.parallel.batchnorm import leave_statistics, norm_problems, shared_norm_problems
from titanlike.parallel.device import choose_device
from titanlike.parallel.sharding import compute_dtype
from titanlike.pipeline.order import Order
from titanlike.pipeline.schedules import (
    NoDivision,
    build_order,
    declared_microbatches,
    derive_microbatches,
    stage_count,
)
from titanlike.split.auto_split import AutoSplitResult, MeasureTimes, find_auto_split
from titanlike.split.partition import SplitError, partition
from titanlike.split.unit_costs import UnitCosts


@dataclass(frozen=True)
class Draft:
    """What is decided before anything is allocated."""

    model: Custom  # with all of its arguments
    order: Order
    microbatches: int
    why_microbatches: str
    zero: int
    why_zero: str
    model_graph: ModelGraph  # the model, its units, and the graph of each stage
    fields: Fields  # of the batch, that the model takes
    # of each stage: parameter (a tied one under its first name) -> number of elements
    stage_parameters: list[dict[str, int]]
    flops_per_token: float | None
    auto_split: AutoSplitResult | None = None  # how the stages were found, of split=auto

    @property
    def stages(self) -> list[list[str]]:
        """Names of the units of each stage."""
        return self.model_graph.stages

    def stage_numel(self, stage: int) -> int:
        """Elements of a stage's parameters."""
        return sum(self.stage_parameters[stage].values())

    @property
    def numel(self) -> int:
        """Elements of the model's parameters, tied ones once."""
        sizes: dict[str, int] = {}
        for parameters in self.stage_parameters:
            sizes |= parameters
        return sum(sizes.values())


def draft(config: Config, data: Data | None = None, timing: MeasureTimes | None = None) -> Draft:
    """Decide stages, order and sharding. Raises ConfigError with every problem found.

    data: where it is open already; else a user's own data is opened to see what is in a batch.
    timing: measures units, for split.cost=time; without it FLOPs stand for times.
    """
    resolved = resolve_model(config)
    model = build_model(resolved)
    problems = model_problems(model, config) + norm_problems(config, model)
    rows = 1
    try:
        microbatches, why = _microbatches(config)
        order = build_order(config.schedule, config.pp, microbatches)
        rows = config.batch_size // config.dp // microbatches
    except NoDivision as error:
        fix = "" if error.works is None else f"batch_size={error.works * config.dp}"
        problems.append(Problem("batch_size", config.batch_size, str(error), fix))
    except ValueError as error:
        problems.append(Problem.parse("schedule", str(error)))
    else:
        problems += _sharding_problems(config, order)
    if problems:  # its forward is not tried: it would only say the same in other words
        raise ConfigError([*problems, *_split_problems(config, model)])
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(compute_dtype(config))
    leave_statistics(model)  # on meta there are none
    batch = example_batch(config, data)
    fields = fields_of(batch)
    if problems := field_problems(config, model, fields):
        raise ConfigError(problems)
    model_graph = _model_graph(config, resolved, model, fields, rows)
    targets = batch["targets"].repeat_interleave(rows, 0)
    if problems := check_loss(config.loss, model_graph.meta_output(fields, True), targets, rows):
        raise ConfigError(problems)
    zero, why_zero = _zero(config, order.splits_backward)
    # of sequences that differ in length nobody knows how many tokens a step has
    flops = getattr(model, "flops_per_token", None) if data is None or not data.variable else None
    chosen = None
    try:
        if isinstance(config.split, AutoSplit) and order.stages > 1:
            unit_costs = UnitCosts(model_graph, targets, build_loss(config.loss))
            chosen = find_auto_split(config, unit_costs, model_graph.units, order, zero, timing)
            model_graph.stages = chosen.stages(model_graph.units)
        else:
            split = EvenSplit() if isinstance(config.split, AutoSplit) else config.split
            model_graph.stages = partition(model_graph.units, split, order.stages)
        graphs, evaluated = (model_graph.graphs(fields, on) for on in (True, False))
    except SplitError as error:
        raise ConfigError([_split_problem(error)]) from None
    except RecordError as error:  # of the end of the last stage
        problem = Problem("loss.name", config.loss.name, error.reason, error.fix)
        raise ConfigError([problem]) from None
    reasons = [text for graph in graphs if (text := message_problem(graph))]
    if not all(map(same_messages, graphs, evaluated)):
        reasons.append("a stage would send other tensors in evaluation than in training")
    if reasons:
        fix = "split=points with points elsewhere"
        raise ConfigError([Problem("split", config.split.name, reasons[0], fix)])
    if problems := shared_norm_problems(config, model, [graph.units for graph in graphs]):
        raise ConfigError(problems)
    held = [model_graph.parameters_of(graph) for graph in graphs]
    left = model.named_parameters()
    if unused := [name for name, _ in left if not any(name in stage for stage in held)]:
        names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" * (len(unused) > 3))
        reason = f"its forward does not use the parameter {names}"
        raise ConfigError([Problem("model.name", resolved.name, reason, "a model without it")])
    return Draft(
        model=resolved,
        order=order,
        microbatches=microbatches,
        why_microbatches=why,
        zero=zero,
        why_zero=why_zero,
        model_graph=model_graph,
        fields=fields,
        stage_parameters=[{name: p.numel() for name, p in stage.items()} for stage in held],
        flops_per_token=None if flops is None else flops(config.seq_len),
        auto_split=chosen,
    )


def _model_graph(
    config: Config, model: Custom, meta: nn.Module, fields: Fields, rows: int
) -> ModelGraph:
    """The model's forward, run once on meta. Raises ConfigError."""
    points = config.split.points if isinstance(config.split, PointSplit) else []
    chunked = isinstance(config.loss, ChunkedCrossEntropy)
    traced = isinstance(config.split, TraceSplit)
    try:
        model_graph = ModelGraph(meta, fields, rows, points, traced=traced)
        while chunked and (inside := _in_head(model_graph, build_loss(config.loss))):
            points = [*points, *inside]
            model_graph = ModelGraph(meta, fields, rows, points, traced=traced)
        model_graph.recording(fields, False)
        return model_graph
    except RecordError as error:
        problem = Problem("model.name", model.name, error.reason, error.fix)
    except TypeError as error:  # of the call, or of something inside
        given = ", ".join(fields)
        reason = f"its forward cannot be called with what the data gives ({given}): {error}"
        fix = "a forward with these arguments, or data with those that it needs"
        problem = Problem("model.name", model.name, reason, fix)
    except Exception as error:  # whatever a forward raises
        told = ", ".join(f"{name} {[rows, *field.shape]}" for name, field in fields.items())
        reason = f"its forward on {told} raised {type(error).__name__}: {error}"
        fix = "sizes of model and data that fit each other"
        problem = Problem("model", model.name, reason, fix)
    raise ConfigError([problem])


def _in_head(model_graph: ModelGraph, loss: Loss) -> list[str]:
    """Let the last stage compute the loss; or modules in the last unit, which is to be taken apart."""

    def end(graph: StageGraph) -> StageGraph:
        return with_chunked_loss(graph, find_head(graph, model_graph.model, loss))

    recording = model_graph.recording(model_graph.fields, True)
    try:
        end(cut(recording, [recording.units])[0])
    except HeadNested as inside:
        return inside.points
    except RecordError:
        pass  # told when the stages are known
    model_graph.last_stage = end
    return []


def _split_problems(config: Config, model: nn.Module) -> list[Problem]:
    """What can be said of the split before the model ran."""
    if isinstance(config.split, (AutoSplit, TraceSplit)):
        return []
    try:
        partition(find_units(model), config.split, stage_count(config.schedule, config.pp))
    except SplitError as error:
        return [_split_problem(error)]
    except ValueError:
        pass  # the schedule has no number of stages: that is a problem already
    return []


def _split_problem(error: SplitError) -> Problem:
    return Problem(error.key, error.value, error.reason, error.fix.removeprefix("write "))


def preflight(config: Config) -> list[Problem]:
    """Every problem that takes the model to be found; allocates nothing."""
    problems = []
    try:
        # ranks on this machine: of torchrun or srun, or all of them where this is the driver
        started = int(os.environ.get("WORLD_SIZE", "1")) > 1
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if started else config.world_size
        choose_device(config.device, 0, ranks)
    except ValueError as error:
        problems.append(Problem.parse("device", str(error)))
    try:
        draft(config)
    except ConfigError as error:
        problems += error.problems
    except DataError as error:  # of a user's own data, which are opened
        fix = error.remedy[:1].lower() + error.remedy[1:]
        problems.append(Problem(error.key, error.value, error.reason, fix))
    return problems


def _microbatches(config: Config) -> tuple[int, str]:
    """How many, and why."""
    declared = declared_microbatches(config.schedule)
    if declared is not None:
        return declared, "asked for"
    return derive_microbatches(config.schedule, config.pp, config.batch_size // config.dp)


def _sharding_problems(config: Config, order: Order) -> list[Problem]:
    """What is known to give wrong gradients, and what would do nothing."""
    if order.splits_backward and config.fsdp.zero in (2, 3):
        reason = (
            f"schedule={config.schedule.name} splits the backward in two, and FSDP loses gradients "
            "when it reduces or reshards between the halves"
        )
        fix = "fsdp.zero=1, or a schedule with whole backwards such as interleaved1f1b"
        return [Problem("fsdp.zero", config.fsdp.zero, reason, fix)]
    if config.dp == config.replicate and config.fsdp.zero in (2, 3):
        reason = f"dp={config.dp} replicate={config.replicate} shards nothing"
        fix = f"fsdp.zero=auto, or dp={2 * config.replicate}"
        return [Problem("fsdp.zero", config.fsdp.zero, reason, fix)]
    return []


def _zero(config: Config, splits_backward: bool) -> tuple[int, str]:
    """(1, 2 or 3, why) for `fsdp.zero`, see `titanlike.parallel.sharding`."""
    if config.fsdp.zero != "auto":
        return config.fsdp.zero, "asked for"
    if config.dp == config.replicate:
        return 1, "nothing is sharded"
    if splits_backward:
        return 1, "the schedule splits the backward"
    if config.pp == 1:
        return 3, "no pipeline: each block is gathered when it runs"
    return 2, "a pipeline: parameters stay gathered for a step, gradients do not"
