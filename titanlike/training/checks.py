"""Checks of a config against its model and schedule: each returns the problems that it finds."""

from __future__ import annotations

from torch import nn

from titanlike.config.errors import Problem
from titanlike.config.schema import AutoSplit, Config, Custom, TraceSplit
from titanlike.graph.cut import StageGraph, message_problem, same_messages
from titanlike.graph.find_units import find_units
from titanlike.graph.model_graph import ModelGraph
from titanlike.parallel.batchnorm import shared_norm_problems
from titanlike.pipeline.from_config import stage_count
from titanlike.pipeline.order import Order
from titanlike.split.partition import SplitError, partition


def sharding_problems(config: Config, order: Order) -> list[Problem]:
    """Sharding that gives wrong gradients, or has no effect."""
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


def split_problems(config: Config, model: nn.Module) -> list[Problem]:
    """What is wrong with the split, as far as can be said without a forward."""
    if isinstance(config.split, (AutoSplit, TraceSplit)):
        return []
    try:
        partition(find_units(model), config.split, stage_count(config.schedule, config.pp))
    except SplitError as error:
        return [split_problem(error)]
    except ValueError:
        pass  # the schedule has no number of stages: that is a problem already
    return []


def split_problem(error: SplitError) -> Problem:
    return Problem(error.key, error.value, error.reason, error.fix.removeprefix("write "))


def stage_problems(
    config: Config,
    resolved: Custom,
    model_graph: ModelGraph,
    graphs: list[StageGraph],
    evaluated: list[StageGraph],
) -> list[Problem]:
    """What is wrong with stages whose graphs are known, in training and in evaluation."""
    reasons = [text for graph in graphs if (text := message_problem(graph))]
    if not all(map(same_messages, graphs, evaluated)):
        reasons.append("a stage would send other tensors in evaluation than in training")
    if reasons:
        fix = "split=points with points elsewhere"
        return [Problem("split", config.split.name, reasons[0], fix)]
    units = [graph.units for graph in graphs]
    if problems := shared_norm_problems(config, model_graph.model, units):
        return problems
    used = {name for graph in graphs for name in model_graph.parameters_of(graph)}
    if unused := [name for name, _ in model_graph.model.named_parameters() if name not in used]:
        names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" * (len(unused) > 3))
        reason = f"its forward does not use the parameter {names}"
        return [Problem("model.name", resolved.name, reason, "a model without it")]
    return []
