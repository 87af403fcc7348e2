"""What a layout will cost on a device: memory of each rank, time of a step, traffic, and what
bounds it.

1. `make_plan` decides stages, order and sharding, as for a run: nothing is allocated.
2. `layout_times`: each stage's times and traffic; `simulate`: the step of every pipeline rank.
3. `RankMemory.memory_timeline`: what is in memory when, by what it is.

Of 27 layouts (docs/layouts.md) the memory is 0.97 to 1.02 of what a rank's live storages take at
their peak. A CPU process takes more: libraries and gloo 45 MiB, and where glibc keeps freed blocks
(no sharding, small microbatches) up to twice as much. A unit whose costs cannot be measured alone
counts only with its parameters.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from titanlike.config import validate
from titanlike.config.errors import ConfigError
from titanlike.config.overrides import with_choices
from titanlike.config.schema import (
    ActivationCheckpoint,
    AutoSplit,
    Config,
    CpuHardware,
    EvenSplit,
    EveryActivationCheckpoint,
    Hardware,
    Schedule,
    TraceSplit,
)
from titanlike.costs.rank_memory import MemoryParts, MemorySample, RankMemory, StageLayout
from titanlike.costs.simulate import Simulation, simulate
from titanlike.data.loader import example_batch
from titanlike.data.sources import Batch
from titanlike.distributed.mesh import lay_mesh
from titanlike.distributed.transform import Transform
from titanlike.graph.cut import messages
from titanlike.graph.partition import partition
from titanlike.pipeline.from_config import declared_microbatches, derive_microbatches
from titanlike.pipeline.order import Order
from titanlike.pipeline.schedules import SCHEDULES
from titanlike.planning.known_hardware import axes, likely_hardware, link_of
from titanlike.planning.stage_times import (
    TRAFFIC,
    LayoutTimes,
    Roofline,
    UnitTimes,
    layout_times,
    unit_times,
)
from titanlike.torch_private.fake_ranks import (
    LiveStorages,
    allocate,
    fake_process_group,
    fake_tensors,
)
from titanlike.training.build import Run, build_planned
from titanlike.training.step import drop_gradients, optimizer_step
from titanlike.training.train_plan import TrainPlan, make_plan

# With which rounds all ranks agree on the loss and the norm of the gradients, and read them
_AGREEMENTS = 2


@dataclass(frozen=True)
class Estimate:
    """What the layout of one command line costs."""

    config: Config
    hardware: Hardware
    plan: TrainPlan
    times: LayoutTimes
    simulation: Simulation
    # bytes of pipeline ranks whose memory was counted in a step (`with_exact_memory`)
    counted: Mapping[int, int] = field(default_factory=dict)
    not_counted: str = ""  # why it was tried in vain

    @property
    def order(self) -> Order:
        return self.plan.order

    @property
    def shared_by(self) -> int:
        """Ranks that share a device, of which each has its part of the memory. The times are those
        of ranks with a device each."""
        on_cpu = isinstance(self.hardware, CpuHardware)
        return 1 if on_cpu else min(self.config.launch.ranks_per_device, self.config.world_size)

    @property
    def step_seconds(self) -> float:
        return self.simulation.step

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.batch_size * self.config.seq_len

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.step_seconds / self.config.world_size

    @property
    def speed(self) -> float:
        """Tokens, or samples of data without, a second and device."""
        each = 1 if self.plan.unit == "tokens" else self.config.seq_len
        return self.tokens_per_second_per_gpu / each

    @property
    def mfu(self) -> float | None:
        """Share of the dense bf16 peak, by the model's FLOPs a token as metrics.jsonl has it."""
        if self.plan.flops_per_token is None:
            return None
        flops = self.tokens_per_second_per_gpu * self.plan.flops_per_token
        return flops / self.hardware.bf16_flops

    @cached_property
    def memory_timeline(self) -> list[list[MemorySample]]:
        """The memory of each pipeline rank, by its actions."""
        memory, blocks = self.plan.memory(), self.plan.recomputed.blocks
        return [memory.memory_timeline(rank, blocks) for rank in range(self.config.pp)]

    @cached_property
    def memory(self) -> list[MemoryParts]:
        """The memory of each pipeline rank at its fullest."""
        timeline = self.memory_timeline
        return [max((s.most for s in samples), key=lambda p: p.total) for samples in timeline]

    @cached_property
    def memory_bytes(self) -> list[int]:
        """What each pipeline rank takes at the most: counted, or else estimated."""
        estimated = self.plan.memory().of_ranks(self.plan.recomputed.blocks)
        return [self.counted.get(rank, nbytes) for rank, nbytes in enumerate(estimated)]

    @property
    def memory_unknown(self) -> str:
        """Why activations are not counted; "" = they are."""
        return self.plan.memory().unknown

    @property
    def fullest(self) -> int:
        """Bytes of the fullest rank."""
        return max(self.memory_bytes)

    @property
    def fits(self) -> bool:
        return self.fullest <= self.hardware.usable

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return self.config.last_step * self.step_seconds

    @cached_property
    def fast(self) -> Estimate | None:
        """The same layout with numerics=fast, where this one's are exact; None where it could not
        be planned."""
        if not self.config.exact:
            return None
        config = replace(self.config, numerics=replace(self.config.numerics, name="fast"))
        with contextlib.suppress(ConfigError):
            return make_estimate(config, self.hardware)
        return None

    def traffic(self, rank: int) -> Counter[str]:
        """What a pipeline rank sends in a step: its stages together."""
        total = Counter(dict.fromkeys(TRAFFIC, 0))
        for stage in self.order.local(rank):
            total.update(self.times.traffic(stage))
        return total

    def shares(self, rank: int) -> dict[str, float]:
        """What a rank does in a step, as shares of it."""
        step = self.step_seconds
        parts = parts_of_step(self.times, self.order, self.simulation, rank, step)
        return {name: value / step for name, value in parts.items() if value > 1e-4 * step}

    @property
    def sent(self) -> int:
        """Bytes that the rank which sends most sends in a step."""
        return max(self.traffic(rank).total() for rank in range(self.config.pp))

    @property
    def slowest(self) -> int:
        """The rank that has the most to do."""
        simulated = self.simulation
        busy = [*map(sum, zip(simulated.computes, simulated.exchanges, strict=True))]
        return busy.index(max(busy))


