"""`plan search`: enumerate the layouts of a number of devices for a global batch, and rank those
that fit.

1. `layouts.candidates` lists meshes, schedules, stages and microbatches; here each is combined with
   every ZeRO level, and with blocks recomputed selectively or as few as fit (`fit`).
2. All are scored (`score`) with costs of units that are counted once (`CostTable`): layouts that do
   not fit are dropped; for the rest an order of few microbatches is simulated.
3. The best are planned and estimated as by `plan`.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import gcd
from typing import Any

from titanlike.core.config import validate
from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.groups.hardware import Hardware
from titanlike.core.config.overrides import key_of, with_choices
from titanlike.core.config.program import train_program
from titanlike.core.config.schema import Config
from titanlike.core.distributed.placement import experts_of
from titanlike.core.distributed.transform import Transform
from titanlike.core.metrics import units
from titanlike.core.pipeline.from_config import build_order, defers_weight_gradients, stage_count
from titanlike.core.pipeline.order import Order
from titanlike.planning.costs.rank_memory import StageLayout
from titanlike.planning.costs.unit_costs import CostError
from titanlike.planning.estimate import CostTable, Estimate, make_estimate, microbatches_of, rows_of
from titanlike.planning.estimate_text import as_data, mesh_text, table
from titanlike.planning.known_hardware import planned_hardware
from titanlike.planning.layouts import SCHEDULES, candidates
from titanlike.planning.stage_times import LayoutTimes

_LEAST_TOKENS = 2**13  # tokens of a sequence per context-parallel rank
_MOST_TOKENS = 2**15  # tokens per microbatch of several sequences: matmuls get no faster with more
_MOST_SIZES = 6  # microbatch sizes to try per tp
_ROUNDS = 2  # microbatches per pipeline rank in a simulated order
# periodic schedules: with more microbatches no more are in flight
_PERIODIC = (*SCHEDULES, "zbh1", "zbh2")
_AUTO = 3  # number of the fastest layouts that are also planned with split=auto
_PROGRESS = 3.0  # seconds between progress lines
_PLANNED_SECONDS = 15.0  # limit of CPU time for the last step


@dataclass
class Ranked:
    """One of the fastest layouts, with its overrides."""

    overrides: list[str]
    estimate: Estimate

    @property
    def command_line(self) -> str:
        return shlex.join([*train_program(), *self.overrides])


@dataclass
class LayoutSearch:
    gpus: int
    hardware: Hardware
    ranked: list[Ranked] = field(default_factory=list)  # fastest first
    judged: int = 0  # scored layouts, fitting or not
    fitting: int = 0
    refused: int = 0  # invalid
    why: str = ""  # the first reason why an order or split was impossible
    seconds: float = 0.0
    least_memory: int = 0  # the smallest peak of a layout, bytes on its fullest rank


def search(
    config: Config,
    words: list[str],
    gpus: int,
    most: int = 10,
    say: Callable[[str], object] = lambda _: None,
) -> LayoutSearch:
    """Search the fastest layouts of `gpus` devices.

    words: the config's overrides, which stay fixed; most: number of layouts to return; say: called
    with the progress every few seconds. Raises ConfigError.
    """
    begin, spoke, slow = time.process_time(), time.monotonic(), False
    hardware = planned_hardware(config, gpus)
    result = LayoutSearch(gpus, hardware)
    fixed_words = [word for word in words if key_of(word) not in ("hardware", "gpus")]
    scored: list[ScoredLayout] = []
    for layout in _score_all(config, fixed_words, result):
        scored.append(layout)
        if time.monotonic() > spoke + _PROGRESS:
            spoke, slow = time.monotonic(), True
            chosen = (word for word in layout.overrides if word not in fixed_words)
            say(f"{len(scored)} layouts estimated, now {' '.join(chosen)}")
    if slow:
        say(f"{len(scored)} layouts estimated; the fastest are planned")
    if not scored:
        reason = f"no layout of {gpus} devices is valid for batch_size={config.batch_size}"
        reason += f" ({result.why})" if result.why else ""
        raise ConfigError([Problem("gpus", gpus, reason, "another batch_size, or other devices")])
    fitting = [layout for layout in scored if layout.most <= hardware.usable]
    fitting.sort(key=lambda layout: layout.seconds)
    result.judged, result.fitting = len(scored), len(fitting)
    result.least_memory = min(layout.most for layout in scored)
    end, refusal = time.process_time() + _PLANNED_SECONDS, None
    for layout in fitting[: 2 * most]:
        enough = len(result.ranked) >= most or time.process_time() > end
        if enough and result.ranked:
            break
        try:
            estimate = make_estimate(layout.config, hardware, checked=layout.transforms)
        except ConfigError as error:
            result.refused, refusal = result.refused + 1, refusal or error
            continue
        if estimate.fits:
            result.ranked.append(Ranked(layout.overrides, estimate))
    if refusal and not result.ranked:  # a common reason, e.g. a split for other stages
        raise refusal
    if "split" not in map(key_of, fixed_words):
        for ranked in result.ranked[:_AUTO]:
            alone = ranked.estimate
            changed = with_choices(alone.config, {"split": "auto"})
            if alone.config.pp == 1 or validate.problems(changed):
                continue
            try:
                other = make_estimate(changed, hardware, checked=alone.plan.transforms)
            except (ConfigError, ValueError):
                continue
            if other.fits and other.step_seconds < alone.step_seconds:
                result.ranked.append(Ranked([*ranked.overrides, "split=auto"], other))
    result.ranked.sort(key=lambda ranked: ranked.estimate.step_seconds)
    result.seconds = time.process_time() - begin
    return result


# --- enumeration ----------------------------------------------------------------------------------


def _score_all(config: Config, words: list[str], result: LayoutSearch) -> Iterator[ScoredLayout]:
    """Yield a score for every valid candidate."""
    gpus, contexts = result.gpus, {config.cp}
    if "cp" not in map(key_of, words):  # try more cp for long sequences
        largest = min(gpus, config.seq_len // _LEAST_TOKENS)
        contexts |= {2**n for n in range(1, 9) if 2**n <= largest and gpus % 2**n == 0}
    for cp in sorted(contexts):
        chosen = words if cp == config.cp else [*words, f"cp={cp}"]
        with_cp = replace(config, cp=cp)
        try:
            tables = CostCache(with_cp, result.hardware)
        except ConfigError:
            if cp == config.cp:
                raise
            result.refused += 1  # the model mixes tokens other than by attention
            continue
        yield from _score_context(with_cp, chosen, result, tables)


def _score_context(
    config: Config, words: list[str], result: LayoutSearch, tables: CostCache
) -> Iterator[ScoredLayout]:
    fixed, gpus, hardware = set(map(key_of, words)), result.gpus, result.hardware
    machine = min(gpus, hardware.devices_per_node)
    orders: dict[object, Order] = {}
    for overrides, base in candidates(config, words, gpus, machine):
        if base is None or base.world_size != gpus or base.batch_size % base.dp:
            result.refused += 1
            continue
        try:
            count = microbatches_of(base)
            stages = stage_count(base.schedule, base.pp, count)
        except ValueError:
            result.refused += 1
            continue
        if not tables.sensible(base, count) or stages > tables.units:
            continue
        if base.exact and count != rows_of(base, base.numerics.grain):
            result.why = (
                result.why or f"a microbatch is a grain, numerics.grain={base.numerics.grain}"
            )
            continue
        if base.dp % base.replicate:
            base = replace(base, replicate=1)
        if base.dp * base.cp == 1 and "fsdp.zero" not in fixed:
            base = with_choices(base, {"fsdp.zero": 1})
        for choices in _variants(base, fixed, hardware, tables.experts):
            changed = with_choices(base, choices)
            if validate.problems(changed):
                result.refused += 1
                continue
            table = tables(changed, rows_of(changed, count))
            chosen = [*overrides, *(f"{key}={value}" for key, value in choices.items())]
            try:
                yield score(chosen, changed, table, hardware, orders, count)
            except ValueError as error:
                result.refused, result.why = result.refused + 1, result.why or str(error)


def _variants(
    config: Config, fixed: set[str], hardware: Hardware, experts: int
) -> Iterator[dict[str, Any]]:
    """Yield each ZeRO level, way to recompute, number of replicas and ep that the overrides leave
    open; experts: number per layer."""
    splits = hasattr(config.schedule, "weight_gradients")
    levels = [1] if splits or config.shards == 1 else [1, 2, 3]
    zeros: list[dict[str, Any]] = [{"fsdp.zero": level} for level in levels]
    zeros = [{}] if "fsdp.zero" in fixed or config.dp * config.cp == 1 else zeros
    ways: list[dict[str, Any]] = [{"activation_checkpoint": how} for how in ("fit", "selective")]
    ways = [{}] if "activation_checkpoint" in fixed else ways
    for zero, how in product(zeros, ways):
        sharded = [zero | how]
        # with per-block all-gathers, HSDP with shards within a node may be faster
        near = max(1, hardware.devices_per_node // (config.tp * config.cp))
        gathers = zero.get("fsdp.zero", config.fsdp.zero) == 3 and "replicate" not in fixed
        if gathers and config.replicate == 1 and config.dp > near and config.dp % near == 0:
            sharded.append(zero | how | {"replicate": config.dp // near})
        for choices in sharded:
            sizes = [config.ep]
            if "ep" not in fixed and experts:
                together = gcd(experts, with_choices(config, choices).shards)
                inside = gcd(together, hardware.devices_per_node // config.tp)
                over_tp = config.tp * gcd(experts // config.tp, together)
                sizes = sorted({1, together, inside, 1 if experts % config.tp else over_tp})
            yield from (choices | ({"ep": ep} if ep != config.ep else {}) for ep in sizes)


class CostCache:
    """Cost tables by tp, ep and sequences per microbatch, each computed once."""

    def __init__(self, config: Config, hardware: Hardware) -> None:
        self._config, self._hardware = config, hardware
        self._tables: dict[object, CostTable] = {}
        self._checked: dict[int, Mapping[str, Transform]] = {}
        self._sizes: dict[int, set[int]] = {}
        table = self(config, 1)
        try:
            table.times(config)
        except CostError as error:
            reason = f"its layouts cannot be compared: {error}"
            fix = "plan one layout at a time, without search"
            raise ConfigError([Problem("model.name", config.model.name, reason, fix)]) from error
        self.units = len(table.units)
        modules: list[Any] = [*experts_of(table.plan.model_graph.model).values()]
        self.experts = min((int(module.num_experts) for module in modules), default=0)  # per layer

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
        sizes = config.tp, config.ep, rows
        if sizes not in self._tables:
            on_ranks = replace(self._config, tp=config.tp, ep=config.ep)
            table = CostTable(on_ranks, self._hardware, rows, self._checked.get(config.tp))
            self._tables[sizes], self._checked[config.tp] = table, table.plan.transforms
        return self._tables[sizes]


# --- scoring a layout without a plan --------------------------------------------------------------


@dataclass(frozen=True)
class ScoredLayout:
    """A layout estimated from costs of units, in about 10 ms."""

    overrides: list[str]
    config: Config
    layout: StageLayout
    times: LayoutTimes
    most: int  # peak bytes of the fullest pipeline rank
    order: Order  # shortened to few microbatches
    transforms: Mapping[str, Transform]  # of the model with this tp

    @cached_property
    def seconds(self) -> float:
        """Step time: after the shortened order at the pace of the busiest rank."""
        rest = self.layout.microbatches / self.order.microbatches - 1
        simulation = self.times.simulate(self.order)  # not cached: there may be thousands
        return simulation.step + rest * max(simulation.computes)


def score(
    overrides: list[str],
    config: Config,
    table: CostTable,
    hardware: Hardware,
    orders: dict[object, Order],
    microbatches: int,
) -> ScoredLayout:
    """Estimate a layout, with as few blocks recomputed as possible, or as `activation_checkpoint`
    says. orders: a cache."""
    pp, schedule = config.pp, config.schedule
    zero = 1 if config.fsdp.zero == "auto" else config.fsdp.zero
    # as few microbatches as show the schedule's period
    count = min(microbatches, _ROUNDS * pp) if schedule.name in _PERIODIC else microbatches
    key = schedule.name, getattr(schedule, "stages_per_rank", 1), pp, count
    if key not in orders:
        orders[key] = build_order(schedule, pp, count)
    order = orders[key]
    names = table.stages(stage_count(schedule, pp, microbatches), config)
    defers = order.splits_backward and defers_weight_gradients(schedule)
    deferred = range(order.stages) if defers else ()
    blocks = [[name for name in stage if name in table.blocks] for stage in names]
    chosen = table.recomputed(config)
    layout = table.layout(names, chosen, deferred, order.stage_to_rank, zero, microbatches)
    memory = table.memory.with_layout(config, order, layout)
    if config.activation_checkpoint.name == "fit":
        recomputed, peaks = memory.fit(blocks, hardware.usable)
        layout = replace(layout, recomputed=[*map(frozenset, recomputed)])
    else:
        peaks = memory.of_ranks(layout.recomputed)
    times = LayoutTimes(config, layout, hardware, table.times(config))
    transforms = table.plan.transforms
    return ScoredLayout(overrides, config, layout, times, max(peaks), order, transforms)


# --- output -------------------------------------------------------------------------------------


def search_data(result: LayoutSearch, most: int = 10) -> dict[str, Any]:
    """The result as a JSON object."""
    return {
        "layouts": result.judged,
        "fitting": result.fitting,
        "refused": result.refused,
        "seconds": result.seconds,
        "hardware": result.hardware.title,
        "gpus": result.gpus,
        "ranked": [
            {"command": r.command_line, **as_data(r.estimate)} for r in result.ranked[:most]
        ],
    }


def search_text(result: LayoutSearch, most: int = 10, width: int = 80) -> str:
    lines = [
        f"{result.judged:,} layouts of {result.gpus:,} x {result.hardware.title}, of which "
        f"{result.fitting:,} fit into {units.size(result.hardware.usable)}; {result.seconds:.0f} s"
    ]
    if not result.ranked:
        least = units.size(result.least_memory)
        lines.append(f"none fits: the least is {least} on the fullest rank; take more devices")
        return "\n".join(lines)
    best, rows = result.ranked[0].estimate, []
    for number, estimate in enumerate((ranked.estimate for ranked in result.ranked[:most]), 1):
        slower = estimate.step_seconds / best.step_seconds - 1
        rows.append(
            [
                str(number),
                mesh_text(estimate),
                estimate.config.schedule.name if estimate.config.pp > 1 else "",
                str(estimate.plan.microbatches),
                units.short_time(estimate.step_seconds),
                f"{estimate.speed:,.0f}",
                "" if estimate.mfu is None else f"{estimate.mfu:.1%}",
                f"{estimate.simulation.bubble:.0%}",
                f"{estimate.fullest / 2**30:.1f}",
                f"+{slower:.1%}" if number > 1 else "",
            ]
        )
    speed = "tok/s" if best.plan.unit == "tokens" else "samples/s"
    header = ["", "mesh", "schedule", "mb", "step", speed, "MFU", "bubble", "GiB", "slower"]
    lines += ["", table(header, rows, width), ""]
    lines += [f"{number}  {r.command_line}" for number, r in enumerate(result.ranked[:most], 1)]
    return "\n".join(lines)
