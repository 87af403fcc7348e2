"""Choices that follow from a device's memory: `fsdp.zero=auto`, the blocks that `fit` recomputes,
and the stages with deferred weight gradients in a schedule that splits the backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import Tensor

from titanlike.core.config.errors import ConfigError, Problem, nearest
from titanlike.core.config.groups.computation import (
    EveryActivationCheckpoint,
    FitActivationCheckpoint,
    SelectiveActivationCheckpoint,
)
from titanlike.core.config.groups.pipeline import TraceSplit
from titanlike.core.config.schema import Config
from titanlike.core.distributed.transform import Recomputed
from titanlike.core.graph.cut import StageGraph
from titanlike.core.graph.model_graph import ModelGraph
from titanlike.core.graph.recording import Node
from titanlike.core.metrics import units
from titanlike.core.pipeline.order import Order
from titanlike.core.torch_private.operators import operator_names

if TYPE_CHECKING:  # imported where memory is estimated
    from titanlike.planning.costs.rank_memory import RankMemory
    from titanlike.planning.costs.unit_costs import UnitCosts


@dataclass(frozen=True, kw_only=True)
class MemoryChoices:
    zero: int
    why_zero: str
    recomputed: Recomputed
    deferred: frozenset[int]  # stages whose weight gradients are computed in W, not in I
    why_together: str  # why other stages do not defer theirs; "" if the config says so
    # by pipeline rank, for any choice of recomputed blocks; computed at its first use
    memory: Callable[[], RankMemory]


def choose_by_memory(
    config: Config,
    model_graph: ModelGraph,
    targets: Tensor,
    unit_costs: Callable[[], UnitCosts],
    graphs: Sequence[StageGraph],
    order: Order,
    parameters: Sequence[Mapping[str, int]],
    zero: tuple[int, str],
    device_memory: Callable[[], int | None],
) -> MemoryChoices:
    """Choose ZeRO level, recomputed blocks and deferred stages. targets: a microbatch's, on meta;
    graphs, parameters (name -> elements): by stage; zero: (level, why) of `auto` if no memory is
    known; device_memory: bytes for training. Raises ConfigError as `choose_recomputed`."""
    how = config.activation_checkpoint
    fit_memory = how.memory if isinstance(how, FitActivationCheckpoint) else None
    limit = functools.cache(lambda: device_memory() if fit_memory is None else fit_memory)
    deferred: frozenset[int] = frozenset()
    if order.splits_backward:
        from titanlike.core.pipeline.from_config import defers_weight_gradients

        if defers_weight_gradients(config.schedule):
            deferred = frozenset(range(order.stages))

    @functools.cache
    def memory_at(level: int) -> RankMemory:
        if level != zero[0]:
            return memory_at(zero[0]).changed(zero=level)
        from titanlike.planning.costs.rank_memory import planned_memory

        costs = None if isinstance(config.split, TraceSplit) else unit_costs()
        return planned_memory(
            config, model_graph, targets, costs, order, level, parameters, deferred
        )

    def recomputed_with(memory: Callable[[], RankMemory]) -> Recomputed:
        if how.name == "none":
            return Recomputed([[] for _ in graphs])
        return choose_recomputed(config, model_graph, graphs, memory, limit)

    level, why = zero
    recomputed = recomputed_with(lambda: memory_at(level))
    # with one microbatch ZeRO 3 communicates hardly more often, and overlaps it with compute
    often = order.microbatches > 1 and level > 1
    if config.fsdp.zero == "auto" and often and (room := limit()) is not None:
        memory = memory_at(1)
        if not memory.unknown:
            zero1_recomputed = recomputed_with(lambda: memory)
            peak = max(memory.of_ranks(zero1_recomputed.blocks))
            what = "a pipeline" if config.pp > 1 else f"{order.microbatches} microbatches"
            sizes = f"{units.size(peak)} of {units.size(room)}"
            if peak <= room and zero1_recomputed.count <= recomputed.count:
                level, recomputed = 1, zero1_recomputed
                why = f"{what}, and about {sizes} are taken with the least traffic"
            else:
                why = f"{what}, and ZeRO 1, with less traffic, would take about {sizes}"
    changed = ""
    if deferred and (room := limit()) is not None and not memory_at(level).unknown:
        memory = memory_at(level)
        fitting = _that_fit(memory, order, deferred, recomputed, room)
        if fitting != deferred:
            recomputed = recomputed_with(lambda: memory.changed(deferred=fitting))
            shown = ", ".join(map(str, sorted(deferred - fitting)))
            changed = (
                f"together with those of activations on stages {shown}: deferred, they would not "
                f"fit into {units.size(room)}"
            )
            deferred = fitting

    chosen = functools.cache(lambda: memory_at(level).changed(deferred=deferred))
    return MemoryChoices(
        zero=level,
        why_zero=why,
        recomputed=recomputed,
        deferred=deferred,
        why_together=changed,
        memory=chosen,
    )


def _that_fit(
    memory: RankMemory, order: Order, stages: frozenset[int], recomputed: Recomputed, limit: int
) -> frozenset[int]:
    """The stages whose weight gradients can be deferred: on each rank as many as fit.

    Stages that free the most memory are dropped first. Recomputing a few more blocks costs less
    than a longer bubble, so with `fit` these are the stages that fit with all blocks recomputed.
    """
    for rank in range(len(order.ranks)):
        while (now := memory.changed(deferred=stages).of_rank(rank, recomputed.blocks)) > limit:
            without = [stages - {stage} for stage in order.local(rank) if stage in stages]
            sizes = [memory.changed(deferred=s).of_rank(rank, recomputed.blocks) for s in without]
            if not sizes or min(sizes) >= now:
                break
            stages = without[sizes.index(min(sizes))]
    return stages


# --- recomputed blocks ----------------------------------------------------------------------------

_FIX = "activation_checkpoint=none"
_ALL = "activation_checkpoint=full"
_MEMORY = "activation_checkpoint.memory=80GiB"


def choose_recomputed(
    config: Config,
    model_graph: ModelGraph,
    graphs: Sequence[StageGraph],
    rank_memory: Callable[[], RankMemory],
    limit: Callable[[], int | None],
) -> Recomputed:
    """Choose the blocks to recompute, except those that checkpoint themselves or take gradients.

    graphs: each stage's in training; rank_memory, limit: for `fit`, the estimate and the bytes of a
    device. Raises ConfigError for blocks that would not repeat their results, a model without
    blocks, names in `save` that match no operator, and `fit` without a memory estimate.
    """
    how = config.activation_checkpoint
    every = how.every if isinstance(how, EveryActivationCheckpoint) else 1
    calls = [node for graph in graphs for node in graph.nodes if node.kind == "unit"]
    excluded = {node.target for node in calls if node.checkpointed or node.checkpoints_inside}
    excluded |= model_graph.taking_gradients
    blocks = [unit.name for unit in model_graph.units if unit.block]
    chosen = {*blocks[::every]} - excluded
    problems = [*_problems(how.name, (node for node in calls if node.target in chosen))]
    if isinstance(config.split, TraceSplit):
        reason = "split=trace takes the blocks apart that would be recomputed"
        problems.append(Problem("activation_checkpoint", how.name, reason, "split=points"))
    elif not blocks:
        reason = "the model has no blocks, that is no list of layers"
        problems.append(Problem("activation_checkpoint", how.name, reason, _FIX))
    if isinstance(how, SelectiveActivationCheckpoint):
        problems += _name_problems(how.save)
    if problems:
        raise ConfigError(problems)
    candidates = [[name for name in graph.units if name in chosen] for graph in graphs]
    if not isinstance(how, FitActivationCheckpoint):
        return Recomputed(candidates)
    budget = how.memory if how.memory is not None else limit()
    if budget is None:
        reason = "it is not known how much memory this machine has"
        raise ConfigError([Problem("activation_checkpoint.memory", None, reason, _MEMORY)])
    memory = rank_memory()
    if memory.unknown:
        reason = f"the memory of its activations cannot be estimated: {memory.unknown}"
        raise ConfigError([Problem("activation_checkpoint", "fit", reason, _ALL)])
    fewest, sizes = memory.fit(candidates, budget)
    return Recomputed(fewest, budget, sizes)


def _name_problems(save: Sequence[str]) -> Iterator[Problem]:
    known = operator_names()
    shipped = SelectiveActivationCheckpoint().save  # also of techniques that are not imported
    for pattern in save:
        if pattern not in shipped and not any(fnmatchcase(name, pattern) for name in known):
            base = pattern.rpartition(".")[0]  # "aten.mm.default" is an overload of "aten.mm"
            near = base if base in known else nearest(pattern, known)
            others = [name for name in save if name != pattern]
            fixed = ",".join([*others, *([near] if near and near not in others else [])])
            fix = f"activation_checkpoint.save=[{fixed}]"
            yield Problem("activation_checkpoint.save", pattern, "no operator has this name", fix)


def _problems(choice: str, calls: Iterable[Node]) -> Iterator[Problem]:
    for name, once in dict.fromkeys((node.target, node.once) for node in calls if node.once):
        reason = f"its {name} {once}: the backward would compute it again with another result"
        yield Problem("activation_checkpoint", choice, reason, _FIX)
