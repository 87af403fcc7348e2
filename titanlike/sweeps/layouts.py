"""The throughput search: which layouts a model has on a machine, and which of them are run.

1. `Settings` are the keys of `hydra.sweeper`; without them the machine says how many ranks it has,
   and how much memory each;
2. `candidates` lists the layouts: what the command line fixes stays as it is;
3. `search` leaves out what is invalid, does not fit, or is not promising, before anything starts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, get_type_hints

from titanlike.config import validate
from titanlike.config.errors import ConfigError, Problem
from titanlike.config.parse import convert
from titanlike.config.schema import Config, CsvSchedule, LoopedSchedule
from titanlike.job.run import JobRunner, config_problems
from titanlike.launch.failures import JobFailed
from titanlike.metrics import units
from titanlike.models.registry import build_model, resolve_model
from titanlike.pipeline.from_config import microbatch_problem
from titanlike.pipeline.microbatches import derive_microbatches
from titanlike.pipeline.schedules import SCHEDULES
from titanlike.sweeps.context import Context, key_of
from titanlike.sweeps.estimate import estimate, least_memory
from titanlike.sweeps.machine import Machine, machine
from titanlike.training.draft import draft

_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

Compose = Callable[[list[str]], Config]  # overrides -> config; raises ConfigError


@dataclass(frozen=True)
class Settings:
    """hydra.sweeper's keys; null = by the machine, or by what is usual."""

    ranks: int | None = None  # None: GPUs, or cores of the CPU, that may be used
    schedules: list[str] = field(default_factory=lambda: list(SCHEDULES))
    microbatches: list[int] | None = None  # None: see `_microbatches`
    stages_per_rank: list[int] = field(default_factory=lambda: [2])
    memory: str | None = None  # of a rank, "80GiB"; None: what is free
    most: int = 24  # layouts that are run

    @property
    def bytes(self) -> int | None:
        """`memory` in bytes. Raises ValueError where it is no size."""
        if self.memory is None:
            return None
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", self.memory, re.I)
        if found is None:
            raise ValueError(f"{self.memory!r} is no size")
        return int(float(found[1]) * _SIZES[found[2].upper()])


def read_settings(plain: Mapping[str, Any]) -> Settings:
    """From hydra.sweeper's plain values. Raises ConfigError with every mistake."""
    problems: list[Problem] = []
    texts = {**plain, "memory": None if plain["memory"] is None else str(plain["memory"])}
    hints = get_type_hints(Settings)
    names = [one.name for one in fields(Settings)]
    values = {
        name: convert(hints[name], texts[name], f"hydra.sweeper.{name}", problems) for name in names
    }
    examples = {"ranks": "8", "most": "24", "microbatches": "[4,8]", "stages_per_rank": "[2,4]"}
    for name, example in examples.items() if not problems else ():
        numbers = values[name] if isinstance(values[name], list) else [values[name] or 1]
        if plain[name] is not None and (plain[name] == 0 or min(numbers, default=0) < 1):
            key = f"hydra.sweeper.{name}"
            problems.append(Problem(key, plain[name], "must be at least 1", f"{key}={example}"))
    if not problems and not values["schedules"]:
        key = "hydra.sweeper.schedules"
        problems.append(Problem(key, [], "names no schedule", f"{key}=[1f1b,gpipe]"))
    if problems:
        raise ConfigError(problems)
    try:
        _ = Settings(**values).bytes
    except ValueError:
        key = "hydra.sweeper.memory"
        raise ConfigError([Problem(key, values["memory"], "is no size", f"{key}=80GiB")]) from None
    return Settings(**values)


# --- candidates --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A layout: a job's overrides, and the config that they give."""

    overrides: list[str]
    config: Config


def candidates(
    combination: list[str], compose: Compose, ranks: int, settings: Settings
) -> Iterator[Candidate]:
    """Every layout of so many ranks that agrees with the overrides of `combination`.

    Without a pipeline there is one schedule, 1f1b, whose microbatches are gradient accumulation.
    What the command line gives is taken as it is, also where it cannot work: a check says why.
    Raises ConfigError where the overrides alone are wrong.
    """
    given = {key_of(text) for text in combination}
    base = compose(combination)
    composed = cache(lambda name: compose([*combination, f"schedule={name}"]))
    own_schedule = bool(given & {"schedule", "schedule.name"})
    for pp, dp in _meshes(base, given, ranks):
        mesh = [f"{key}={size}" for key, size in (("pp", pp), ("dp", dp)) if key not in given]
        names = [None] if own_schedule else ["1f1b"] if pp == 1 else settings.schedules
        for name in dict.fromkeys(names):
            config = replace(base if name is None else composed(name), pp=pp, dp=dp)
            words = [*combination, *mesh, *([] if name is None else [f"schedule={name}"])]
            for schedule, more in _schedules(config, given, settings):
                yield Candidate([*words, *more], replace(config, schedule=schedule))


