"""Checks of a config against its model and schedule: each returns the problems that it finds."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from itertools import chain

from torch import nn

from titanlike.config.errors import Problem
from titanlike.config.schema import AutoSplit, Config, Custom, Muon, TraceSplit
from titanlike.distributed.placement import has_statistics
from titanlike.graph.cut import StageGraph, message_problem, same_messages
from titanlike.graph.model_graph import ModelGraph
from titanlike.graph.partition import SplitError, partition
from titanlike.graph.units import find_units
from titanlike.pipeline.from_config import stage_count
from titanlike.pipeline.order import Order
from titanlike.torch_private.known_code import has_gradient_hooks
from titanlike.torch_private.operators import InstanceNorm

_MOST = 3  # problems of one kind that are shown
_MIX_NOTHING = ("llama", "gpt2", "moe")  # titanlike's own models


def may_mix_samples(config: Config) -> bool:
    """Whether a model or a loss from elsewhere may compute a sample with others of its batch."""
    own_loss = isinstance(config.loss, Custom)
    return not config.mixes_samples and (config.model.name not in _MIX_NOTHING or own_loss)


def norm_problems(config: Config, model: nn.Module) -> list[Problem]:
    """Norms that would give statistics that depend on the layout, or hang."""
    problems = []
    for name, module in model.named_modules():
        key, value = "model.name", config.model.name
        if isinstance(module, nn.SyncBatchNorm):
            communicates = (
                "communicates with all ranks in its forward, also with those of other stages"
            )
            reason = f"its {name} is a SyncBatchNorm, which {communicates}"
            fix = "nn.BatchNorm2d there: its running statistics are those of the whole batch"
        elif isinstance(module, InstanceNorm) and module.running_mean is not None:
            reason = f"its {name} is an instance norm that keeps running statistics"
            fix = "track_running_stats=False there, or a batch norm"
        elif has_statistics(module) and isinstance(config.split, TraceSplit):
            key, value = "split", "trace"
            reason = f"the tracer cannot see that {name} is a batch norm and keeps statistics"
            fix = "split=points or split=even, which leave modules whole"
        elif has_statistics(module) and config.cp > 1:
            key, value = "cp", config.cp
            reason = f"its {name} keeps statistics over all tokens, and a rank has a part of them"
            fix = f"cp=1 dp={config.dp * config.cp}, or a group norm"
        elif has_statistics(module) and config.tp > 1:
            key, value = "tp", config.tp
            reason = f"its {name} keeps running statistics, for which tp has no style"
            fix = f"tp=1 dp={config.dp * config.tp}, or a group norm"
        elif has_statistics(module) and config.precision.low:
            key, value = "precision", config.precision.name
            reason = f"its {name} is a batch norm, whose running statistics are too fine for bf16"
            fix = "precision=fp32, or a group norm"
        else:
            continue
        problems.append(Problem(key, value, reason, fix))
        if key != "model.name":
            break  # the same holds for the model's other batch norms
    return problems


def changed_problems(config: Config, model: nn.Module) -> list[Problem]:
    """Gradients or weights that are changed by what a layout replaces, or in the middle of a
    step."""
    reasons = []
    whole = config.world_size == 1 and getattr(config.schedule, "microbatches", 1) in (None, 1)
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter):
            reason = f"its {name} has a hook on its gradient, of which a rank and a microbatch have parts"
            reasons.append((reason, "the change in an optimizer of your own, or in the forward"))
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding):
            continue
        for key, value, why in (
            ("max_norm", module.max_norm is not None, "changes its weight in each forward"),
            ("sparse", module.sparse, "has a gradient that is no dense tensor"),
            (
                "scale_grad_by_freq",
                module.scale_grad_by_freq and not whole,
                "counts ids in a microbatch of a rank, and not in the batch",
            ),
        ):
            if value:
                fix = f"nn.Embedding without {key}" + ", and F.normalize" * (key == "max_norm")
                reasons.append((f"its {name} is an embedding with {key}, which {why}", fix))
    return [Problem("model.name", config.model.name, *each) for each in reasons[:_MOST]]


def muon_problems(config: Config, model: nn.Module) -> list[Problem]:
    """A model without matrices for Muon, or patterns that name no parameter."""
    optimizer = config.optimizer
    if not isinstance(optimizer, Muon):
        return []
    from titanlike.optim.muon import hidden_matrices

    names = [name for name, _ in model.named_parameters()]
    problems = [
        Problem("optimizer.adamw", pattern, "no parameter has such a name", "optimizer.adamw=[]")
        for pattern in optimizer.adamw
        if not fnmatch.filter(names, pattern)
    ]
    if not problems and not hidden_matrices(model, optimizer):
        reason = "there is nothing for Muon to update: it is for 2-D parameters of blocks"
        problems.append(Problem("optimizer.name", "muon", reason, "optimizer=adamw"))
    return problems


def shared_norm_problems(
    config: Config, model: nn.Module, stages: Sequence[Sequence[str]]
) -> list[Problem]:
    """Batch norms that several stages (units of each) would keep statistics of, each its own."""
    seen: set[str] = set()
    for unit in chain.from_iterable(stages):
        norms = [norm for norm in model.get_submodule(unit).modules() if has_statistics(norm)]
        if unit in seen and norms:
            reason = f"two stages call {unit}, whose batch norm has one set of running statistics"
            fix = "split=points with both calls in one stage, or a module for each"
            return [Problem("split", config.split.name, reason, fix)]
        seen.add(unit)
    return []


def sharding_problems(config: Config, order: Order) -> list[Problem]:
    """Sharding that gives wrong gradients, or has no effect."""
    if config.fsdp.zero not in (2, 3):
        return []
    if order.splits_backward:
        loses = "FSDP loses gradients when it reduces or reshards between the halves"
        reason = f"schedule={config.schedule.name} splits the backward in two, and {loses}"
        fix = "fsdp.zero=1, or a schedule with whole backwards such as interleaved1f1b"
    elif config.shards == 1:
        reason = f"dp={config.dp} replicate={config.replicate} shards nothing"
        fix = f"fsdp.zero=auto, or dp={2 * config.replicate}"
    else:
        return []
    return [Problem("fsdp.zero", config.fsdp.zero, reason, fix)]


def split_problems(config: Config, model: nn.Module) -> list[Problem]:
    """What is wrong with the split, as far as can be said without a forward."""
    if isinstance(config.split, (AutoSplit, TraceSplit)):
        return []
    try:
        partition(find_units(model), config.split, stage_count(config.schedule, config.pp))
    except SplitError as error:
        return [error.problem]
    except ValueError:
        pass  # the schedule has no number of stages: that is a problem already
    return []


def stage_problems(
    config: Config,
    model_graph: ModelGraph,
    graphs: list[StageGraph],
    evaluated: list[StageGraph],
) -> list[Problem]:
    """What is wrong with stages whose graphs (in training, evaluation) are known."""
    reasons = [text for graph in graphs if (text := message_problem(graph))]
    if not all(map(same_messages, graphs, evaluated)):
        reasons.append("a stage would send other tensors in evaluation than in training")
    if reasons:
        fix = "split=points with points elsewhere"
        return [Problem("split", config.split.name, reasons[0], fix)]
    if config.compile and not any(unit.block for unit in model_graph.units):
        reason = "the model has no blocks, that is no list of layers"
        if config.split.name == "trace":
            reason = "split=trace takes the blocks apart that would be compiled"
        return [Problem("compile", True, reason, "compile=false")]
    units = [graph.units for graph in graphs]
    return shared_norm_problems(config, model_graph.model, units)
