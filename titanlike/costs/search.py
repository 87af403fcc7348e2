"""`plan search`: every layout of so many devices for a global batch, and the fastest that fit.

1. `layouts.candidates` lists meshes, schedules, stages and microbatches; here each is taken with every
   level of ZeRO, and with blocks recomputed selectively or as few as fit (`fit`).
2. All are judged by closed forms (`closed_form.py`): what does not fit is dropped.
3. The most promising are simulated, the best of these are drafted and planned as `plan` does it.
"""

from __future__ import annotations

import shlex
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd
from typing import Any

from titanlike.config import validate
from titanlike.config.errors import ConfigError, Problem
from titanlike.config.groups import (
    AutoSplit,
    FitActivationCheckpoint,
    SelectiveActivationCheckpoint,
)
from titanlike.config.hardware import Hardware
from titanlike.config.overrides import key_of
from titanlike.config.program import train_program
from titanlike.config.schema import VARIANTS, Config
from titanlike.costs.closed_form import CostCache, ScoredLayout, judge, rows_of, simulated_seconds
from titanlike.costs.estimate import Estimate, make_estimate
from titanlike.costs.estimate_text import as_data, mesh_text, table
from titanlike.costs.exact_memory import with_exact_memory
from titanlike.costs.known_hardware import planned_hardware
from titanlike.costs.layouts import SearchSpace, candidates, tensor_sizes
from titanlike.graph.partition import SplitError
from titanlike.metrics import units
from titanlike.pipeline.from_config import declared_microbatches, derive_microbatches, stage_count
from titanlike.pipeline.order import Order

_SCHEDULES = [
    *("1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev"),
    *("vhalf", "vmin"),
]
_STAGES_PER_RANK = [2, 3, 4]
_LEAST_TOKENS = 2**13  # of a sequence on each of the context-parallel ranks
_SIMULATED = 64
_AUTO = 3  # of the fastest, that are planned with split=auto, too
_PROGRESS = 3.0  # seconds between lines
_PLANNED_SECONDS = 15.0  # of this process, for the last step


@dataclass(frozen=True)
class Ranked:
    """A layout of the end, with its command line's overrides."""

    overrides: list[str]
    plan: Estimate


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
    begin, said = time.process_time(), time.monotonic()
    slow = False
    hardware = planned_hardware(config, gpus)
    found = LayoutSearch(gpus, hardware)
    kept = [word for word in words if key_of(word) not in ("hardware", "gpus")]
    judged = []
    for one_judged in _judged(config, kept, gpus, hardware, found):
        judged.append(one_judged)
        if time.monotonic() > said + _PROGRESS:
            said, slow = time.monotonic(), True
            own = (word for word in one_judged[0] if word not in kept)
            say(f"{len(judged)} layouts estimated, now {' '.join(own)}")
    if slow:
        say(f"{len(judged)} layouts estimated; the fastest are planned")
    if not judged:
        reason = f"no layout of {gpus} devices is valid for batch_size={config.batch_size}"
        raise ConfigError([Problem("gpus", gpus, reason, "another batch_size, or other devices")])
    fitting = sorted(
        (j for j in judged if j[1].most <= hardware.usable), key=lambda j: j[1].seconds
    )
    found.judged, found.fitting = len(judged), len(fitting)
    found.least_memory = min(j.most for _, j in judged)
    simulated = [(simulated_seconds(j, hardware), o, j) for o, j in fitting[:_SIMULATED]]
    simulated.sort(key=lambda item: item[0])
    end = time.process_time() + _PLANNED_SECONDS
    for _, overrides, one in simulated[: 2 * most]:
        enough = len(found.ranked) >= most or time.process_time() > end
        if enough and found.ranked:
            break
        try:
            plan = make_estimate(one.config, hardware, checked=one.transforms)
        except ConfigError:
            found.refused += 1
            continue
        if plan.fits:
            found.ranked.append(Ranked(overrides, plan))
    if "split" not in {key_of(word) for word in kept}:
        found.ranked += [*_with_auto_split(found.ranked[:_AUTO])]
    found.ranked.sort(key=lambda item: item.plan.step_seconds)
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
        fullest = one.plan.memory_bytes.index(one.plan.fullest)
        one = Ranked(one.overrides, with_exact_memory(one.plan, [fullest]))
        if one.plan.fits:
            yield one


