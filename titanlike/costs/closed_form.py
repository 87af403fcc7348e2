"""Memory and time of a layout by closed forms, of units that were counted once.

`CostTable` holds what the units of a model take in microbatches of one size on one number of tensor-
parallel ranks. A layout of them takes some 2 ms to judge; what comes of it is drafted and simulated.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from titanlike.config.groups import ActivationCheckpoint, EveryActivationCheckpoint
from titanlike.config.hardware import Hardware
from titanlike.config.schema import Config, EvenSplit, PointSplit, Schedule
from titanlike.costs.estimate import agreement
from titanlike.costs.rank_memory import RankMemory
from titanlike.costs.simulate import simulate
from titanlike.costs.stage_times import LayoutTimes, StageLayout, stage_times
from titanlike.costs.unit_times import Roofline, UnitTimes, unit_times
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


class CostTable:
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

    def with_recompute(self, config: Config) -> CostTable:
        """The same, with what `config.activation_checkpoint` keeps and computes again."""
        other = copy.copy(self)
        other.memory = self.draft.memory().with_recompute(config)
        other.times = unit_times(config, self.draft, Roofline.of(config, self._hardware))
        return other

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
        """Of stages of these units; recomputed: names of units."""
        parameters = self.memory.unit_parameters()
        messages = [self.message] * (len(stages) - 1)
        return StageLayout(
            stages=stages,
            recomputed=[frozenset(recomputed).intersection(names) for names in stages],
            deferred=deferred,
            place=place,
            zero=zero,
            microbatches=microbatches,
            numel=[sum(parameters[name][0] for name in names) for names in stages],
            received=[0, *messages],
            sent=[*messages, 0],
            experts=[sum(parameters[name][1] for name in names) for names in stages],
        )

    def stages(self, count: int, config: Config) -> list[list[str]]:
        if isinstance(config.split, PointSplit):
            return partition(self.units, config.split, count)
        if count not in self._stages:
            split = config.split if isinstance(config.split, EvenSplit) else EvenSplit()
            self._stages[count] = partition(self.units, split, count)
        return self._stages[count]


class CostCache:
    """Of units, by tensor-parallel ranks and sequences of a microbatch: each is counted once."""

    def __init__(self, config: Config, hardware: Hardware) -> None:
        self._config, self._hardware = config, hardware
        self._known: dict[object, CostTable] = {}
        self._plain: dict[object, CostTable] = {}
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

    def __call__(self, config: Config, rows: int) -> CostTable:
        how = config.activation_checkpoint
        saving = tuple(getattr(how, "save", ()))
        key = config.tp, config.ep, rows, saving
        if key not in self._known:
            at = config.tp, config.ep, rows
            if at not in self._plain:
                wanted = replace(self._config, tp=config.tp, ep=config.ep)
                known = self._checked.get(config.tp)
                self._plain[at] = CostTable(wanted, self._hardware, rows, known)
                self._checked[config.tp] = self._plain[at].draft.transforms
            self._known[key] = self._plain[at].with_recompute(config)
        return self._known[key]


@dataclass(frozen=True)
class ScoredLayout:
    """A layout by closed forms."""

    config: Config
    layout: StageLayout
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
    table: CostTable,
    hardware: Hardware,
    orders: dict[object, Order],
    microbatches: int,
    zero: int,
) -> ScoredLayout:
    """As many blocks are recomputed as must be, or as `activation_checkpoint` says."""
    pp, schedule = config.pp, config.schedule
    order = short_order(config, microbatches, orders)
    names = table.stages(stage_count(schedule, pp, microbatches), config)
    waits = order.splits_backward and defers_weight_gradients(schedule)
    deferred = range(order.stages) if waits else ()
    muon = config.optimizer.name == "muon"
    blocks = [[name for name in stage if name in table.blocks] for stage in names]
    memory = table.memory.with_layout(config, order, zero, names, deferred, table.message, muon)
    if config.activation_checkpoint.name == "fit":
        recomputed, found = _as_must_be(memory, blocks, order, hardware.usable)
    else:
        chosen = table.recomputed(config)
        recomputed = [[name for name in stage if name in chosen] for stage in blocks]
        found = memory.of_ranks(recomputed)
    layout = table.layout(names, sum(recomputed, []), deferred, order.place, zero, microbatches)
    each = stage_times(config, layout, hardware, table.times)
    seconds, parts = step_seconds(order, each, microbatches, config, hardware)
    return ScoredLayout(config, layout, each, seconds, found, order, parts, table.draft.transforms)


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


def simulated_seconds(judged: ScoredLayout, hardware: Hardware) -> float:
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
