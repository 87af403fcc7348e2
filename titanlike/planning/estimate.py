"""Estimate the cost of a layout on a device: memory of each rank, step time, traffic, bottlenecks.

1. `make_plan` decides stages, order and sharding, as for a run: nothing is allocated.
2. `layout_times` computes each stage's times and traffic; `simulate` the step of every pipeline
   rank.
3. `RankMemory.memory_timeline` tells what is in memory when.

For 27 layouts (docs/layouts.md) the estimated memory is 0.97 to 1.02 of the peak of a rank's live
storages. A CPU process takes more: libraries and gloo 45 MiB, and if glibc keeps freed blocks (no
sharding, small microbatches) up to twice as much. Units that cannot be run alone count only with
their parameters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from titanlike.core.config.groups.computation import ActivationCheckpoint, EveryActivationCheckpoint
from titanlike.core.config.groups.hardware import CpuHardware, Hardware
from titanlike.core.config.groups.pipeline import AutoSplit, EvenSplit, Schedule, TraceSplit
from titanlike.core.config.schema import Config
from titanlike.core.distributed.placement import experts_of
from titanlike.core.distributed.transform import Transform
from titanlike.core.graph.cut import messages
from titanlike.core.graph.partition import partition
from titanlike.core.pipeline.from_config import declared_microbatches, derive_microbatches
from titanlike.core.pipeline.order import Order
from titanlike.core.training.train_plan import TrainPlan, make_plan
from titanlike.planning.costs.rank_memory import MemoryParts, MemorySample, RankMemory, StageLayout
from titanlike.planning.costs.simulate import Simulation
from titanlike.planning.known_hardware import likely_hardware
from titanlike.planning.stage_times import (
    TRAFFIC,
    LayoutTimes,
    Roofline,
    UnitTimes,
    layout_times,
    unit_times,
)
from titanlike.planning.uncertainty import SPREADS, Spread, kind_of


@dataclass(frozen=True)
class Estimate:
    """The cost of one config's layout."""

    config: Config
    hardware: Hardware
    plan: TrainPlan
    times: LayoutTimes
    simulation: Simulation

    @property
    def order(self) -> Order:
        return self.plan.order

    @property
    def shared_by(self) -> int:
        """Number of ranks that share a device and its memory. Times assume one device per rank."""
        on_cpu = isinstance(self.hardware, CpuHardware)
        return 1 if on_cpu else min(self.config.launch.ranks_per_device, self.config.world_size)

    @property
    def step_seconds(self) -> float:
        return self.simulation.step

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.config.batch_size * self.config.seq_len

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.step_seconds / self.config.world_size

    @property
    def speed(self) -> float:
        """Tokens per second and device; samples for data without tokens."""
        each = 1 if self.plan.unit == "tokens" else self.config.seq_len
        return self.tokens_per_second_per_gpu / each

    @cached_property
    def kind(self) -> str:
        """The kind of run whose published examples bound the error of `speed`, see `spread`."""
        experts = bool(experts_of(self.plan.model_graph.model))
        return kind_of(self.config, self.hardware, experts)

    @property
    def spread(self) -> Spread | None:
        """Measured speeds of runs of this kind relative to their plans; None if none is known."""
        return SPREADS.get(self.kind)

    @property
    def mfu(self) -> float | None:
        """Share of the dense bf16 peak, by the model's FLOPs per token as in metrics.jsonl."""
        if self.plan.flops_per_token is None:
            return None
        flops = self.tokens_per_second_per_gpu * self.plan.flops_per_token
        return flops / self.hardware.bf16_flops

    @cached_property
    def memory_timeline(self) -> list[list[MemorySample]]:
        """The memory of each pipeline rank during each of its actions."""
        memory, blocks = self.plan.memory(), self.plan.recomputed.blocks
        return [memory.memory_timeline(rank, blocks) for rank in range(self.config.pp)]

    @cached_property
    def memory(self) -> list[MemoryParts]:
        """The memory of each pipeline rank at its peak."""
        timeline = self.memory_timeline
        return [max((s.most for s in samples), key=lambda p: p.total) for samples in timeline]

    @cached_property
    def memory_bytes(self) -> list[int]:
        """Peak bytes of each pipeline rank."""
        return self.plan.memory().of_ranks(self.plan.recomputed.blocks)

    @property
    def memory_unknown(self) -> str:
        """Why activations are not counted; "" = they are."""
        return self.plan.memory().unknown

    @property
    def fullest(self) -> int:
        """Peak bytes of the fullest rank."""
        return max(self.memory_bytes)

    @property
    def fits(self) -> bool:
        return self.fullest <= self.hardware.usable

    @property
    def seconds(self) -> float:
        """Seconds of all steps of the run."""
        return self.config.last_step * self.step_seconds

    def traffic(self, rank: int) -> Counter[str]:
        """Bytes that a pipeline rank sends per step by kind, summed over its stages."""
        total = Counter(dict.fromkeys(TRAFFIC, 0))
        for stage in self.order.local(rank):
            total.update(self.times.traffic(stage))
        return total

    def shares(self, rank: int) -> dict[str, float]:
        """Parts of a pipeline rank's step by what they are spent on, as fractions of it."""
        step, seconds = self.step_seconds, defaultdict[str, float](float)
        for stage in self.order.local(rank):
            for name, each in self.times.parts(stage).items():
                seconds[name] += self.plan.microbatches * each
        # not in the units' times: the host, and exposed communication of FSDP
        computes = self.simulation.computes[rank]
        seconds["host and sharding"] = max(0.0, computes - sum(seconds.values()))
        for event in self.simulation.events[rank]:
            name = {"gather": "gathers", "reduce": "reductions", "update": "update"}.get(event.kind)
            if name is not None:
                seconds[name] += event.end - event.start
        seconds["waiting"] = step - sum(seconds.values())
        return {name: value / step for name, value in seconds.items() if value > 1e-4 * step}

    @property
    def slowest(self) -> int:
        """The rank with the most computation and communication."""
        simulated = self.simulation
        busy = [*map(sum, zip(simulated.computes, simulated.exchanges, strict=True))]
        return busy.index(max(busy))


