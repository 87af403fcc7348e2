"""The command line before Hydra runs: what to tell it, and every mistake in it at once.

Hydra stops at the first mistake. Here each override is judged by itself:

1. its syntax, by Hydra's own parser;
2. a group's choice, by the files on the search path (all values of a sweep);
3. a key, by applying it alone to the config that the choices give;
4. then the config that the good ones give is parsed, so that wrong types come out in the same go.

Uses Hydra 1.3's internals (`hydra._internal`), which is why its version is pinned.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titanlike.config.errors import Problem, nearest
from titanlike.config.overrides import to_hydra
from titanlike.config.parse import parse
from titanlike.config.schema import OPEN_GROUPS, VARIANTS, Config

CONFIG_NAME = "config"


@dataclass(frozen=True)
class SweepSettings:
    """What is known of a sweep before Hydra runs."""

    folder: Path  # its directory, absolute
    sweeper: DictConfig  # hydra.sweeper
    given: frozenset[str]  # keys of all overrides
    fixed: frozenset[str]  # keys that are the same in all jobs: not swept over

    @property
    def grid(self) -> bool:
        """Whether all jobs are known from the start."""
        return str(self.sweeper.get("_target_")).startswith("hydra_plugins.titanlike_sweeps.")

    def settings(self, config: Config, value: str, done: int) -> list[str]:
        """Overrides for a search (Optuna's), where the user has not said otherwise.

        It looks for the best `value`, outlives failed jobs, finds the same by the same command, and
        is kept on the disk: run again, it has as many trials left as are not `done`.
        """
        from titanlike.metrics.summary import OBJECTIVES

        wanted = {
            "direction": "maximize" if OBJECTIVES[value] else "minimize",
            "max_failure_rate": "1.0",
            "n_jobs": str(config.sweep.parallel or 1),
            "storage": f"'sqlite:///{self.folder}/optuna.db'",
            "study_name": "sweep",
        }
        if "seed" in (self.sweeper.get("sampler") or {}):
            wanted["sampler.seed"] = str(config.seed + done)
        settings = [
            f"hydra.sweeper.{key}={text}"
            for key, text in wanted.items()
            if key.partition(".")[0] in self.sweeper and f"hydra.sweeper.{key}" not in self.given
        ]
        if done and "n_trials" in self.sweeper:
            settings.append(f"hydra.sweeper.n_trials={max(0, self.sweeper.n_trials - done)}")
        return settings

    def problems(self, value: str, goes_on: bool) -> Iterator[Problem]:
        """What a search is told to do that it cannot."""
        from titanlike.metrics.summary import OBJECTIVES

        best = "maximize" if OBJECTIVES[value] else "minimize"
        said = self.sweeper.get("direction")
        if "hydra.sweeper.direction" in self.given and getattr(said, "name", said) != best:
            reason = f"the best {value} is the {'highest' if OBJECTIVES[value] else 'lowest'} one"
            yield Problem(
                "hydra.sweeper.direction", said, reason, f"hydra.sweeper.direction={best}"
            )
        if goes_on and "hydra.sweeper.storage" in self.given and not self.sweeper.get("storage"):
            reason = "a search that is kept nowhere cannot be gone on with"
            fix = "sweep.resume=false, and another run_dir"
            yield Problem("hydra.sweeper.storage", "null", reason, fix)


@dataclass
class CheckedOverrides:
    """What is known of a command line before Hydra runs."""

    multirun: bool
    problems: list[Problem] = field(default_factory=list)
    config: Config | None = None  # of the overrides that are good; None where nothing composes
    sweep: SweepSettings | None = None  # where multirun

    def add(self, problem: Problem) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def prepare(args: argparse.Namespace, conf: Path, plugin_confs: list[str]) -> None:
    """Fill in what the user need not write: search path, primary config, `+` before a group."""
    extra = list(plugin_confs)
    if args.config_path is None:
        args.config_path = str(conf)
    else:
        args.config_path = str(Path(args.config_path).absolute())
        extra.append(str(conf))
    args.config_name = args.config_name or CONFIG_NAME
    overrides = []
    for text in args.overrides:
        if text.startswith("hydra.searchpath=") and (parsed := _parse_override(text)):
            value = parsed.value()
            extra = [*(value if isinstance(value, list) else [value]), *extra]
        elif text.startswith("+experiment="):
            overrides.append(text[1:])  # it is in the defaults list; both spellings are common
        else:
            overrides.append(to_hydra(text))
    if extra:
        quoted = ",".join(f"'{path}'" for path in extra)
        overrides.append(f"hydra.searchpath=[{quoted}]")
    args.overrides = overrides


def examine(args: argparse.Namespace) -> CheckedOverrides:
    """Find the mistakes in a prepared command line."""
    setup_globals()
    findings = CheckedOverrides(multirun=args.multirun)
    search_path = create_config_search_path(args.config_path)
    if args.config_dir is not None:
        folder = Path(args.config_dir).absolute()
        if not folder.is_dir():
            findings.add(Problem("--config-dir", args.config_dir, "no such folder"))
        anchor = SearchPathQuery(provider="schema")
        search_path.prepend(provider="command-line", path=f"file://{folder}", anchor=anchor)
    loader = ConfigLoaderImpl(search_path)
    overrides = []
    for text in args.overrides:
        parsed = _parse_override(text, loader)
        if parsed is None:
            key, _, value = text.partition("=")
            reason = "not of the form key=value; a value with spaces or , : { } needs quotes"
            findings.add(Problem(key, value, reason, f"\"{key}='{value}'\""))
        else:
            overrides.append(parsed)
    _OverrideChecker(args.config_name, loader, findings).run(overrides)
    return findings


def _parse_override(text: str, loader: ConfigLoaderImpl | None = None) -> Override | None:
    try:  # the plural: it alone lets glob() know the files
        return OverridesParser.create(config_loader=loader).parse_overrides([text])[0]
    except HydraException:
        return None


class _OverrideChecker:
    """Steps 2 to 4 of the module's list."""

    def __init__(
        self, config_name: str, loader: ConfigLoaderImpl, findings: CheckedOverrides
    ) -> None:
        self.config_name, self.loader, self.findings = config_name, loader, findings
        self.fixed: set[str] = set()  # keys of a sweep in a file that have one value

    def run(self, overrides: list[Override]) -> None:
        lines = [o.input_line for o in overrides if o.key_or_group == "hydra.searchpath"]
        try:
            _, self.repository = self.loader._parse_overrides_and_create_caching_repo(
                self.config_name, lines
            )
            self.defaults = self._compose(lines).hydra.runtime.choices
        except (HydraException, OmegaConfBaseException) as error:
            self.findings.add(Problem(f"--config-name {self.config_name}", "", _text(error)))
            return
        self.overrides = overrides
        self.findings.multirun |= self._sweeps_by_file(lines)
        groups, values = [], []
        for override in overrides:
            if override.key_or_group == "hydra.searchpath":
                continue
            if override.is_sweep_override() and not self.findings.multirun:
                self._sweep_without_m(override)
            elif self._is_the_sweeps_own(override, overrides):
                continue
            elif override.is_delete():
                key = override.key_or_group
                self.findings.add(Problem(f"~{key}", "", "nothing can be removed", f"{key}=..."))
            elif self.repository.group_exists(override.key_or_group):
                if self._choice_exists(override):
                    groups.append(override)
            else:
                values.append(override)
        swept = {o.key_or_group for o in (*groups, *values) if o.is_sweep_override()}
        for choices in itertools.product(*(_each(override) for override in groups)):
            try:
                composed = self._compose([*lines, *choices])
            except (HydraException, OmegaConfBaseException) as error:
                self.findings.add(Problem(" ".join(choices) or "config", "", _text(error)))
                continue
            swept |= self._params(composed)
            self._apply(composed, values)
            self._parse(composed, swept)

    def _sweeps_by_file(self, lines: list[str]) -> bool:
        """Whether hydra.mode says that this is a sweep, without -m."""
        said = [o.value() for o in self.overrides if o.key_or_group == "hydra.mode"]
        if said:
            return str(said[-1]) == RunMode.MULTIRUN.name
        choices = [
            str(o.input_line)
            for o in self.overrides
            if self.repository.group_exists(o.key_or_group) and not o.is_sweep_override()
        ]
        try:
            return self._compose([*lines, *choices]).hydra.mode == RunMode.MULTIRUN
        except (HydraException, OmegaConfBaseException, ValueError):
            return False  # is told where the choices are judged

    def _params(self, composed: DictConfig) -> set[str]:
        """Judge the overrides of a sweep that is written in a file; the keys that they vary."""
        swept: set[str] = set()
        if not self.findings.multirun:
            return swept
        values = []
        for key, value in (composed.hydra.sweeper.get("params") or {}).items():
            override = _parse_override(to_hydra(f"{key}={value}"), self.loader)
            if override is None:
                reason = "hydra.sweeper.params is not of the form key: values"
                self.findings.add(Problem(str(key), value, reason, f"{key}: a,b"))
                continue
            if self.repository.group_exists(override.key_or_group):
                self._choice_exists(override)
            else:
                values.append(override)
            if override.is_sweep_override():
                swept.add(override.key_or_group)
            else:
                self.fixed.add(override.key_or_group)
        self._apply(copy.deepcopy(composed), values)
        return swept

    def _compose(self, lines: list[str]) -> DictConfig:
        return self.loader.load_configuration(self.config_name, lines, RunMode.RUN)

    def _sweep_without_m(self, override: Override) -> None:
        key, value = override.key_or_group, override.get_value_string()
        reason = "several values are a sweep, which needs -m"
        self.findings.add(Problem(key, value, reason, f"-m {key}={value} (or {key}=[{value}])"))

    def _is_the_sweeps_own(self, override: Override, overrides: list[Override]) -> bool:
        """Note it where a sweep varies what all its jobs have in common."""
        key = override.key_or_group
        if not (override.is_sweep_override() or key == "hydra.sweep.subdir"):
            return False
        value = override.get_value_string()
        common = key in ("run_dir", "value") or key.startswith(("sweep.", "hydra.", "hydra/"))
        twice = sum(o.key_or_group == key and o.is_sweep_override() for o in overrides) > 1
        if key == "hydra.sweep.subdir" and self.findings.multirun:
            reason, fix = "a sweep's jobs are in folders by their numbers", "run_dir=outputs/NAME"
        elif override.is_sweep_override() and common:
            reason, fix = "is one for the whole sweep", next(iter(_each(override)))
        elif override.is_sweep_override() and twice:
            reason, fix = "the key is given twice", f"{key}={value} alone"
        else:
            return False
        self.findings.add(Problem(key, value, reason, fix))
        return True

    def _choice_exists(self, override: Override) -> bool:
        """Judge a group's choice (each value of a sweep, each entry of a list)."""
        group, findings = override.key_or_group, self.findings
        before = len(findings.problems)
        options = self.repository.get_group_options(group)
        if group not in self.defaults:
            reason = "this config is a finished one (of a run), without choices; set its keys"
            findings.add(Problem(group, override.get_value_string(), reason, f"{group}.name=..."))
        elif override.is_sweep_override() and not override.is_discrete_sweep():
            return False  # an interval: for the sweeper to judge
        else:
            for choice in _values(override):
                if choice is None or self.repository.config_exists(f"{group}/{choice}"):
                    continue
                near = nearest(str(choice), options)
                fix = f"{group}={near}" if near else ""
                leaf = next((key for key in _schema_keys() if key.endswith(f".{group}")), None)
                if leaf and not isinstance(choice, str):  # lr=3e-4
                    fix = f"{leaf}={choice}"
                reason = f"no such choice; choices: {', '.join(sorted(options))}"
                findings.add(Problem(group, choice, reason, fix))
        return len(findings.problems) == before

    def _apply(self, composed: DictConfig, values: list[Override]) -> None:
        """Apply each override by itself, the first value of a sweep."""
        known = list(_flat(composed))
        for override in values:
            single = _parse_override(next(iter(_each(override))))
            assert single is not None, "the parser accepts what it printed"
            try:
                ConfigLoaderImpl._apply_overrides_to_config([single], composed)
            except (HydraException, OmegaConfBaseException) as error:
                self.findings.add(_bad_key(override, composed, known, error))

    def _parse(self, composed: DictConfig, swept: set[str]) -> None:
        HydraConfig.instance().set_config(composed)  # for ${hydra:...} in values
        if self.findings.multirun:
            given = [override.key_or_group for override in self.overrides]
            self.findings.sweep = SweepSettings(
                Path(composed.hydra.sweep.dir).absolute(),
                composed.hydra.sweeper,
                frozenset(given),
                frozenset(self.fixed.union(given) - swept),
            )
            if self.findings.sweep.grid:
                for override in self.overrides:
                    if override.is_interval_sweep():
                        key, value = override.key_or_group, override.get_value_string()
                        reason = "an interval is for a search, or write values: a,b,c"
                        self.findings.add(Problem(key, value, reason, "hydra/sweeper=optuna"))
        task = copy.copy(composed)
        OmegaConf.set_struct(task, False)
        task.pop("hydra")
        try:
            plain = OmegaConf.to_container(task, resolve=True)
        except OmegaConfBaseException as error:
            self.findings.add(Problem(str(error.full_key), "", _text(error)))
            return
        finally:
            HydraConfig.instance().cfg = None
        assert isinstance(plain, dict)
        self.findings.config, problems = parse(plain)
        for problem in problems:
            if problem.key not in swept:
                self.findings.add(problem)


def _bad_key(
    override: Override, composed: DictConfig, known: list[str], error: Exception
) -> Problem:
    """Why Hydra refuses a key, and which one was meant."""
    key = override.key_or_group
    value = "" if override.is_delete() else override.get_value_string()
    if key in known:
        if override.is_add():
            return Problem(f"+{key}", value, "the key is there already", f"{key}={value}")
        return Problem(key, value, _text(error))
    group, _, rest = key.partition(".")
    chosen = OmegaConf.select(composed, f"{group}.name")
    others = [
        name
        for name, variant in VARIANTS.get(group, {}).items()
        if rest in variant.__dataclass_fields__ and name != chosen
    ]
    if others:
        reason = f"{group}={chosen} has no such key; {group}={', '.join(others)} has"
        return Problem(key, value, reason, f"{group}={others[0]} {key}={value}")
    leaves = [name for name in known if name.rpartition(".")[2] == key]
    near = leaves[0] if leaves else nearest(key, known)
    if near is None and rest:
        near = nearest(f"{group}.{rest}", [name for name in known if name.startswith(f"{group}.")])
    reason = "unknown key"
    own = group in OPEN_GROUPS and bool(rest) and "." in str(chosen)
    if own:  # any key may be an argument of it
        inside = [name.partition(".")[2] for name in known if name.startswith(f"{group}.")]
        near = nearest(rest, [name for name in inside if name != "name"])
        near = f"{group}.{near}" if near else None
    if near is None and (own or group == "model"):
        reason, near = f"not among the keys of this {group}'s file", f"+{key}"
    return Problem(key, value, reason, f"{near}={value}" if near else "")


def _values(override: Override) -> list[Any]:
    value = list(override.sweep_iterator()) if override.is_sweep_override() else override.value()
    if not isinstance(value, list):
        return [value]
    return [part for item in value for part in (item if isinstance(item, list) else [item])]


def _each(override: Override) -> Iterator[str]:
    """The override once for each value of its sweep."""
    if not override.is_sweep_override():
        yield str(override.input_line)
    elif override.is_interval_sweep():
        yield f"{override.get_key_element()}={override.value().start}"
    else:
        for value in override.sweep_string_iterator():
            yield f"{override.get_key_element()}={value}"


def _flat(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a config."""
    for name in node:
        yield f"{prefix}{name}"
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _flat(child, f"{prefix}{name}.")


def _schema_keys() -> Iterator[str]:
    for group, variants in VARIANTS.items():
        for variant in variants.values():
            yield from (f"{group}.{name}" for name in variant.__dataclass_fields__)


def _text(error: Exception) -> str:
    """Hydra's message in one line."""
    cause = error.__cause__ if not str(error).strip() and error.__cause__ else error
    return " ".join(str(cause).split())
