"""Choices that follow from a device's memory: `fsdp.zero=auto`, the blocks that `fit` recomputes,
and the stages with deferred weight gradients in a schedule that splits the backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from titanlike.core.config.groups.computation import FitActivationCheckpoint
from titanlike.core.config.groups.pipeline import TraceSplit
from titanlike.core.config.schema import Config
from titanlike.core.distributed.transform import Recomputed
from titanlike.core.graph.cut import StageGraph
from titanlike.core.graph.model_graph import ModelGraph
from titanlike.core.metrics import units
from titanlike.core.pipeline.order import Order

if TYPE_CHECKING:  # imported where memory is estimated
    from titanlike.planning.costs.rank_memory import RankMemory
    from titanlike.planning.costs.unit_costs import UnitCosts


@dataclass(frozen=True)
class MemoryChoices:
    zero: int
    why_zero: str
    recomputed: Recomputed
    deferred: frozenset[int]  # stages whose weight gradients wait for W
    why_together: str  # why other stages do not defer theirs; "" = none was changed
    memory: Callable[[], RankMemory]  # with these choices, estimated on first use


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
        from titanlike.core.training.recomputed_blocks import choose_recomputed

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
    return MemoryChoices(level, why, recomputed, deferred, changed, chosen)


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