def _meshes(base: Config, given: Collection[str], ranks: int) -> list[tuple[int, int]]:
    """(pp, dp) with pp * dp = ranks, as far as they are not given."""
    match "pp" in given, "dp" in given:
        case True, True:
            return [(base.pp, base.dp)]
        case True, False:
            return [(base.pp, max(1, ranks // max(1, base.pp)))]
        case False, True:
            return [(max(1, ranks // max(1, base.dp)), base.dp)]
    return [(pp, ranks // pp) for pp in range(1, ranks + 1) if ranks % pp == 0]


def _schedules(
    config: Config, given: Collection[str], settings: Settings
) -> Iterator[tuple[Any, list[str]]]:
    """The config's schedule with each number of stages and microbatches, as overrides, too."""
    schedules = [(config.schedule, list[str]())]
    if isinstance(config.schedule, LoopedSchedule) and "schedule.stages_per_rank" not in given:
        schedules = [
            (replace(config.schedule, stages_per_rank=n), [f"schedule.stages_per_rank={n}"])
            for n in dict.fromkeys(settings.stages_per_rank)
        ]
    for schedule, words in schedules:
        counts = None
        if not isinstance(schedule, CsvSchedule) and "schedule.microbatches" not in given:
            counts = _microbatches(replace(config, schedule=schedule), settings)
        if not counts:
            yield schedule, words
        for count in counts or []:
            if hasattr(schedule, "microbatches"):
                changed = replace(schedule, microbatches=count)
            else:  # a function of the user's
                changed = replace(schedule, args={**schedule.args, "microbatches": count})
            yield changed, [*words, f"schedule.microbatches={count}"]


def _microbatches(config: Config, settings: Settings) -> list[int]:
    """Numbers of microbatches worth a try: those asked for, or what a run derives, 1, 2 and 4
    a pipeline rank, and microbatches of one sequence, which take the least memory.

    Only those that divide a dp rank's batch and that the schedule can run.
    """
    batch, schedule, pp = config.batch_size // config.dp, config.schedule, config.pp
    if batch < 1 or config.batch_size % config.dp:
        return []
    wanted = settings.microbatches
    if wanted is None:
        wanted = [pp, 2 * pp, 4 * pp, batch]
        try:
            wanted.append(derive_microbatches(schedule, pp, batch)[0])
        except ValueError:
            return []  # the check will say why
    return sorted(
        n for n in set(wanted) if batch % n == 0 and microbatch_problem(schedule, pp, n) is None
    )


# --- which of them -----------------------------------------------------------------------------

INVALID, TOO_LARGE, UNPROMISING = "invalid", "too large", "less promising"


@dataclass
class Found:
    """What a search is going to run."""

    combinations: list[list[str]] = field(default_factory=list)  # all, in the order of listing
    left_out: dict[tuple[str, ...], str] = field(default_factory=dict)  # of these: why
    kinds: Counter[str] = field(default_factory=Counter)  # how many for which kind of reason

    def leave_out(self, overrides: list[str], kind: str, reason: str) -> None:
        self.left_out[tuple(overrides)] = reason
        self.kinds[kind] += 1

    @property
    def to_run(self) -> int:
        return len(self.combinations) - len(self.left_out)

    def __str__(self) -> str:
        why = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        left = f", {len(self.left_out)} left out ({why}); sweep.csv has the reasons" if why else ""
        return f"{_count(len(self.combinations))}: {self.to_run} to run{left}"


def search(
    context: Context,
    runner: JobRunner,
    parsed: Callable[[list[str]], tuple[Config, list[Problem]]],
    combinations: list[list[str]],
    plain: Mapping[str, Any],
) -> Found:
    """List the layouts for each combination of what the user varies, and judge them.

    plain: hydra.sweeper's keys. Raises ConfigError for a mistake that no layout mends, and
    JobFailed where a function of the user's own fails, or no layout is left.
    """
    settings = read_settings(plain)

    def compose(overrides: list[str]) -> Config:
        config, problems = parsed(overrides)
        if problems:
            raise ConfigError(problems)
        return config

    try:
        on = machine(compose(combinations[0]), settings.ranks, settings.bytes, runner)
        room = "" if on.memory is None else f", {units.size(on.memory)} free on each"
        context.say(f"looking for layouts of {on.ranks} ranks{room}")
        found = judged(compose, combinations, settings, on, runner)
    except JobFailed as failed:
        context.complain(str(failed))
        raise
    for overrides, reason in found.left_out.items() if context.check else ():
        context.say(f"left out: {context.name_of(overrides)}: {reason}")
    context.say(str(found))
    if not found.to_run:
        context.complain(
            "no layout can be run; smaller microbatches, other ranks, or another model"
        )
    return found


def judged(
    compose: Compose,
    combinations: list[list[str]],
    settings: Settings,
    on: Machine,
    runner: JobRunner,
) -> Found:
    """Every layout, and which of them are left out. Raises as `search` does."""
    found, judge = Found(), _Judge(on, runner)
    promise: list[tuple[float, int, list[str]]] = []
    for combination in combinations:
        for candidate in candidates(combination, compose, on.ranks, settings):
            try:
                result = judge(candidate, tuple(combination))
            except _LeftOut as why:
                found.combinations.append(candidate.overrides)
                found.leave_out(candidate.overrides, why.kind, why.reason)
                continue
            if result is not None:
                found.combinations.append(candidate.overrides)
                promise.append((*result, candidate.overrides))
    for _, _, overrides in sorted(promise)[settings.most :]:
        found.leave_out(overrides, UNPROMISING, f"not among the {settings.most} most promising")
    return found


class _LeftOut(Exception):
    """A layout that is not run."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


class _Judge:
    """Says what a layout promises, from what is quick to find out to what takes a draft."""

    def __init__(self, on: Machine, runner: JobRunner) -> None:
        self._on, self._runner = on, runner
        self._started = runner.ranks.world_size if runner.ranks else None
        self._parameters: dict[str, int] = {}  # by model
        self._seen: set[object] = set()
        self._trusted: set[object] = set()

    def __call__(self, candidate: Candidate, others: tuple[str, ...]) -> tuple[float, int] | None:
        """(time of a step, microbatches), the less the better; None = as one before in other words.

        others: the overrides that are the same for many layouts. Raises _LeftOut.
        """
        config, ranks = candidate.config, self._on.ranks
        if config.world_size != ranks:
            reason = f"pp={config.pp} dp={config.dp} is {config.world_size} ranks, not {ranks}"
            raise _LeftOut(INVALID, f"{reason}; write hydra.sweeper.ranks={config.world_size}")
        if problems := validate.problems(config, self._started):
            raise _LeftOut(INVALID, str(problems[0]))
        try:
            self._fits(self._least(config), "more than")
            drafted = draft(config)
        except ConfigError as error:
            raise _LeftOut(INVALID, str(error.problems[0])) from error
        layout = (others, config.dp, drafted.order)
        if layout in self._seen:
            return None
        self._seen.add(layout)
        if others not in self._trusted:  # once: what is still wrong is of no layout
            if problems := config_problems(config, self._started, []):
                raise ConfigError(problems)
            self._trusted.add(others)
        expected = estimate(config, drafted)
        self._fits(expected.memory, "about")
        return expected.time, drafted.microbatches

    def _least(self, config: Config) -> int:
        model = resolve_model(config)
        if str(model) not in self._parameters:
            parameters = build_model(model).parameters()
            self._parameters[str(model)] = sum(parameter.numel() for parameter in parameters)
        return least_memory(config, self._parameters[str(model)])

    def _fits(self, needed: int, how: str) -> None:
        """Raises _LeftOut where a rank has less memory."""
        if self._on.memory is not None and needed > self._on.memory:
            sizes = f"{units.size(needed)} on a rank, of {units.size(self._on.memory)}"
            raise _LeftOut(TOO_LARGE, f"needs {how} {sizes}")


def _count(number: int) -> str:
    return "1 layout" if number == 1 else f"{number} layouts"