def _with_auto_split(ranked: list[Ranked]) -> Iterator[Ranked]:
    for one in ranked:
        if one.plan.config.pp == 1:
            continue
        config = replace(one.plan.config, split=AutoSplit())
        try:
            plan = make_estimate(config, one.plan.hardware, checked=one.plan.draft.transforms)
        except ConfigError:
            continue
        if plan.fits and plan.step_seconds < one.plan.step_seconds:
            yield Ranked([*one.overrides, "split=auto"], plan)


def _judged(
    config: Config, words: list[str], gpus: int, hardware: Hardware, found: LayoutSearch
) -> Iterator[tuple[list[str], ScoredLayout]]:
    """Every candidate that is valid, with its overrides."""
    given = {key_of(word) for word in words}
    counts = [n for n in range(1, config.batch_size + 1) if config.batch_size % n == 0]
    space = SearchSpace(gpus, _SCHEDULES, counts, _STAGES_PER_RANK)
    for cp in _context_sizes(config, given, gpus):
        own = replace(config, cp=cp)
        try:
            tables = CostCache(own, hardware)
        except ConfigError:
            if cp == config.cp:
                raise
            found.refused += 1  # a model whose tokens see each other by other ways than attention
            continue
        chosen = words if cp == config.cp else [*words, f"cp={cp}"]
        yield from _of_context(own, chosen, gpus, hardware, found, tables, space)