def make_estimate(
    config: Config,
    hardware: Hardware | None = None,
    plan: TrainPlan | None = None,
    times: LayoutTimes | None = None,
    checked: Mapping[str, Transform] | None = None,
) -> Estimate:
    """Estimate a config's cost. Raises ConfigError if a run of it would be rejected before it
    starts.

    hardware: None = the config's, or the most similar to this machine; checked: see `make_plan`.
    """
    hardware = hardware or likely_hardware(config)
    if plan is None:
        plan = make_plan(config, device_memory=lambda: hardware.usable, checked=checked)
    if times is None:
        times = layout_times(config, plan, hardware)
    return Estimate(config, hardware, plan, times, times.simulate(plan.order))


# --- costs of a model's units in any layout --------------------------------------------------------


class CostTable:
    """Costs of a model's units in microbatches of `rows` sequences on `config.tp` ranks, counted
    once for all layouts."""

    def __init__(
        self,
        config: Config,
        hardware: Hardware,
        rows: int,
        checked: Mapping[str, Transform] | None = None,
    ) -> None:
        """checked: see `make_plan`. Raises ConfigError and CostError."""
        alone = replace(
            config,
            pp=1,
            dp=config.ep,
            replicate=1,
            schedule=Schedule("1f1b", 1),
            batch_size=rows * config.ep,
            numerics=replace(config.numerics, grain=rows),  # for numerics=exact
            fsdp=replace(config.fsdp, zero=1),
            split=EvenSplit(),
            activation_checkpoint=ActivationCheckpoint("none"),
        )
        self.plan: TrainPlan = make_plan(alone, device_memory=lambda: None, checked=checked)
        self.units = self.plan.model_graph.units
        self.blocks = {unit.name for unit in self.units if unit.block}
        self._hardware = hardware
        self._times: dict[tuple[str, ...], dict[str, UnitTimes]] = {}
        self._stages: dict[int, list[list[str]]] = {}

    @cached_property
    def message(self) -> int:
        """Bytes sent between two stages."""
        halves, graphs = partition(self.units, EvenSplit(), 2), self.plan.model_graph
        before, graphs.stages = (graphs.stages, graphs.place), halves
        graphs.place = None
        try:
            return sum(t.nbytes for t in messages(graphs.graphs(graphs.fields, True)[0])[1])
        finally:
            graphs.stages, graphs.place = before

    @cached_property
    def memory(self) -> RankMemory:
        return self.plan.memory()

    def times(self, config: Config) -> dict[str, UnitTimes]:
        """Times of units, with recomputation as `config.activation_checkpoint` says. Raises
        CostError."""
        save = tuple(config.activation_checkpoint.saved)
        if save not in self._times:
            roofline = Roofline.of(config, self._hardware)
            self._times[save] = unit_times(config, self.plan, roofline)
        return self._times[save]

    def recomputed(self, config: Config) -> frozenset[str]:
        """Names of the recomputed blocks; empty for `fit`, which depends on the layout."""
        checkpointing, blocks = (
            config.activation_checkpoint,
            [u.name for u in self.units if u.block],
        )
        if isinstance(checkpointing, EveryActivationCheckpoint):
            return frozenset(blocks[:: checkpointing.every])
        return frozenset(blocks if checkpointing.name in ("full", "selective") else ())

    def layout(
        self,
        stages: Sequence[Sequence[str]],
        recomputed: Collection[str],
        deferred: Collection[int],
        place: Sequence[int],
        zero: int,
        microbatches: int,
    ) -> StageLayout:
        """The layout with these stages, all sending equal sizes; recomputed: names of units."""
        units = self.memory.units()
        sizes = ([units[name][:2] for name in names] for names in stages)
        totals = [(sum(n for n, _ in stage), sum(e for _, e in stage)) for stage in sizes]
        messages = [self.message] * (len(stages) - 1)
        one_stage = self.memory.layout  # with one stage; sizes per parameter are averages
        sums = one_stage.moments[0][0], one_stage.touched[0], one_stage.gathered_matrices[0]
        moments, touched, matrices = (n / one_stage.numel[0] for n in sums)
        return StageLayout(
            stages=stages,
            recomputed=[frozenset(recomputed).intersection(names) for names in stages],
            deferred=frozenset(deferred),
            place=place,
            zero=zero,
            microbatches=microbatches,
            numel=[numel for numel, _ in totals],
            received=[0, *messages],
            sent=[*messages, 0],
            experts=[experts for _, experts in totals],
            gathered_matrices=[round(matrices * numel) for numel, _ in totals],
            touched=[round(touched * numel) for numel, _ in totals],
            moments=[(round(moments * numel), round(moments * n)) for numel, n in totals],
        )

    def stages(self, count: int, config: Config) -> list[list[str]]:
        if count not in self._stages:
            split = config.split
            if isinstance(split, (AutoSplit, TraceSplit)):  # their stages need a plan
                split = EvenSplit()
            self._stages[count] = partition(self.units, split, count)
        return self._stages[count]


def microbatches_of(config: Config) -> int:
    """The number of microbatches of a config, given or derived. Raises Refused and NoDivision."""
    schedule, rows = config.schedule, config.batch_size // config.dp
    return declared_microbatches(schedule) or derive_microbatches(schedule, config.pp, rows)[0]


def rows_of(config: Config, microbatches: int) -> int:
    """Sequences per microbatch."""
    return config.batch_size // config.dp // microbatches
