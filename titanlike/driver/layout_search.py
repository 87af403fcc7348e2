"""The throughput search: which layouts of a model are run on a machine.

1. `read_space` reads the keys of `hydra.sweeper`;
2. `find_machine` says how many ranks there are and how much memory each has, where those do not;
3. `candidates` lists the layouts: what the command line fixes stays as it is;
4. `filter_layouts` skips those that are invalid, do not fit, or are not promising.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from functools import partial
from typing import Any, get_type_hints

from titanlike.config import validate
from titanlike.config.errors import ConfigError, Problem, override_text
from titanlike.config.parse import convert
from titanlike.config.schema import Config
from titanlike.costs.estimate import estimate
from titanlike.costs.layouts import (
    Candidate,
    Compose,
    Machine,
    SearchSpace,
    candidates,
    find_machine,
    least_memory,
    tensor_sizes,
)
from titanlike.driver.job import JobRunner, config_problems
from titanlike.driver.sweep import SweepRun
from titanlike.launch.failures import JobFailed
from titanlike.metrics import units
from titanlike.models.registry import build_model, resolve_model
from titanlike.training.draft import draft

INVALID, TOO_LARGE, UNPROMISING = "invalid", "too large", "less promising"


def read_space(plain: Mapping[str, Any]) -> SearchSpace:
    """From hydra.sweeper's plain values. Raises ConfigError with every mistake."""
    problems: list[Problem] = []
    examples = {"ranks": 8, "most": 24, "microbatches": [4, 8], "stages_per_rank": [2, 4]}
    values = {
        name: convert(
            hint, plain[name], f"hydra.sweeper.{name}", problems, examples.get(name, MISSING)
        )
        for name, hint in get_type_hints(SearchSpace).items()
    }
    for name, example in examples.items() if not problems else ():
        numbers = values[name] if isinstance(values[name], list) else [values[name] or 1]
        if plain[name] is not None and (plain[name] == 0 or min(numbers, default=0) < 1):
            key = f"hydra.sweeper.{name}"
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


def filter_layouts(
    compose: Compose,
    combinations: list[list[str]],
    space: SearchSpace,
    on: Machine,
    runner: JobRunner,
) -> SearchResult:
    """All layouts, and which of them are skipped. Raises as `search` does."""
    found, layout_filter = SearchResult(), _LayoutFilter(on, runner)
    ranking: list[tuple[float, int, list[str]]] = []
    sizes = partial(tensor_sizes, ranks=on.ranks, machine=on.together or on.ranks)
    for combination in combinations:
        for candidate in candidates(combination, compose, on.ranks, space, sizes):
            try:
                result = layout_filter(candidate, tuple(combination))
            except _Skipped as skipped:
                found.skip(candidate.overrides, *skipped.args)
                found.combinations.append(candidate.overrides)
                continue
            if result is not None:
                found.combinations.append(candidate.overrides)
                ranking.append((*result, candidate.overrides))
    for _, _, overrides in sorted(ranking)[space.most :]:
        found.skip(overrides, UNPROMISING, f"not among the {space.most} most promising")
    return found


class _Skipped(Exception):
    """Raised for a layout that is not run, with the kind of reason and the reason."""


class _LayoutFilter:
    """Estimates a layout, or skips it: quick checks first, those that take a draft last."""

    def __init__(self, on: Machine, runner: JobRunner) -> None:
        self._on, self._runner = on, runner
        self._started = runner.ranks.world_size if runner.ranks else None
        self._parameters: dict[str, int] = {}  # by model
        self._seen: set[object] = set()
        self._checked: set[object] = set()

    def __call__(self, candidate: Candidate, others: tuple[str, ...]) -> tuple[float, int] | None:
        """(time of a step, microbatches), to be minimized; None for a layout seen before.

        others: the overrides besides the layout. Raises _Skipped.
        """
        config, ranks = candidate.config, self._on.ranks
        if candidate.refused:
            raise _Skipped(INVALID, candidate.refused)
        if config.world_size != ranks:
            mesh = f"pp={config.pp} dp={config.dp}" + (f" tp={config.tp}" if config.tp > 1 else "")
            reason = f"{mesh} is {config.world_size} ranks, not {ranks}"
            raise _Skipped(INVALID, f"{reason}; write hydra.sweeper.ranks={config.world_size}")
        if problems := validate.problems(config, self._started):
            raise _Skipped(INVALID, str(problems[0]))
        try:
            self._check_memory(self._least_memory(config), "more than")
            drafted = draft(config)
        except ConfigError as error:
            raise _Skipped(INVALID, str(error.problems[0])) from error
        layout = (others, config.dp, config.tp, drafted.order)
        if layout in self._seen:
            return None
        self._seen.add(layout)
        if others not in self._checked:  # once: other problems do not depend on the layout
            if problems := config_problems(config, self._started, []):
                raise ConfigError(problems)
            self._checked.add(others)
        expected = estimate(config, drafted)
        self._check_memory(expected.fullest, "about")
        return expected.step_seconds, drafted.microbatches

    def _least_memory(self, config: Config) -> int:
        model = resolve_model(config)
        if str(model) not in self._parameters:
            parameters = build_model(model).parameters()
            self._parameters[str(model)] = sum(parameter.numel() for parameter in parameters)
        return least_memory(config, self._parameters[str(model)])

    def _check_memory(self, needed: int, how: str) -> None:
        """Raises _Skipped where a rank has less memory."""
        if self._on.memory is not None and needed > self._on.memory:
            sizes = f"{units.size(needed)} on a rank, of {units.size(self._on.memory)}"
            raise _Skipped(TOO_LARGE, f"needs {how} {sizes}")
