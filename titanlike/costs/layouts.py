"""The layouts of a model on so many ranks: meshes, schedules, stages and microbatches."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.keys import Bytes
from titanlike.config.overrides import key_of, with_choices
from titanlike.config.schema import Config, CsvSchedule, LoopedSchedule
from titanlike.config.validate import MAX_TENSOR_RANKS
from titanlike.device import accelerator
from titanlike.device.memory import free_memory, resident_memory
from titanlike.distributed.sharding import StateBytes
from titanlike.launch.environment import available_cores
from titanlike.models.registry import build_model, resolve_model
from titanlike.parallel.tp.plan import tensor_plan, written_plan
from titanlike.parallel.tp.styles import TensorRanks, shard_model
from titanlike.pipeline.from_config import derive_microbatches, microbatch_problem
from titanlike.pipeline.schedules import SCHEDULES

Compose = Callable[[list[str]], Config]  # overrides -> config; raises ConfigError


@dataclass(frozen=True)
class SearchSpace:
    """Which layouts are listed and run: the keys of hydra.sweeper. None = derived."""

    ranks: int | None = None  # None: GPUs, or cores of the CPU, that may be used
    schedules: list[str] = field(default_factory=lambda: list(SCHEDULES))
    microbatches: list[int] | None = None  # None: see `_microbatches`
    stages_per_rank: list[int] = field(default_factory=lambda: [2])
    memory: Bytes | None = None  # of a rank, "80GiB"; None: what is free
    most: int = 24  # layouts that are run


@dataclass(frozen=True)
class Candidate:
    """A layout: a job's overrides, and the config that they give."""

    overrides: list[str]
    config: Config
    refused: str = ""  # why it cannot be


def candidates(
    combination: list[str],
    compose: Compose,
    ranks: int,
    space: SearchSpace,
    sizes: TensorSizes = lambda _: {1: ""},
) -> Iterator[Candidate]:
    """Every layout of so many ranks that agrees with the overrides in `combination`.

    Without a pipeline there is one schedule, 1f1b, whose microbatches are gradient accumulation.
    What the command line fixes is kept, even where it is invalid: a check gives the reason. A tp that
    `sizes` refuses is one candidate.
    Raises ConfigError where the overrides alone are invalid.
    """
    given = {key_of(text) for text in combination}
    base = compose(combination)
    composed = cache(lambda name: compose([*combination, f"schedule={name}"]))
    own_schedule = bool(given & {"schedule", "schedule.name"})
    tensor = {base.tp: ""} if "tp" in given else sizes(base)
    for tp in (tp for tp, refused in tensor.items() if refused):
        yield Candidate([*combination, f"tp={tp}"], replace(base, tp=tp), tensor[tp])
    possible = [tp for tp, refused in tensor.items() if not refused]
    for pp, dp, tp in _meshes(base, given, ranks, possible):
        mesh = {key: size for key, size in (("pp", pp), ("dp", dp)) if key not in given}
        mesh |= {"tp": tp} if tp != base.tp else {}
        names = [None] if own_schedule else ["1f1b"] if pp == 1 else space.schedules
        for name in dict.fromkeys(names):
            config = replace(base if name is None else composed(name), pp=pp, dp=dp, tp=tp)
            chosen = mesh | ({} if name is None else {"schedule": name})
            for more in _schedules(config, given, space):
                words = [f"{key}={value}" for key, value in (chosen | more).items()]
                yield Candidate([*combination, *words], with_choices(config, more))


