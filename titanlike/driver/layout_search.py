"""The throughput search: which layouts of a model are run on a machine.

1. `read_space` reads the keys of `hydra.sweeper`;
2. `find_machine` finds how many ranks there are and how much memory each has, where those do not;
3. `filter_layouts` lists the layouts (`planning/layouts.py`), and skips those that are invalid, do not
   fit, or are not promising.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import torch

from titanlike.config import validate
from titanlike.config.errors import ConfigError, Problem, override_text
from titanlike.config.parse import convert
from titanlike.config.schema import Config
from titanlike.device import accelerator
from titanlike.device.memory import free_memory, resident_memory
from titanlike.distributed.sharding import StateBytes
from titanlike.driver.job import JobRunner, config_problems
from titanlike.driver.sweep import SweepRun
from titanlike.launch.environment import available_cores
from titanlike.launch.failures import JobFailed
from titanlike.metrics import units
from titanlike.models.registry import build_model, resolve_model
from titanlike.planning.estimate import make_estimate
from titanlike.planning.layouts import Compose, SearchSpace, candidates
from titanlike.training.train_plan import TrainPlan, make_plan


def read_space(plain: Mapping[str, Any]) -> SearchSpace:
    """Read hydra.sweeper's plain values. Raises ConfigError with every mistake."""
    problems: list[Problem] = []
    examples = {"ranks": 8, "most": 24, "microbatches": [4, 8], "stages_per_rank": [2, 4]}
    values: dict[str, Any] = {}
    for name, hint in get_type_hints(SearchSpace).items():
        key, example, before = f"hydra.sweeper.{name}", examples.get(name, MISSING), len(problems)
        value = values[name] = convert(hint, plain[name], key, problems, example)
        numbers = value if isinstance(value, list) else [1 if value is None else value]
        if name in examples and len(problems) == before and min(numbers, default=0) < 1:
            fix = f"{key}={override_text(example)}"
            problems.append(Problem(key, plain[name], "must be at least 1", fix))
    if not problems and not values["schedules"]:
        key = "hydra.sweeper.schedules"
        problems.append(Problem(key, [], "names no schedule", f"{key}=[1f1b,gpipe]"))
    if problems:
        raise ConfigError(problems)
    return SearchSpace(**values)


@dataclass
class SearchResult:
    """The layouts of a search."""

    combinations: list[list[str]] = field(default_factory=list)  # all, in the order of listing
    skipped: dict[tuple[str, ...], str] = field(default_factory=dict)  # of these; the reason
    kinds: Counter[str] = field(default_factory=Counter)  # skipped layouts by kind of reason

    def skip(self, overrides: list[str], kind: str, reason: str) -> None:
        self.skipped[tuple(overrides)] = reason
        self.kinds[kind] += 1

    @property
    def to_run(self) -> int:
        return len(self.combinations) - len(self.skipped)

    def __str__(self) -> str:
        why = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        left = f", {len(self.skipped)} left out ({why}); sweep.csv has the reasons" if why else ""
        plural = "" if len(self.combinations) == 1 else "s"
        return f"{len(self.combinations)} layout{plural}: {self.to_run} to run{left}"


def search(
    sweep: SweepRun,
    runner: JobRunner,
    parsed: Callable[[list[str]], tuple[Config, list[Problem]]],
    combinations: list[list[str]],
    plain: Mapping[str, Any],
) -> SearchResult:
    """List the layouts for each combination of the values that the user varies; skip some.

    plain: hydra.sweeper's keys. Raises ConfigError for an error in every layout, JobFailed where a
    user's function fails.
    """
    space = read_space(plain)

    def compose(overrides: list[str]) -> Config:
        config, problems = parsed(overrides)
        if problems:
            raise ConfigError(problems)
        return config

    try:
        started = runner.ranks.world_size if runner.ranks else None
        on = find_machine(compose(combinations[0]), space.ranks, space.memory, started)
        room = "" if on.memory is None else f", {units.size(on.memory)} free on each"
        sweep.say(f"looking for layouts of {on.ranks} ranks{room}")
        found = filter_layouts(compose, combinations, space, on, runner)
    except JobFailed as failed:
        sweep.say_error(str(failed))
        raise
    for overrides, reason in found.skipped.items() if sweep.check else ():
        sweep.say(f"left out: {sweep.job_name(overrides)}: {reason}")
    sweep.say(str(found))
    if not found.to_run:
        sweep.say_error("no layout can be run; smaller microbatches, other ranks, or another model")
    return found


class _Skipped(Exception):
    """Raised for a layout that is not run, with the kind of reason and the reason."""


def filter_layouts(
    compose: Compose,
    combinations: list[list[str]],
    space: SearchSpace,
    on: Machine,
    runner: JobRunner,
) -> SearchResult:
    """All layouts, and which of them are skipped: quick checks first, those that take a plan last.

    Raises as `search` does.
    """
    found, seen = SearchResult(), set[object]()
    started = runner.ranks.world_size if runner.ranks else None
    ranking: list[tuple[float, int, list[str]]] = []
    counts: dict[str, int] = {}  # parameters of each model

    def least_memory(config: Config) -> int:
        """Bytes that the ranks need on average, by the number of parameters alone: as if Muon
        updated all, if it is the optimizer."""
        model = resolve_model(config)
        if str(model) not in counts:
            counts[str(model)] = sum(p.numel() for p in build_model(model).parameters())
        zero = 3 if config.fsdp.zero == "auto" else config.fsdp.zero
        each = StateBytes.of(config, zero).whole
        return int(counts[str(model)] * each / config.model_ranks)

    def check_memory(needed: int, how: str) -> None:
        if on.memory is not None and needed > on.memory:
            text = f"needs {how} {units.size(needed)} on a rank, of {units.size(on.memory)}"
            raise _Skipped("too large", text)

    def plan_of(config: Config, refused: str) -> TrainPlan:
        if refused:
            raise _Skipped("invalid", refused)
        if config.world_size != on.ranks:
            mesh = " ".join(f"{axis}={size}" for axis, size in config.axes.items())
            reason = f"{mesh} is {config.world_size} ranks, not {on.ranks}"
            raise _Skipped("invalid", f"{reason}; write hydra.sweeper.ranks={config.world_size}")
        if problems := validate.problems(config, started):
            raise _Skipped("invalid", str(problems[0]))
        try:
            check_memory(least_memory(config), "more than")
            return make_plan(config)
        except ConfigError as error:
            raise _Skipped("invalid", str(error.problems[0])) from error

    for combination in combinations:
        checked = False
        machine = on.together or on.ranks
        for candidate in candidates(combination, compose, on.ranks, machine, space):
            config = candidate.config
            try:
                plan = plan_of(config, candidate.refused)
                layout = (*combination, *config.axes.items(), plan.order)
                if layout in seen:
                    continue
                seen.add(layout)
                if not checked:  # once: other problems do not depend on the layout
                    if problems := config_problems(config, started, []):
                        raise ConfigError(problems)
                    checked = True
                expected = make_estimate(config, plan=plan)
                check_memory(expected.fullest, "about")
                ranking.append((expected.step_seconds, plan.microbatches, candidate.overrides))
            except _Skipped as skipped:
                found.skip(candidate.overrides, *skipped.args)
            found.combinations.append(candidate.overrides)
    for _, _, overrides in sorted(ranking)[space.most :]:
        found.skip(overrides, "less promising", f"not among the {space.most} most promising")
    return found


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

    started: ranks that torchrun or srun started, or None. Raises ConfigError for more ranks than
    GPUs.
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
