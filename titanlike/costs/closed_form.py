"""Memory and time of a layout by closed forms, of units that were counted once.

`UnitTable` holds what the units of a model take in microbatches of one size on one number of tensor-
parallel ranks. A layout of them takes some 2 ms to judge; what comes of it is drafted and simulated.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from titanlike.config.groups import ActivationCheckpoint, EveryActivationCheckpoint
from titanlike.config.hardware import Hardware
from titanlike.config.schema import Config, EvenSplit, PointSplit, Schedule
from titanlike.costs.plan import agreement
from titanlike.costs.rank_memory import RankMemory
from titanlike.costs.roofline import Roofline
from titanlike.costs.simulate import simulate
from titanlike.costs.stage_times import Layout, LayoutTimes, stage_times
from titanlike.costs.unit_times import UnitTimes, unit_times
from titanlike.distributed.placement import experts_of
from titanlike.distributed.transform import Transform
from titanlike.graph.cut import messages
from titanlike.graph.partition import partition
from titanlike.pipeline.from_config import build_order, defers_weight_gradients, stage_count
from titanlike.pipeline.order import Order
from titanlike.training.draft import Draft, draft

_MOST_TOKENS = 2**15  # of a rank, of several sequences: products are no faster with more
_MOST_SIZES = 6  # of microbatches, on each number of tensor-parallel ranks
_ROUNDS = 2  # microbatches a pipeline rank with which an order is as good as any longer one


class UnitTable:
    """Of a model's units in microbatches of `rows` sequences on `config.tp` ranks."""

    def __init__(
        self,
        config: Config,
        hardware: Hardware,
        rows: int,
        checked: Mapping[str, Transform] | None = None,
    ) -> None:
        """checked: see `draft`. Raises ConfigError and CostError."""
        schedule, fsdp = Schedule("1f1b", 1), replace(config.fsdp, zero=1)
        alone = replace(config, pp=1, dp=config.ep, replicate=1, schedule=schedule)
        alone = replace(alone, batch_size=rows * config.ep)
        alone = replace(alone, fsdp=fsdp, split=EvenSplit())
        alone = replace(alone, activation_checkpoint=ActivationCheckpoint("none"))
        self.draft: Draft = draft(alone, device_memory=lambda: None, checked=checked)
        self.units = self.draft.model_graph.units
        self.blocks = {unit.name for unit in self.units if unit.block}
        self._hardware = hardware
        self.times: dict[str, UnitTimes] = {}
        self._stages: dict[int, list[list[str]]] = {}

    @cached_property
    def message(self) -> int:
        """Bytes between two stages."""
        halves = partition(self.units, EvenSplit(), 2)
        graphs = self.draft.model_graph
        before, graphs.stages = graphs.stages, halves
        try:
            return sum(t.nbytes for t in messages(graphs.graphs(graphs.fields, True)[0])[1])
        finally:
            graphs.stages = before

    @cached_property
    def memory(self) -> RankMemory:
        return self.draft.memory()

    def recomputing(self, config: Config) -> UnitTable:
        """The same, with what `config.activation_checkpoint` keeps and computes again."""
        other = copy.copy(self)
        other.memory = self.draft.memory().recomputing(config)
        other.times = unit_times(config, self.draft, Roofline.of(config, self._hardware))
        return other

    def stages(self, count: int, config: Config) -> list[list[str]]:
        if isinstance(config.split, PointSplit):
            return partition(self.units, config.split, count)
        if count not in self._stages:
            split = config.split if isinstance(config.split, EvenSplit) else EvenSplit()
            self._stages[count] = partition(self.units, split, count)
        return self._stages[count]