def _context_sizes(config: Config, given: set[str], gpus: int) -> list[int]:
    """Context-parallel ranks that are tried: more than the config's where sequences are long."""
    sizes = [config.cp]
    if "cp" not in given:
        most = min(gpus, config.seq_len // _LEAST_TOKENS)
        sizes += [2**n for n in range(1, 9) if 2**n <= most and gpus % 2**n == 0]
    return sorted(set(sizes))


def _of_context(
    config: Config,
    words: list[str],
    gpus: int,
    hardware: Hardware,
    found: LayoutSearch,
    tables: CostCache,
    space: SearchSpace,
) -> Iterator[tuple[list[str], ScoredLayout]]:
    given = {key_of(word) for word in words}

    def compose(overrides: list[str]) -> Config:
        name = next((o.partition("=")[2] for o in overrides if o.startswith("schedule=")), None)
        if name is None or "schedule" in given:
            return config
        return replace(config, schedule=VARIANTS["schedule"][name](name=name))

    sizes = partial(tensor_sizes, ranks=gpus, machine=min(gpus, hardware.devices_per_node))
    orders: dict[object, Order] = {}
    # as experiments write them, schedules' microbatches are not the user's
    base = config if "schedule.microbatches" in given else _without_count(config)
    compose_base = compose if base is config else lambda o: _without_count(compose(o))
    for candidate in candidates(words, compose_base, gpus, space, sizes):
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
        for more, changed in _variants(one, given, hardware, tables.experts):
            if validate.problems(changed):
                found.refused += 1
                continue
            zero = 1 if changed.fsdp.zero == "auto" else changed.fsdp.zero
            table = tables(changed, rows_of(changed, count))
            try:
                one_judged = judge(changed, table, hardware, orders, count, zero)
                yield [*candidate.overrides, *more], one_judged
            except (ValueError, SplitError):
                found.refused += 1


def _without_count(config: Config) -> Config:
    if getattr(config.schedule, "microbatches", None) is None:
        return config
    if config.schedule.name == "csv":
        return config
    schedule: Any = config.schedule
    return replace(config, schedule=replace(schedule, microbatches=None))


def _variants(
    config: Config, given: set[str], hardware: Hardware, experts: int
) -> Iterator[tuple[list[str], Config]]:
    """With each level of ZeRO, each way to recompute, replicas and expert-parallel ranks that the command
    line leaves open; experts: of a layer."""
    for more, changed in _sharded(config, given, hardware):
        sizes = [changed.ep]
        if "ep" not in given and experts:
            together = gcd(experts, changed.shards)
            sizes = sorted({1, together, gcd(together, hardware.devices_per_node // changed.tp)})
        for ep in sizes:
            words = [*more, f"ep={ep}"] if ep != config.ep else more
            yield words, replace(changed, ep=ep)


def _sharded(
    config: Config, given: set[str], hardware: Hardware
) -> Iterator[tuple[list[str], Config]]:
    splits = hasattr(config.schedule, "weight_gradients")
    levels: list[Any] = [1] if splits or config.shards == 1 else [1, 2, 3]
    levels = [config.fsdp.zero] if "fsdp.zero" in given else levels
    ways = [FitActivationCheckpoint(), SelectiveActivationCheckpoint()]
    ways = [config.activation_checkpoint] if "activation_checkpoint" in given else ways
    for zero in levels:
        for how in ways:
            words = (
                [] if "fsdp.zero" in given or config.dp * config.cp == 1 else [f"fsdp.zero={zero}"]
            )
            if "activation_checkpoint" not in given:
                words.append(f"activation_checkpoint={how.name}")
            fsdp = replace(config.fsdp, zero=zero)
            changed = replace(config, fsdp=fsdp, activation_checkpoint=how)
            yield words, changed
            # of what is gathered for each block, shards in a node and replicas of it may be faster
            near = max(1, hardware.devices_per_node // (config.tp * config.cp))
            if zero == 3 and "replicate" not in given and config.dp > near:
                replicas = config.dp // near
                if config.dp % near == 0 and config.replicate == 1:
                    yield [*words, f"replicate={replicas}"], replace(changed, replicate=replicas)


# --- why well-known choices lose ----------------------------------------------------------------


def _is_pipeline_of(schedule: str, config: Config) -> bool:
    return config.pp > 1 and config.schedule.name == schedule


def _lost(judged: list[tuple[list[str], ScoredLayout]], found: LayoutSearch) -> Iterator[str]:
    """Of each well-known choice, by its fastest layout: how much slower it is, and why."""
    best = found.ranked[0].plan
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
        **{f"schedule={name}": partial(_is_pipeline_of, name) for name in _SCHEDULES},
    }
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
            {"command": command_line(one), **as_data(one.plan)} for one in found.ranked[:most]
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
    best = found.ranked[0].plan
    rows = []
    for at, one in enumerate(found.ranked[:most], 1):
        plan = one.plan
        slower = plan.step_seconds / best.step_seconds - 1
        rows.append(
            [
                str(at),
                mesh_text(plan),
                plan.config.schedule.name if plan.config.pp > 1 else "",
                str(plan.draft.microbatches),
                units.short_time(plan.step_seconds),
                f"{plan.tokens_per_second_per_gpu:,.0f}",
                "" if plan.mfu is None else f"{plan.mfu:.1%}",
                f"{plan.simulation.bubble:.0%}",
                f"{plan.fullest / 2**30:.1f}",
                f"+{slower:.1%}" if at > 1 else "",
            ]
        )
    header = ["", "mesh", "schedule", "mb", "step", "tok/s", "MFU", "bubble", "GiB", "slower"]
    lines += ["", table(header, rows, width), ""]
    lines += [f"{at}  {command_line(one)}" for at, one in enumerate(found.ranked[:most], 1)]
    if found.lost:
        lines += ["", "why others lose", *(f"  {text}" for text in found.lost)]
    return "\n".join(lines)