def _meshes(
    base: Config, given: Collection[str], ranks: int, tensor: Iterable[int]
) -> Iterator[tuple[int, int, int]]:
    """(pp, dp, tp) with pp * dp * cp * tp = ranks, as far as they are not given; tensor: tp to try."""
    ranks //= base.cp
    for tp in tensor:
        left = max(1, ranks // max(1, tp))
        match "pp" in given, "dp" in given:
            case True, True:
                meshes = [(base.pp, base.dp)]
            case True, False:
                meshes = [(base.pp, max(1, left // max(1, base.pp)))]
            case False, True:
                meshes = [(max(1, left // max(1, base.dp)), base.dp)]
            case _:
                meshes = [(pp, left // pp) for pp in range(1, left + 1) if left % pp == 0]
        for pp, dp in meshes:
            if tp == base.tp or pp * dp * tp == ranks:
                yield pp, dp, tp


def _schedules(
    config: Config, given: Collection[str], space: SearchSpace
) -> Iterator[dict[str, Any]]:
    """Each number of stages and microbatches of the config's schedule."""
    stages: list[dict[str, Any]] = [{}]
    if isinstance(config.schedule, LoopedSchedule) and "schedule.stages_per_rank" not in given:
        sizes = dict.fromkeys(space.stages_per_rank)
        stages = [{"schedule.stages_per_rank": size} for size in sizes]
    for choices in stages:
        counts = []
        if not isinstance(config.schedule, CsvSchedule) and "schedule.microbatches" not in given:
            counts = _microbatches(with_choices(config, choices), space)
        yield from [choices | {"schedule.microbatches": n} for n in counts] or [choices]


def _microbatches(config: Config, space: SearchSpace) -> list[int]:
    """Valid numbers of microbatches to try: those given, or what a run derives, 1, 2 and 4 per
    pipeline rank, and microbatches of one sequence, which take the least memory."""
    batch, schedule, pp = config.batch_size // config.dp, config.schedule, config.pp
    if batch < 1 or config.batch_size % config.dp:
        return []
    wanted = space.microbatches
    if wanted is None:
        wanted = [pp, 2 * pp, 4 * pp, batch]
        try:
            wanted.append(derive_microbatches(schedule, pp, batch)[0])
        except ValueError:
            return []  # the check gives the reason
    return sorted(
        n for n in set(wanted) if batch % n == 0 and microbatch_problem(schedule, pp, n) is None
    )


# --- how many tensor-parallel ranks a search tries ------------------------------------------------


TensorSizes = Callable[[Config], Mapping[int, str]]  # tp -> why it cannot be, or ""


def tensor_sizes(config: Config, ranks: int, machine: int) -> dict[int, str]:
    """Each tp that divides `ranks` -> why it cannot be, or ""; 1 alone for a model without a plan.

    machine: ranks of one. Raises ConfigError where the plan in the config is wrong.
    """
    found = {1: ""}
    resolved = resolve_model(config)
    for tp in range(2, min(ranks, MAX_TENSOR_RANKS) + 1):
        if ranks % tp:
            continue
        divided = replace(config, tp=tp)
        model = build_model(resolved)
        try:
            modules = tensor_plan(divided, model)
        except ConfigError:
            if written_plan(config) is not None:
                raise
            return {1: ""}
        if machine % tp:
            found[tp] = f"tp={tp}: activations of every layer would go over the network: a machine"
            found[tp] += f" has {machine} ranks"
            continue
        try:
            shard_model(model, modules, TensorRanks(tp, 0), whole_logits=False)
            found[tp] = ""
        except ConfigError as error:
            found[tp] = str(error.problems[0])
    return found


def least_memory(config: Config, parameters: int) -> int:
    """Bytes that the ranks need on average, by the model's number of parameters alone: as if
    Muon updated all, if it is the optimizer."""
    zero = 3 if config.fsdp.zero == "auto" else config.fsdp.zero
    return int(parameters * StateBytes.of(config, zero, hidden=True).whole / config.model_ranks)


# --- the machine that layouts are searched for ----------------------------------------------------


_USUAL_GPUS = 8  # of a machine
_LIBRARIES = 64 << 20  # bytes that libraries allocate in a CPU rank once it trains


@dataclass(frozen=True)
class Machine:
    ranks: int
    memory: int | None  # bytes that training may take on each; None = unknown
    together: int | None = None  # ranks of one machine; None = all


def find_machine(
    config: Config, ranks: int | None, memory: int | None, started: int | None
) -> Machine:
    """The given ranks and memory, or else what was started, or what this machine has.

    started: ranks that torchrun or srun started, or None. Raises ConfigError for more ranks than GPUs.
    """
    gpus = accelerator.count() if config.device != "cpu" else 0
    ranks = ranks or started or gpus or available_cores()
    if gpus and ranks > gpus and started is None and config.sweep.submit is None:
        reason = f"there are {gpus} GPUs on this machine"
        fix = f"hydra.sweeper.ranks={gpus}, or device=cpu"
        raise ConfigError([Problem("hydra.sweeper.ranks", ranks, reason, fix)])
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if started else ranks
    together = here
    if config.sweep.submit is not None:  # to machines like this one, if it has GPUs
        together = min(ranks, gpus or _USUAL_GPUS)
    if memory is None:
        memory = free_memory() if gpus else _free_on_cpu(here)
    return Machine(ranks, memory, together)


def _free_on_cpu(ranks: int) -> int | None:
    """A rank's share of the free memory, less what a process takes before it trains."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:  # the container's limit
        group = Path("/sys/fs/cgroup")
        most, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        free = min(free, int(most) - int(used))
    except (OSError, ValueError):
        pass  # no limit
    return max(0, free // ranks - resident_memory(torch.device("cpu")) - _LIBRARIES)