class UnitTables:
    """Of units, by tensor-parallel ranks and sequences of a microbatch: each is counted once."""

    def __init__(self, config: Config, hardware: Hardware) -> None:
        self._config, self._hardware = config, hardware
        self._known: dict[object, UnitTable] = {}
        self._plain: dict[object, UnitTable] = {}
        self._checked: dict[int, Mapping[str, Transform]] = {}
        self._sizes: dict[int, set[int]] = {}
        table = self(config, 1)
        self.units = len(table.units)
        modules: list[Any] = [*experts_of(table.draft.model_graph.model).values()]
        self.experts = min((int(one.num_experts) for one in modules), default=0)  # of a layer

    def sensible(self, config: Config, microbatches: int) -> bool:
        """Whether microbatches of this size are tried."""
        rows = rows_of(config, microbatches)
        if rows < 1 or (rows > 1 and rows * config.seq_len // config.cp > _MOST_TOKENS):
            return False
        sizes = self._sizes.setdefault(config.tp, set())
        if rows not in sizes and len(sizes) >= _MOST_SIZES:
            return False
        sizes.add(rows)
        return True

    def __call__(self, config: Config, rows: int) -> UnitTable:
        how = config.activation_checkpoint
        saving = tuple(getattr(how, "save", ()))
        key = config.tp, config.ep, rows, saving
        if key not in self._known:
            at = config.tp, config.ep, rows
            if at not in self._plain:
                wanted = replace(self._config, tp=config.tp, ep=config.ep)
                known = self._checked.get(config.tp)
                self._plain[at] = UnitTable(wanted, self._hardware, rows, known)
                self._checked[config.tp] = self._plain[at].draft.transforms
            self._known[key] = self._plain[at].recomputing(config)
        return self._known[key]


@dataclass(frozen=True)
class Judged:
    """A layout by closed forms."""

    config: Config
    layout: Layout
    times: LayoutTimes
    seconds: float  # of a step
    memory: list[int]  # of each pipeline rank
    order: Order  # of few microbatches
    parts: dict[str, float]  # seconds of a step by what they are, on the rank with the most
    transforms: Mapping[str, Transform]  # of the model on these ranks

    @property
    def most(self) -> int:
        return max(self.memory)


def judge(
    config: Config,
    table: UnitTable,
    hardware: Hardware,
    orders: dict[object, Order],
    microbatches: int,
    zero: int,
) -> Judged:
    """As many blocks are recomputed as must be, or as `activation_checkpoint` says."""
    pp, schedule = config.pp, config.schedule
    order = short_order(config, microbatches, orders)
    names = table.stages(stage_count(schedule, pp, microbatches), config)
    waits = order.splits_backward and defers_weight_gradients(schedule)
    deferred = range(order.stages) if waits else ()
    how = config.activation_checkpoint
    muon = config.optimizer.name == "muon"
    blocks = [[name for name in stage if name in table.blocks] for stage in names]
    memory = table.memory.arranged(config, order, zero, names, deferred, table.message, muon)
    if how.name == "fit":
        recomputed, found = _as_must_be(memory, blocks, order, hardware.usable)
    else:
        recomputed = [[] for _ in names]
        if how.name in ("full", "selective"):
            recomputed = blocks
        elif isinstance(how, EveryActivationCheckpoint):
            every = {name for at, name in enumerate(sum(blocks, [])) if at % how.every == 0}
            recomputed = [[name for name in stage if name in every] for stage in blocks]
        found = memory.of_ranks(recomputed)
    numel = table.memory.unit_parameters()
    count = len(names)
    layout = Layout(
        names,
        [frozenset(own) for own in recomputed],
        deferred,
        order.place,
        zero,
        microbatches,
        [sum(numel[name][0] for name in own) for own in names],
        [0, *([table.message] * (count - 1))],
        [*([table.message] * (count - 1)), 0],
        [sum(numel[name][1] for name in own) for own in names],
    )
    each = stage_times(config, layout, hardware, table.times)
    seconds, parts = step_seconds(order, each, microbatches, config, hardware)
    return Judged(config, layout, each, seconds, found, order, parts, table.draft.transforms)


def _as_must_be(
    memory: RankMemory, blocks: list[list[str]], order: Order, limit: int
) -> tuple[list[list[str]], list[int]]:
    """(blocks of each stage that are recomputed so that a rank takes no more than `limit`, bytes of each
    rank with these)."""
    # the first rank has the most microbatches in flight, the last the loss: what does not fit is
    # most often known by these two
    ranks = range(len(order.ranks))
    edges = [memory.of_rank(rank, blocks) for rank in {0, ranks[-1]}]
    if max(edges) > limit:
        return blocks, edges
    none: list[list[str]] = [[] for _ in blocks]
    kept = memory.of_ranks(none)
    if max(kept) <= limit:
        return none, kept
    least = memory.of_ranks(blocks)
    shares = [
        1.0 if a <= b else min(1.0, max(0.0, (a - limit) / (a - b)))
        for a, b in zip(kept, least, strict=True)
    ]
    recomputed = [
        own[: math.ceil(shares[order.place[stage]] * len(own))] for stage, own in enumerate(blocks)
    ]
    return recomputed, memory.of_ranks(recomputed)


def step_seconds(
    order: Order, times: LayoutTimes, microbatches: int, config: Config, hardware: Hardware
) -> tuple[float, dict[str, float]]:
    """By a closed form: the busiest rank, and what fills and drains the pipeline."""
    ranks, chunks = len(order.ranks), order.stages / len(order.ranks)
    work, once, update = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
    for stage, own in enumerate(times.stages):
        rank = order.place[stage]
        split = order.splits_backward
        back = (
            own.input_gradient.device + own.weight_gradient.device if split else own.backward.device
        )
        work[rank] += max(own.forward.device + back, own.forward.host + own.backward.host)
        once[rank] += own.gather + own.reduce
        update[rank] += own.update
    at = work.index(max(work))
    share = 1 / 3 if order.splits_backward else 1.0
    fill = share * (sum(work) - work[at]) / chunks
    messages = sum(t.sends_forward + t.sends_backward for t in times.stages) / chunks
    seconds = microbatches * work[at] + fill + messages + max(once) + max(update)
    seconds += agreement(config, hardware)
    parts = dict.fromkeys(times.parts[0], 0.0)
    for stage, own in enumerate(times.parts):
        if order.place[stage] == at:
            for name, value in own.items():
                parts[name] += microbatches * value
    parts["sharding and host"] = microbatches * work[at] - sum(parts.values()) + max(once)
    parts["bubble and messages"] = fill + messages
    parts["update"] = max(update)
    return seconds, parts


def short_order(config: Config, microbatches: int, known: dict[object, Order]) -> Order:
    """Of the config's schedule, with as few microbatches as show how it goes on."""
    pp, schedule = config.pp, config.schedule
    few = _ROUNDS * pp
    count = microbatches
    if microbatches > few and schedule.name in _PERIODIC:
        count = few
    key = schedule.name, getattr(schedule, "stages_per_rank", 1), pp, count
    if key not in known:
        known[key] = build_order(schedule, pp, count)
    return known[key]


# schedules that go on as they began: with more microbatches no more are in flight
_PERIODIC = (
    *("1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev"),
    *("zbh1", "zbh2", "vhalf", "vmin"),
)


def simulated_seconds(judged: Judged, hardware: Hardware) -> float:
    """Of a step: that of the short order is simulated, and what it lacks goes on at its pace."""
    order, config = judged.order, judged.config
    simulation = simulate(
        order,
        judged.times.stages,
        runs_ahead=hardware.runs_ahead,
        agree=agreement(config, hardware),
    )
    more = judged.layout.microbatches - order.microbatches
    pace = max(simulation.computes) / order.microbatches
    return simulation.step + more * pace


def rows_of(config: Config, microbatches: int) -> int:
    """Sequences of a microbatch."""
    return config.batch_size // config.dp // microbatches