def parts_of_step(
    times: LayoutTimes, order: Order, simulation: Simulation, rank: int, step: float
) -> dict[str, float]:
    """Seconds of a pipeline rank's step by what they are; order: that is simulated, also of fewer
    microbatches than a step of `step` seconds has."""
    m, seconds = times.layout.microbatches, defaultdict[str, float](float)
    for stage in order.local(rank):
        for name, each in times.parts(stage).items():
            seconds[name] += m * each
    # what units do not account for: the host, and FSDP's messages beside them
    computes = simulation.computes[rank] * (m / order.microbatches)
    seconds["host and sharding"] = max(0.0, computes - sum(seconds.values()))
    for event in simulation.events[rank]:
        name = {"gather": "gathers", "reduce": "reductions", "update": "update"}.get(event.kind)
        if name is not None:
            seconds[name] += event.end - event.start
    seconds["waiting"] = step - sum(seconds.values())
    return seconds


def make_estimate(
    config: Config,
    hardware: Hardware | None = None,
    plan: TrainPlan | None = None,
    times: LayoutTimes | None = None,
    checked: Mapping[str, Transform] | None = None,
) -> Estimate:
    """hardware: None = the config's, or what is likely here; checked: see `make_plan`. Raises
    ConfigError where a run of this config would be refused before it starts."""
    hardware = hardware or likely_hardware(config)
    if plan is None:
        plan = make_plan(config, device_memory=lambda: hardware.usable, checked=checked)
    if times is None:
        times = layout_times(config, plan, hardware)
    simulation = simulate(
        plan.order,
        times.stages,
        runs_ahead=hardware.runs_ahead,
        agree=agreement(config, hardware),
    )
    return Estimate(config, hardware, plan, times, simulation)


