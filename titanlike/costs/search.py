"""`plan search`: every layout of so many devices for a global batch, and the fastest that fit.

1. `layouts.candidates` lists meshes, schedules, stages and microbatches; here each is taken with every
   level of ZeRO, and with blocks recomputed selectively or as few as fit (`fit`).
2. All are judged by closed forms (`judge`), of units that were counted once (`CostTable`): what does not
   fit is dropped.
3. The most promising are simulated, the best of these are planned and estimated as `plan` does it.
"""

from __future__ import annotations

import math
import shlex
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import gcd
from typing import Any

from titanlike.config import validate
from titanlike.config.errors import ConfigError, Problem
from titanlike.config.overrides import key_of, with_choices
from titanlike.config.program import train_program
from titanlike.config.schema import Config, Hardware
from titanlike.costs.estimate import (
    CostTable,
    Estimate,
    agreement,
    make_estimate,
    rows_of,
    with_exact_memory,
)
from titanlike.costs.estimate_text import as_data, mesh_text, table
from titanlike.costs.known_hardware import planned_hardware
from titanlike.costs.layouts import SearchSpace, candidates, tensor_sizes
from titanlike.costs.rank_memory import RankMemory
from titanlike.costs.simulate import simulate
from titanlike.costs.stage_times import LayoutTimes, StageLayout, stage_times
from titanlike.distributed.placement import experts_of
from titanlike.distributed.transform import Transform
from titanlike.graph.partition import SplitError
from titanlike.metrics import units
from titanlike.pipeline.from_config import (
    build_order,
    declared_microbatches,
    defers_weight_gradients,
    derive_microbatches,
    stage_count,
)
from titanlike.pipeline.order import Order

_SCHEDULES = [
    *("1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev"),
    *("vhalf", "vmin"),
]
_STAGES_PER_RANK = [2, 3, 4]
_LEAST_TOKENS = 2**13  # of a sequence on each of the context-parallel ranks
_MOST_TOKENS = 2**15  # of a rank, of several sequences: products are no faster with more
_MOST_SIZES = 6  # of microbatches, on each number of tensor-parallel ranks
_ROUNDS = 2  # microbatches a pipeline rank with which an order is as good as any longer one
# schedules that go on as they began: with more microbatches no more are in flight
_PERIODIC = (*_SCHEDULES, "zbh1", "zbh2")
_SIMULATED = 64
_AUTO = 3  # of the fastest, that are planned with split=auto, too
_PROGRESS = 3.0  # seconds between lines
_PLANNED_SECONDS = 15.0  # of this process, for the last step


@dataclass(frozen=True)
class Ranked:
    """A layout of the end, with its command line's overrides."""

    overrides: list[str]
    estimate: Estimate


@dataclass
class LayoutSearch:
    """Of a search."""

    gpus: int
    hardware: Hardware
    ranked: list[Ranked] = field(default_factory=list)  # the fastest first
    judged: int = 0
    fitting: int = 0
    refused: int = 0  # invalid
    too_large: int = 0  # of the fastest, which do not fit when their memory is counted
    lost: list[str] = field(default_factory=list)  # why well-known choices are not among them
    seconds: float = 0.0
    least_memory: int = 0  # bytes of the fullest rank, of the layout that needs the least


