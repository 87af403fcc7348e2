"""What a layout will cost on a device: memory of each rank, time of a step, traffic, and what bounds it.

1. `draft` decides stages, order and sharding, as for a run: nothing is allocated.
2. `layout_times`: each stage's times and traffic; `simulate`: the step of every pipeline rank.
3. `RankMemory.memory_timeline`: what is in memory when, by what it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.hardware import Hardware, MeasuredHardware, RunHardware
from titanlike.config.schema import Config
from titanlike.costs import links
from titanlike.costs.auto_split import seconds_of_run
from titanlike.costs.known_hardware import likely_hardware
from titanlike.costs.rank_memory import MemoryParts, MemorySample
from titanlike.costs.simulate import Simulation, simulate
from titanlike.costs.stage_times import LayoutTimes, Traffic, layout_times
from titanlike.costs.unit_costs import CostError
from titanlike.distributed.transform import Transform
from titanlike.pipeline.order import Order
from titanlike.training.draft import Draft, draft

# With which rounds all ranks agree on the loss and the norm of the gradients, and read them
_AGREEMENTS = 2


@dataclass(frozen=True)
class Estimate:
    """Of one command line."""

    config: Config
    hardware: Hardware
    draft: Draft
    times: LayoutTimes
    simulation: Simulation
    # bytes of pipeline ranks whose memory was counted in a step (`exact_memory.py`)
    counted: Mapping[int, int] = field(default_factory=dict)
    not_counted: str = ""  # why it was tried in vain

    @property
    def order(self) -> Order:
        return self.draft.order

    @property
    def step_seconds(self) -> float:
        return self.simulation.step

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.config.batch_size * self.config.seq_len

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.step_seconds / self.config.world_size

    @property
    def mfu(self) -> float | None:
        """Of the dense bf16 peak, by the model's FLOPs a token as metrics.jsonl has it."""
        if self.draft.flops_per_token is None:
            return None
        flops = self.tokens_per_second_per_gpu * self.draft.flops_per_token
        return flops / self.hardware.bf16_flops

    @cached_property
    def memory_timeline(self) -> list[list[MemorySample]]:
        """Of each pipeline rank, by its actions."""
        memory, blocks = self.draft.memory(), self.draft.recomputed.blocks
        return [memory.memory_timeline(rank, blocks) for rank in range(self.config.pp)]

    @cached_property
    def memory(self) -> list[MemoryParts]:
        """Of each pipeline rank at its fullest."""
        return [
            max((m.most for m in found), key=lambda p: p.total) for found in self.memory_timeline
        ]

    @cached_property
    def memory_bytes(self) -> list[int]:
        """What each pipeline rank takes at the most: counted, or else estimated."""
        estimated = self.draft.memory().of_ranks(self.draft.recomputed.blocks)
        return [self.counted.get(rank, nbytes) for rank, nbytes in enumerate(estimated)]

    @property
    def memory_unknown(self) -> str:
        """Why activations are not counted; "" = they are."""
        return self.draft.memory().unknown

    @property
    def fullest(self) -> int:
        """Bytes of the fullest rank."""
        return max(self.memory_bytes)

    @property
    def fits(self) -> bool:
        return self.fullest <= self.hardware.usable

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return self.config.last_step * self.step_seconds

    def traffic(self, rank: int) -> Traffic:
        """Of a pipeline rank: its stages together."""
        total = Traffic()
        for stage in self.order.local(rank):
            for name, nbytes in vars(self.times.traffic[stage]).items():
                setattr(total, name, getattr(total, name) + nbytes)
        return total

    def shares(self, rank: int) -> dict[str, float]:
        """What a rank does in a step, as shares of it."""
        step, m = self.step_seconds, self.draft.microbatches
        seconds: defaultdict[str, float] = defaultdict(float)
        for stage in self.order.local(rank):
            for name, each in self.times.parts[stage].items():
                seconds[name] += m * each
        events = self.simulation.events[rank]
        computes = self.simulation.computes[rank]
        # what units do not account for: the host, and FSDP's messages beside them
        seconds["host and sharding"] = max(0.0, computes - sum(seconds.values()))
        for event in events:
            name = {"gather": "gathers", "reduce": "reductions", "update": "update"}.get(event.kind)
            if name is not None:
                seconds[name] += event.end - event.start
        seconds["waiting"] = step - sum(seconds.values())
        return {name: value / step for name, value in seconds.items() if value > 1e-4 * step}

    @property
    def slowest(self) -> int:
        """The rank that has the most to do."""
        busy = zip(self.simulation.computes, self.simulation.exchanges, strict=True)
        each = [sum(pair) for pair in busy]
        return each.index(max(each))


def make_estimate(
    config: Config,
    hardware: Hardware,
    drafted: Draft | None = None,
    jitter: float = 0.0,
    times: LayoutTimes | None = None,
    checked: Mapping[str, Transform] | None = None,
) -> Estimate:
    """checked: see `draft`. Raises ConfigError where a run of this config would be refused before it
    starts."""
    if drafted is None:
        drafted = draft(config, device_memory=lambda: hardware.usable, checked=checked)
    if times is None:
        seconds = seconds_of_units(config, drafted, drafted.deferred)
        times = layout_times(config, drafted, hardware, seconds)
    simulation = simulate(
        drafted.order,
        times.stages,
        runs_ahead=hardware.runs_ahead,
        agree=agreement(config, hardware),
        jitter=jitter,
        seed=config.seed,
    )
    return Estimate(config, hardware, drafted, times, simulation)


def seconds_of_units(
    config: Config, drafted: Draft, deferred: Collection[int]
) -> Sequence[Sequence[float]] | None:
    """Of each unit, where this machine or a run is the hardware; None = by what they compute.

    deferred: stages whose weight gradients wait.
    """
    if isinstance(config.hardware, RunHardware):
        return _of_run(config.hardware.path, config, drafted)
    if not isinstance(config.hardware, MeasuredHardware) or drafted.memory().unknown:
        return None
    from titanlike.costs.measured import measured_times

    return measured_times(config, drafted, deferred)


def _of_run(run: str, config: Config, drafted: Draft) -> Sequence[Sequence[float]]:
    memory = drafted.memory()
    names = [name for stage in drafted.stages for name in stage]
    try:
        if memory.unit_costs is None:
            raise CostError(memory.unknown)
        return seconds_of_run(
            run, names, memory.unit_costs.flops(), config, drafted.model_graph.microbatch_size
        )
    except CostError as error:
        raise ConfigError([Problem("hardware", run, str(error), "hardware=measure")]) from None


def agreement(config: Config, hardware: Hardware) -> float:
    """Seconds in which all ranks agree on a few numbers."""
    names = links.axes(config)
    return 2 * _AGREEMENTS * sum(links.link(config, name, hardware).latency for name in names)


def estimate(config: Config, drafted: Draft) -> Estimate:
    """Of a draft of this config, on the config's hardware or what is likely here.

    Of 27 layouts (docs/layouts.md) the memory is 0.97 to 1.02 of what a rank's live storages take at
    their peak. A CPU process takes more: libraries and gloo 45 MiB, and where glibc keeps freed blocks
    (no sharding, small microbatches) up to twice as much. A unit whose costs cannot be measured alone
    counts only with its parameters.
    """
    return make_estimate(config, likely_hardware(config), drafted)