def improved(estimate: Estimate, choices: Mapping[str, Any], least: float = 0.0) -> Estimate | None:
    """The estimate with other choices of keys, where it is valid, fits, and its speed is higher by
    more than a share of `least`."""
    config = with_choices(estimate.config, choices)
    if validate.problems(config):
        return None
    try:
        other = make_estimate(config, estimate.hardware, checked=estimate.plan.transforms)
    except (ConfigError, ValueError):
        return None
    faster = estimate.step_seconds / other.step_seconds - 1 > least
    return other if other.fits and faster else None


def agreement(config: Config, hardware: Hardware) -> float:
    """Seconds in which all ranks agree on a few numbers."""
    names = axes(config)
    return 2 * _AGREEMENTS * sum(link_of(config, name, hardware).latency for name in names)


# --- the memory of each pipeline rank, counted in its own step ------------------------------------
#
# `rank_memory.py` adds up what a rank keeps, in milliseconds; here a rank is built and trains a
# step by the code of a run, under tensors without memory (FSDP's buffers, messages and the
# optimizer's state included), in a job whose other ranks are not there, and the storages that live
# are counted. That takes seconds a rank.


def with_exact_memory(estimate: Estimate, ranks: Sequence[int] | None = None) -> Estimate:
    """The plan with what the first rank of each pipeline rank takes: the bytes of its live storages
    at the most over a step.

    Of ranks that share stages the first has the largest shards. Blocks are counted as they are
    without compile; of more microbatches than pass before memory repeats itself, only so many are
    computed. ranks: only these pipeline ranks. The plan says why where the memory is left as it was
    estimated: it depends on values (documents), or is that of two devices (fsdp.cpu_offload).
    """
    config, room = estimate.config, estimate.hardware.usable
    if config.fsdp.cpu_offload:
        return replace(estimate, not_counted="with fsdp.cpu_offload a part of it is on the host")
    if config.ep > 1:
        return replace(
            estimate, not_counted="how many tokens experts receive depends on their values"
        )
    config = replace(_shortened(estimate), device="cpu", compile=False)
    example = example_batch(config)
    every, counted = range(config.pp) if ranks is None else ranks, {}
    for rank in every:
        try:
            first = rank * config.world_size // config.pp
            counted[rank] = _bytes_of_rank(config, room, example, first)
        except Exception as error:  # whatever a model does with a value
            return replace(estimate, not_counted=_reason(error))
    return replace(estimate, counted=counted)


def _shortened(estimate: Estimate) -> Config:
    """The config with fewer microbatches, where the same memory is estimated with them."""
    config, plan, room = estimate.config, estimate.plan, estimate.hardware.usable
    if config.schedule.name not in SCHEDULES or estimate.memory_unknown:
        return config
    expected = plan.memory().of_ranks(plan.recomputed.blocks)
    for count in (2 * plan.order.stages, 4 * plan.order.stages):
        if count >= plan.microbatches:
            break
        schedule: Any = config.schedule
        schedule = replace(schedule, microbatches=count)
        rows = config.batch_size // plan.microbatches * count
        shorter = replace(config, batch_size=rows, schedule=schedule)
        try:
            other = make_plan(shorter, device_memory=lambda: room)
        except ConfigError:  # a number that the schedule does not take
            continue
        if other.memory().of_ranks(other.recomputed.blocks) == expected:
            return shorter
    return config