def search(
    config: Config,
    words: list[str],
    gpus: int,
    most: int = 10,
    exact: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> LayoutSearch:
    """words: the overrides of the config; what they fix stays; exact: count the memory of the fullest
    rank of what is found, where it can be; say: is told every few seconds how far it is. Raises
    ConfigError."""
    begin, said, slow = time.process_time(), time.monotonic(), False
    hardware = planned_hardware(config, gpus)
    found = LayoutSearch(gpus, hardware)
    kept = [word for word in words if key_of(word) not in ("hardware", "gpus")]
    judged: list[tuple[list[str], ScoredLayout]] = []
    for overrides, one in _judged(config, kept, found):
        judged.append((overrides, one))
        if time.monotonic() > said + _PROGRESS:
            said, slow = time.monotonic(), True
            own = (word for word in overrides if word not in kept)
            say(f"{len(judged)} layouts estimated, now {' '.join(own)}")
    if slow:
        say(f"{len(judged)} layouts estimated; the fastest are planned")
    if not judged:
        reason = f"no layout of {gpus} devices is valid for batch_size={config.batch_size}"
        raise ConfigError([Problem("gpus", gpus, reason, "another batch_size, or other devices")])
    fitting = [(overrides, one) for overrides, one in judged if one.most <= hardware.usable]
    fitting.sort(key=lambda item: item[1].seconds)
    found.judged, found.fitting = len(judged), len(fitting)
    found.least_memory = min(one.most for _, one in judged)
    simulated = [(simulated_seconds(one, hardware), o, one) for o, one in fitting[:_SIMULATED]]
    simulated.sort(key=lambda item: item[0])
    end = time.process_time() + _PLANNED_SECONDS
    for _, overrides, one in simulated[: 2 * most]:
        enough = len(found.ranked) >= most or time.process_time() > end
        if enough and found.ranked:
            break
        try:
            estimate = make_estimate(one.config, hardware, checked=one.transforms)
        except ConfigError:
            found.refused += 1
            continue
        if estimate.fits:
            found.ranked.append(Ranked(overrides, estimate))
    if "split" not in map(key_of, kept):
        found.ranked += [*_with_auto_split(found.ranked[:_AUTO])]
    found.ranked.sort(key=lambda item: item.estimate.step_seconds)
    if exact:
        counted = [*_counted(found.ranked[:most])]
        found.too_large, found.ranked = len(found.ranked[:most]) - len(counted), counted
    if found.ranked:
        found.lost = [*_lost(judged, found)]
    found.seconds = time.process_time() - begin
    return found


def _counted(ranked: list[Ranked]) -> Iterator[Ranked]:
    """Those that fit when their fullest rank is counted, or cannot be."""
    for one in ranked:
        fullest = one.estimate.memory_bytes.index(one.estimate.fullest)
        one = Ranked(one.overrides, with_exact_memory(one.estimate, [fullest]))
        if one.estimate.fits:
            yield one


def _with_auto_split(ranked: list[Ranked]) -> Iterator[Ranked]:
    for one in ranked:
        if one.estimate.config.pp == 1:
            continue
        config = with_choices(one.estimate.config, {"split": "auto"})
        try:
            estimate = make_estimate(
                config, one.estimate.hardware, checked=one.estimate.plan.transforms
            )
        except ConfigError:
            continue
        if estimate.fits and estimate.step_seconds < one.estimate.step_seconds:
            yield Ranked([*one.overrides, "split=auto"], estimate)


# --- every layout ---------------------------------------------------------------------------------


def _judged(
    config: Config, words: list[str], found: LayoutSearch
) -> Iterator[tuple[list[str], ScoredLayout]]:
    """Every candidate that is valid, with its overrides."""
    given, gpus = set(map(key_of, words)), found.gpus
    contexts = {config.cp}
    if "cp" not in given:  # more ranks where sequences are long
        most = min(gpus, config.seq_len // _LEAST_TOKENS)
        contexts |= {2**n for n in range(1, 9) if 2**n <= most and gpus % 2**n == 0}
    for cp in sorted(contexts):
        own = replace(config, cp=cp)
        try:
            tables = CostCache(own, found.hardware)
        except ConfigError:
            if cp == config.cp:
                raise
            found.refused += 1  # a model whose tokens see each other by other ways than attention
            continue
        chosen = words if cp == config.cp else [*words, f"cp={cp}"]
        yield from _of_context(own, chosen, found, tables)


def _of_context(
    config: Config, words: list[str], found: LayoutSearch, tables: CostCache
) -> Iterator[tuple[list[str], ScoredLayout]]:
    given, gpus, hardware = set(map(key_of, words)), found.gpus, found.hardware

    def compose(overrides: list[str]) -> Config:
        names = [o.removeprefix("schedule=") for o in overrides if o.startswith("schedule=")]
        composed = config
        if names and "schedule" not in given:
            composed = with_choices(config, {"schedule": names[0]})
        # as experiments write them, schedules' microbatches are not the user's
        written = getattr(composed.schedule, "microbatches", None) is not None
        if written and composed.schedule.name != "csv" and "schedule.microbatches" not in given:
            return with_choices(composed, {"schedule.microbatches": None})
        return composed

    counts = [n for n in range(1, config.batch_size + 1) if config.batch_size % n == 0]
    space = SearchSpace(gpus, _SCHEDULES, counts, _STAGES_PER_RANK)
    sizes = partial(tensor_sizes, ranks=gpus, machine=min(gpus, hardware.devices_per_node))
    orders: dict[object, Order] = {}
    for candidate in candidates(words, compose, gpus, space, sizes):
        one = candidate.config
        if candidate.refused or one.world_size != gpus or one.batch_size % one.dp:
            found.refused += 1
            continue
        rows = one.batch_size // one.dp
        try:
            count = declared_microbatches(one.schedule)
            count = count or derive_microbatches(one.schedule, one.pp, rows)[0]
            stages = stage_count(one.schedule, one.pp, count)
        except ValueError:
            found.refused += 1
            continue
        if not tables.sensible(one, count) or stages > tables.units:
            continue
        if one.dp % one.replicate:
            one = replace(one, replicate=1)
        if one.dp * one.cp == 1 and "fsdp.zero" not in given:
            one = with_choices(one, {"fsdp.zero": 1})
        for choices in _variants(one, given, hardware, tables.experts):
            changed = with_choices(one, choices)
            if validate.problems(changed):
                found.refused += 1
                continue
            zero = 1 if changed.fsdp.zero == "auto" else changed.fsdp.zero
            table, more = tables(changed, rows_of(changed, count)), [*candidate.overrides]
            more += [f"{key}={value}" for key, value in choices.items()]
            try:
                yield more, judge(changed, table, hardware, orders, count, zero)
            except (ValueError, SplitError):
                found.refused += 1


def _variants(
    config: Config, given: set[str], hardware: Hardware, experts: int
) -> Iterator[dict[str, Any]]:
    """Each level of ZeRO, each way to recompute, replicas and expert-parallel ranks that the command line
    leaves open; experts: of a layer."""
    splits = hasattr(config.schedule, "weight_gradients")
    levels = [1] if splits or config.shards == 1 else [1, 2, 3]
    zeros: list[dict[str, Any]] = [{"fsdp.zero": level} for level in levels]
    zeros = [{}] if "fsdp.zero" in given or config.dp * config.cp == 1 else zeros
    ways: list[dict[str, Any]] = [{"activation_checkpoint": how} for how in ("fit", "selective")]
    ways = [{}] if "activation_checkpoint" in given else ways
    for zero, how in product(zeros, ways):
        sharded = [zero | how]
        # of what is gathered for each block, shards in a node and replicas of it may be faster
        near = max(1, hardware.devices_per_node // (config.tp * config.cp))
        gathers = zero.get("fsdp.zero", config.fsdp.zero) == 3 and "replicate" not in given
        if gathers and config.replicate == 1 and config.dp > near and config.dp % near == 0:
            sharded.append(zero | how | {"replicate": config.dp // near})
        for choices in sharded:
            sizes = [config.ep]
            if "ep" not in given and experts:
                together = gcd(experts, with_choices(config, choices).shards)
                inside = gcd(together, hardware.devices_per_node // config.tp)
                sizes = sorted({1, together, inside})
            yield from (choices | ({"ep": ep} if ep != config.ep else {}) for ep in sizes)


class CostCache:
    """Of units, by tensor-parallel ranks and sequences of a microbatch: each is counted once."""

    def __init__(self, config: Config, hardware: Hardware) -> None:
        self._config, self._hardware = config, hardware
        self._known: dict[object, CostTable] = {}
        self._checked: dict[int, Mapping[str, Transform]] = {}
        self._sizes: dict[int, set[int]] = {}
        table = self(config, 1)
        self.units = len(table.units)
        modules: list[Any] = [*experts_of(table.plan.model_graph.model).values()]
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
        at = config.tp, config.ep, rows
        key = *at, tuple(getattr(config.activation_checkpoint, "save", ()))
        if at not in self._known:
            own = replace(self._config, tp=config.tp, ep=config.ep)
            table = CostTable(own, self._hardware, rows, self._checked.get(config.tp))
            self._known[at], self._checked[config.tp] = table, table.plan.transforms
        if key not in self._known:
            self._known[key] = self._known[at].with_recompute(config)
        return self._known[key]


# --- a layout by closed forms ---------------------------------------------------------------------


@dataclass(frozen=True)
class ScoredLayout:
    """A layout by closed forms, judged in some 2 ms."""

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
    """As many blocks are recomputed as must be, or as `activation_checkpoint` says; orders: known ones."""
    pp, schedule = config.pp, config.schedule
    # of as few microbatches as show how it goes on
    count = min(microbatches, _ROUNDS * pp) if schedule.name in _PERIODIC else microbatches
    key = schedule.name, getattr(schedule, "stages_per_rank", 1), pp, count
    if key not in orders:
        orders[key] = build_order(schedule, pp, count)
    order = orders[key]
    names = table.stages(stage_count(schedule, pp, microbatches), config)
    waits = order.splits_backward and defers_weight_gradients(schedule)
    deferred = range(order.stages) if waits else ()
    muon = config.optimizer.name == "muon"
    blocks = [[name for name in stage if name in table.blocks] for stage in names]
    memory = table.memory.with_layout(config, order, zero, names, deferred, table.message, muon)
    if config.activation_checkpoint.name == "fit":
        recomputed, taken = _as_must_be(memory, blocks, order, hardware.usable)
    else:
        chosen = table.recomputed(config)
        recomputed = [[name for name in stage if name in chosen] for stage in blocks]
        taken = memory.of_ranks(recomputed)
    layout = table.layout(
        names, sum(recomputed, []), deferred, order.stage_to_rank, zero, microbatches
    )
    each = stage_times(config, layout, hardware, table.times)
    seconds, parts = _step_seconds(order, each, microbatches, agreement(config, hardware))
    return ScoredLayout(config, layout, each, seconds, taken, order, parts, table.plan.transforms)


def _as_must_be(
    memory: RankMemory, blocks: list[list[str]], order: Order, limit: int
) -> tuple[list[list[str]], list[int]]:
    """(blocks of each stage that are recomputed so that a rank takes no more than `limit`, bytes of each
    rank with these)."""
    # the first rank has the most microbatches in flight, the last the loss: what does not fit is
    # most often known by these two
    edges = [memory.of_rank(rank, blocks) for rank in {0, len(order.ranks) - 1}]
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
        own[: math.ceil(shares[order.stage_to_rank[stage]] * len(own))]
        for stage, own in enumerate(blocks)
    ]
    return recomputed, memory.of_ranks(recomputed)


def _step_seconds(
    order: Order, times: LayoutTimes, microbatches: int, agree: float
) -> tuple[float, dict[str, float]]:
    """By a closed form: the busiest rank, and what fills and drains the pipeline; agree: seconds."""
    ranks, chunks = len(order.ranks), order.stages / len(order.ranks)
    work, once, update = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
    for stage, own in enumerate(times.stages):
        rank, back = order.stage_to_rank[stage], own.backward.device
        if order.splits_backward:
            back = own.input_gradient.device + own.weight_gradient.device
        work[rank] += max(own.forward.device + back, own.forward.host + own.backward.host)
        once[rank] += own.gather + own.reduce
        update[rank] += own.update
    at = work.index(max(work))
    share = 1 / 3 if order.splits_backward else 1.0
    fill = share * (sum(work) - work[at]) / chunks
    messages = sum(t.sends_forward + t.sends_backward for t in times.stages) / chunks
    seconds = microbatches * work[at] + fill + messages + max(once) + max(update)
    parts = dict.fromkeys(times.parts[0], 0.0)
    for stage in order.local(at):
        for name, value in times.parts[stage].items():
            parts[name] += microbatches * value
    parts["sharding and host"] = microbatches * work[at] - sum(parts.values()) + max(once)
    parts["bubble and messages"] = fill + messages
    parts["update"] = max(update)
    return seconds + agree, parts


def simulated_seconds(judged: ScoredLayout, hardware: Hardware) -> float:
    """Of a step: that of the short order is simulated, and what it lacks goes on at its pace."""
    order, agree = judged.order, agreement(judged.config, hardware)
    ahead = hardware.runs_ahead
    simulation = simulate(order, judged.times.stages, runs_ahead=ahead, agree=agree)
    more = judged.layout.microbatches - order.microbatches
    return simulation.step + more * max(simulation.computes) / order.microbatches


# --- why well-known choices lose ----------------------------------------------------------------


def _is_pipeline_of(schedule: str, config: Config) -> bool:
    return config.pp > 1 and config.schedule.name == schedule


def _lost(judged: list[tuple[list[str], ScoredLayout]], found: LayoutSearch) -> Iterator[str]:
    """Of each well-known choice, by its fastest layout: how much slower it is, and why."""
    best = found.ranked[0].estimate
    usable = found.hardware.usable
    own = [word for word in found.ranked[0].overrides if word != "split=auto"]
    mine = next((j for o, j in judged if o == own), None)
    if mine is None:
        return
    tp = max((j.config.tp for _, j in judged), default=1)
    famous: dict[str, Callable[[Config], bool]] = {
        "FSDP alone (pp=1 tp=1)": lambda c: c.pp == c.tp == 1,
        f"tp={tp} without a pipeline": lambda c: c.tp == tp > 1 and c.pp == 1,
        f"tp={tp}": lambda c: c.tp == tp > 1,
        "a pipeline without tp": lambda c: c.pp > 1 and c.tp == 1,
    }
    for schedule in _SCHEDULES:
        famous[f"schedule={schedule}"] = partial(_is_pipeline_of, schedule)
    for name, belongs in famous.items():
        own = [j for _, j in judged if belongs(j.config)]
        if not own or belongs(best.config):
            continue
        fitting = [j for j in own if j.most <= usable]
        if not fitting:
            least = min(j.most for j in own)
            yield f"{name}: does not fit: {least / 2**30:.1f} of {usable / 2**30:.1f} GiB"
            continue
        fastest = min(fitting, key=lambda j: j.seconds)
        slower = fastest.seconds / mine.seconds - 1
        more = {k: fastest.parts[k] - mine.parts.get(k, 0.0) for k in fastest.parts}
        why = max(more, key=lambda k: more[k])
        share = fastest.parts[why] / fastest.seconds
        where = f"pp={fastest.config.pp} dp={fastest.config.dp} tp={fastest.config.tp}"
        if slower > 0.005:
            yield f"{name}: {slower:.0%} slower ({where}): {why} {share:.0%} of its step"


# --- what is printed ----------------------------------------------------------------------------


def search_data(found: LayoutSearch, most: int = 10) -> dict[str, Any]:
    """One JSON object."""
    return {
        "layouts": found.judged,
        "fitting": found.fitting,
        "refused": found.refused,
        "too_large": found.too_large,
        "seconds": found.seconds,
        "hardware": found.hardware.title,
        "gpus": found.gpus,
        "ranked": [
            {"command": command_line(one), **as_data(one.estimate)} for one in found.ranked[:most]
        ],
        "lost": found.lost,
    }


def command_line(ranked: Ranked) -> str:
    return shlex.join([*train_program(), *ranked.overrides])


def search_text(found: LayoutSearch, most: int = 10, width: int = 80) -> str:
    have = units.size(found.hardware.usable)
    lines = [
        f"{found.judged:,} layouts of {found.gpus:,} x {found.hardware.title}, of which "
        f"{found.fitting:,} fit into {have}; {found.seconds:.0f} s"
    ]
    if found.too_large:
        text = f"{found.too_large} of the fastest left out: counted, they take more than estimated"
        lines += textwrap.wrap(text, width)
    if not found.ranked:
        least = units.size(found.least_memory)
        lines.append(f"none fits: the least is {least} on the fullest rank; take more devices")
        return "\n".join(lines)
    best = found.ranked[0].estimate
    rows = []
    for at, one in enumerate(found.ranked[:most], 1):
        estimate = one.estimate
        slower = estimate.step_seconds / best.step_seconds - 1
        rows.append(
            [
                str(at),
                mesh_text(estimate),
                estimate.config.schedule.name if estimate.config.pp > 1 else "",
                str(estimate.plan.microbatches),
                units.short_time(estimate.step_seconds),
                f"{estimate.tokens_per_second_per_gpu:,.0f}",
                "" if estimate.mfu is None else f"{estimate.mfu:.1%}",
                f"{estimate.simulation.bubble:.0%}",
                f"{estimate.fullest / 2**30:.1f}",
                f"+{slower:.1%}" if at > 1 else "",
            ]
        )
    header = ["", "mesh", "schedule", "mb", "step", "tok/s", "MFU", "bubble", "GiB", "slower"]
    lines += ["", table(header, rows, width), ""]
    lines += [f"{at}  {command_line(one)}" for at, one in enumerate(found.ranked[:most], 1)]
    if found.lost:
        lines += ["", "why others lose", *(f"  {text}" for text in found.lost)]
    return "\n".join(lines)