def _reason(error: BaseException) -> str:
    """In a line; the runtime wraps what a stage raises."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {next(filter(None, str(error).splitlines()), '')}"


def _bytes_of_rank(config: Config, room: int, example: Batch, rank: int) -> int:
    live, fake = LiveStorages(), fake_tensors()
    with fake_process_group(rank, config.world_size):
        run = assemble_fake(config, room, fake, live)
        with fake, live:
            # an optimizer's state is there from the second step on
            for parameter in run.parameters:
                parameter.grad = torch.zeros_like(parameter)
            for state in run.stage_states:
                for optimizer in state.optimizers:
                    optimizer.step()
            drop_gradients(run)
            run.pipeline.train(zeros(config, example))
            optimizer_step(run, config, 1, torch.ones(()))
    return live.peak


def assemble_fake(
    config: Config, room: int, fake: AbstractContextManager[Any], live: LiveStorages
) -> Run:
    """The run of a rank of a fake process group; room: bytes that training may take."""
    mesh = lay_mesh(config, torch.device("cpu"), "fake", "planned")

    def fill(stage: nn.Module, _: object, device: torch.device, *__: object, **___: object) -> None:
        with fake, live:
            allocate(stage, device)

    plan = make_plan(config, None, None, lambda: room, mesh)
    return build_planned(config, mesh, plan, init_weights=fill)


def zeros(config: Config, example: Batch) -> Batch:
    """A batch of a rank."""
    rows = config.batch_size // config.dp
    return {n: torch.zeros((rows, *v.shape[1:]), dtype=v.dtype) for n, v in example.items()}


# --- what the units of a model cost, in any layout of them ----------------------------------------


class CostTable:
    """Costs of a model's units in microbatches of `rows` sequences on `config.tp` ranks: each is
    counted once, for any layout of them."""

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
            numerics=replace(config.numerics, grain=rows),  # if it is exact
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
        """Bytes between two stages."""
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
        """With what `config.activation_checkpoint` keeps and computes again. Raises CostError."""
        save = tuple(config.activation_checkpoint.saved)
        if save not in self._times:
            roofline = Roofline.of(config, self._hardware)
            self._times[save] = unit_times(config, self.plan, roofline)
        return self._times[save]

    def recomputed(self, config: Config) -> frozenset[str]:
        """Names of the blocks that are recomputed; none of `fit`, which depends on the layout."""
        how, blocks = config.activation_checkpoint, [u.name for u in self.units if u.block]
        if isinstance(how, EveryActivationCheckpoint):
            return frozenset(blocks[:: how.every])
        return frozenset(blocks if how.name in ("full", "selective") else ())

    def layout(
        self,
        stages: Sequence[Sequence[str]],
        recomputed: Collection[str],
        deferred: Collection[int],
        place: Sequence[int],
        zero: int,
        microbatches: int,
    ) -> StageLayout:
        """The layout with stages of these units, and messages of one size; recomputed: names of
        units."""
        units = self.memory.units()
        sizes = ([units[name][:2] for name in names] for names in stages)
        totals = [(sum(n for n, _ in stage), sum(e for _, e in stage)) for stage in sizes]
        messages = [self.message] * (len(stages) - 1)
        whole = self.memory.layout  # of one stage: each parameter counts as the mean does
        sums = whole.moments[0][0], whole.touched[0], whole.gathered_matrices[0]
        moments, touched, matrices = (n / whole.numel[0] for n in sums)
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
            if isinstance(split, (AutoSplit, TraceSplit)):  # whose stages are found by a plan
                split = EvenSplit()
            self._stages[count] = partition(self.units, split, count)
        return self._stages[count]


def microbatches_of(config: Config) -> int:
    """Those of a config, or what a run of it derives. Raises Refused and NoDivision."""
    schedule, rows = config.schedule, config.batch_size // config.dp
    return declared_microbatches(schedule) or derive_microbatches(schedule, config.pp, rows)[0]


def rows_of(config: Config, microbatches: int) -> int:
    """Sequences of a microbatch."""
    return config.batch_size // config.dp // microbatches
