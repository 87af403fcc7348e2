"""Checks a completed command line and reports all errors at once; Hydra itself stops at the first.

Each override is checked separately:
1. its syntax, by Hydra's parser;
2. a group's choice, against the files on the search path (all values of a sweep);
3. a key, by applying it alone to the config composed of the valid choices;
4. then the config composed of all valid overrides is parsed, for wrong types.
Uses Hydra 1.3's internals (`hydra._internal`), which is why its version is pinned.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from titanlike.core.config.errors import Problem, Refused, as_override, override_text, some_names
from titanlike.core.config.imports import outside
from titanlike.core.config.overrides import ADDED, from_hydra, key_of, to_hydra
from titanlike.core.config.parse import parse
from titanlike.core.config.program import conf_dir
from titanlike.core.config.schema import OPEN_GROUPS, VARIANTS, Config
from titanlike.core.config.yaml_files import aliases_problem
from titanlike.run.argv import ConfigFiles, InvalidOverride, flat_keys, one_line, parse_override

if TYPE_CHECKING:
    from titanlike.run.override_errors import Advice
    from titanlike.run.sweep import SweepRun

_LEAVE_OUT = "leave it out"  # the fix if no override works
_RAISED = "KeyError raised while resolving interpolation: "


def check_overrides(args: argparse.Namespace) -> CheckedOverrides:
    """Check arguments that `complete_args` has completed."""
    checked = CheckedOverrides(args)
    if problem := _config_path_problem(Path(args.config_path), args.config_name):
        checked.add(problem)
        return checked
    if args.config_dir is not None and not Path(args.config_dir).is_dir():
        checked.add(Problem("--config-dir", args.config_dir, "no such folder"))
    checked.check(config_loader(args), args.overrides, args.invalid_overrides)
    return checked


def config_loader(args: argparse.Namespace) -> ConfigLoaderImpl:
    """Return Hydra's loader of the files that a command line finds, with the schema's defaults."""
    setup_globals()
    search_path = create_config_search_path(args.config_path)
    if args.config_dir is not None:
        path = f"file://{Path(args.config_dir).absolute()}"
        anchor = SearchPathQuery(provider="schema")
        search_path.prepend(provider="command-line", path=path, anchor=anchor)
    loader = ConfigLoaderImpl(search_path)
    chosen = {key_of(o) for o in args.overrides if not o.endswith("=own")}
    loader.repository = ConfigFiles(search_path, chosen)
    return loader


def _config_path_problem(path: Path, name: str) -> Problem | None:
    """Return why --config-path cannot be read; Hydra's own message is its whole search path."""
    file = f"{name}.yaml"
    if not path.exists():
        reason = "no such folder"
    elif not path.is_dir():
        reason = "is a file; its folder is what is given"
    elif name == "config" and not (path / file).exists():
        reason = f"no {file} is in it: it is the folder of a run, or a copy of conf/"
    elif path == conf_dir() or not (reason := aliases_problem(path / file)):
        return None
    parent = next((parent for parent in path.parents if (parent / file).is_file()), None)
    fix = f"give --config-path {shlex.quote(str(parent))}" if parent else ""
    return Problem(f"--config-path {shlex.quote(str(path))}", "", reason, fix)


class CheckedOverrides:
    """A command line's config, and its errors."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.multirun: bool = args.multirun
        self.problems: list[Problem] = []
        self.config: Config | None = None  # from the valid overrides; None if nothing composes
        self.composed: DictConfig | None = None  # Hydra's composition, with the `hydra` section
        self.loader: ConfigLoaderImpl | None = None
        self.sweep: SweepRun | None = None  # if multirun
        # value of an environment variable in ${oc.env:NAME} -> its name
        self.environment = environment(" ".join(args.overrides))
        self.new_folder: Path | None = None  # named by time: no other launch may write there
        # printed before anything starts: a moved run, foreign imports, entries that stay
        self.notes: list[str] = [*args.notes]
        self._config_name: str = args.config_name
        self._compositions: dict[tuple[str, ...], DictConfig] = {}  # by groups' choices
        self._choices: tuple[str, ...] = ()  # the groups' choices in self._valid
        self._valid = DictConfig({})  # composed of the overrides found valid so far
        self._values: list[Override] = []  # the key overrides in self._valid

    def add(self, problem: Problem) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def check(
        self, loader: ConfigLoaderImpl, texts: list[str], invalid: list[InvalidOverride]
    ) -> None:
        """Run steps 1 to 4 of the module's list.

        Hydra raises exceptions of any class for invalid input: all of them are the user's errors.
        """
        self.loader = self._loader = loader
        parsed = [(text, parse_override(text, loader)) for text in texts]
        typed = [override for _, override in parsed if override is not None]
        self._overrides = [o for o in typed if o.key_or_group != "hydra.searchpath"]
        self._lines = [o.input_line or "" for o in typed if o.key_or_group == "hydra.searchpath"]
        try:
            parse_lines = loader._parse_overrides_and_create_caching_repo
            _, self._repository = parse_lines(self._config_name, self._lines)
            self._valid = self._compose_first()
            self._default_choices = self._valid.hydra.runtime.choices
        except Refused as error:
            return self.add(error.problem)
        except Exception as error:
            return self.add(Problem(f"--config-name {self._config_name}", "", one_line(error)))
        # hydra.mode=MULTIRUN is a sweep without -m
        modes = [o.value() for o in self._overrides if o.key_or_group == "hydra.mode"]
        mode = str(modes[-1]) if modes else getattr(self._valid.hydra.mode, "name", "")
        self.multirun |= mode == RunMode.MULTIRUN.name
        if self.multirun:
            self._overrides[:0] = self._in_file()
        groups, values = self._split_by_kind()
        for choices in itertools.product(*map(single_overrides, groups)):
            try:
                composed = copy.deepcopy(self._compose([*self._lines, *choices]))
            except Refused as error:
                self.add(error.problem)
                continue
            except Exception as error:
                self.add(Problem(" ".join(choices) or "config", "", one_line(error)))
                continue
            self._choices, self._valid = choices, composed
            self._apply(composed, values)
            if not self.multirun:
                self._complete(composed, typed)
            HydraConfig.instance().set_config(composed)  # resolves ${hydra:...} in values
            try:
                self._parse(composed)
            finally:
                HydraConfig.instance().cfg = None
                OmegaConf.set_readonly(composed.hydra, False)
        for text, override in parsed:
            if override is None:
                self.add(self._advice().syntax_error(text))
        for words in invalid:
            self.add(self._advice().invalid_override(words))

    def _compose_first(self) -> DictConfig:
        """Compose with the given choices, which are usually valid, else with none of them."""
        groups = [o for o in self._overrides if self._repository.group_exists(o.key_or_group)]
        single = [o for o in groups if not o.is_sweep_override()]
        choices = tuple(str(o.input_line) for o in single)
        # only bare defaults show whether a group may be added: of several, Hydra keeps none
        if not any(o.is_add() or isinstance(o.value(), list) for o in single):
            with contextlib.suppress(Exception):  # reported when the choices are checked
                composed = self._compose([*self._lines, *choices])
                self._choices = choices
                return composed
        return self._compose(self._lines)

    def _compose(self, lines: list[str]) -> DictConfig:
        """Compose, cached by choices; copy the result before changing it."""
        known = self._compositions.get(key := tuple(lines))
        if known is None:
            known = self._loader.load_configuration(self._config_name, lines, RunMode.RUN)
            self._compositions[key] = known
        return known

    def _in_file(self) -> Iterator[Override]:
        """Yield the overrides in hydra.sweeper.params: a sweep defined in a file."""
        for key, value in (self._valid.hydra.sweeper.get("params") or {}).items():
            override = parse_override(to_hydra(f"{key}={value}"), self._loader)
            if override is not None:
                yield override
            else:
                reason = "hydra.sweeper.params is not of the form key: values"
                self.add(Problem(str(key), value, reason, f"{key}: a,b"))

    def _split_by_kind(self) -> tuple[list[Override], list[Override]]:
        """Return the valid overrides that choose a group's file, and those that set a key, but for
        those of a group whose choice is wrong: its keys are not known."""
        groups, values, wrong = [], [], set()
        for override in self._overrides:
            if override.is_sweep_override() and not self.multirun:
                self.add(self._advice().values_without_m(override))
            elif problem := self._sweep_problem(override):
                self.add(problem)
            elif override.is_delete():
                self.add(self._advice().removed(override.key_or_group))
            elif not self._repository.group_exists(override.key_or_group):
                values.append(override)
            elif self._choice_exists(override):
                groups.append(override)
            elif not override.is_sweep_override():  # else its other choices tell
                wrong.add(override.key_or_group)
        return groups, [v for v in values if v.key_or_group.partition(".")[0] not in wrong]

    def _sweep_problem(self, override: Override) -> Problem | None:
        """Return why a sweep cannot have this override, if so."""
        key, swept = override.key_or_group, override.is_sweep_override()
        if key == "hydra.sweep.subdir" and self.multirun:
            reason, fix = "a sweep's jobs are in folders by their numbers", "run_dir=outputs/NAME"
        elif not swept:
            return None
        elif key in ("run_dir", "value") or key.startswith(("sweep.", "hydra.", "hydra/")):
            reason, fix = "is common to all jobs of a sweep", next(single_overrides(override))
        elif sum(o.key_or_group == key and o.is_sweep_override() for o in self._overrides) > 1:
            reason, fix = "the key is given twice", f"{from_hydra(str(override.input_line))} alone"
        else:
            return None
        return Problem(key, override.get_value_string(), reason, fix)

    def _choice_exists(self, override: Override) -> bool:
        """Check a group's choice: each value of a sweep, each entry of a list."""
        group = override.key_or_group
        if group not in self._default_choices:
            reason = "this is the complete config of a run" if group else "no such key"
            fix = "leave it out, and set its keys"
            self.add(Problem(group, override.get_value_string(), reason, fix))
            return False
        if override.is_sweep_override() and not override.is_discrete_sweep():
            return False  # an interval: the sweeper checks it
        value: Any = override.value()
        several = not override.is_sweep_override() and isinstance(value, list)
        if several and group in (*VARIANTS, *OPEN_GROUPS):
            self.add(self._advice().one_choice(group, value))
            return False
        unknown = [choice for choice in values_of(override) if not self._exists(group, choice)]
        options = self._repository.get_group_options(group)
        wrong = [self._advice().wrong_choice(group, c, options) for c in unknown]
        if override.is_choice_sweep():  # the fix keeps the other values
            first = {str(p.value): p.fix.partition(" or ")[0] for p in wrong}
            right = {value: fix.removeprefix(f"{group}=") for value, fix in first.items()}
            values = [right.get(str(value), str(value)) for value in values_of(override)]
            fix = f"{group}={','.join(dict.fromkeys(values))}"
            wrong = [replace(p, fix=fix) if p.fix.startswith(f"{group}=") else p for p in wrong]
        for problem in wrong:
            self.add(problem)
        return not unknown

    def _exists(self, group: str, choice: Any) -> bool:
        known = isinstance(choice, (str, int, float)) and str(choice).strip()
        return bool(known) and self._repository.config_exists(f"{group}/{choice}")

    def _advice(self) -> Advice:
        from titanlike.run.override_errors import Advice

        groups = (*VARIANTS, *OPEN_GROUPS, "experiment")
        choices = {group: self._repository.get_group_options(group) for group in groups}
        in_files = self._compose([*self._lines, *self._choices])
        swept = {o.key_or_group: values_of(o) for o in self._overrides if o.is_choice_sweep()}
        return Advice(self._valid, in_files, swept, choices)

    def _apply(self, composed: DictConfig, values: list[Override]) -> None:
        """Apply each override separately, with the first value of a sweep."""
        rejected: list[tuple[Override, Exception | None]] = []
        self._values = []
        for override in values:
            single = parse_override(next(single_overrides(override)))  # a sweep's first value
            assert single is not None, "the parser accepts what it printed"
            if not may_set(single, composed):
                rejected.append((override, None))
                continue
            self.notes += [n for n in mapping_kept(single, composed) if n not in self.notes]
            try:
                ConfigLoaderImpl._apply_overrides_to_config([single], composed)
                self._values.append(single)
            except Exception as error:
                rejected.append((override, error))
        for override, error in rejected:
            self.add(self._advice().rejected_key(override, error))

    def _complete(self, composed: DictConfig, typed: list[Override]) -> None:
        """Fill Hydra's section as Hydra does when it applies all overrides at once."""
        hydra, job = composed.hydra, composed.hydra.job
        task = [o for o in typed if not o.is_hydra_override()]
        hydra.overrides.task = [o.input_line for o in task]
        hydra.overrides.hydra = [o.input_line for o in typed if o.is_hydra_override()]
        with open_dict(hydra):
            for name in job.env_copy:
                if name in os.environ:
                    job.env_set[name] = os.environ[name]
                else:
                    self.add(Problem("hydra.job.env_copy", name, "no such environment variable"))
        job.override_dirname = get_overrides_dirname(task, **job.config.override_dirname)

    def _parse(self, composed: DictConfig) -> None:
        kind = "sweep" if self.multirun else "run"
        unresolved = OmegaConf.to_container(composed)
        assert isinstance(unresolved, dict)
        self.environment |= environment(str(unresolved))
        if not isinstance(folder := unresolved["run_dir"], (str, int, float)):
            self.add(Problem("run_dir", folder, "must be a folder", "run_dir=outputs/NAME"))
            return
        self._resolve(composed)
        try:
            plain, config, problems = parsed(composed)
            folder = Path(composed.hydra[kind].dir)
        except Exception as error:
            key = getattr(error, "full_key", None)
            self.add(Problem(str(key or "config"), "", one_line(error)))
            return
        swept = {o.key_or_group for o in self._overrides if o.is_sweep_override()}
        if self.multirun:
            from titanlike.run.sweep import SweepRun

            given = frozenset(override.key_or_group for override in self._overrides)
            sweeper = str(composed.hydra.sweeper.get("_target_"))
            grid = sweeper.startswith("hydra_plugins.titanlike_sweeps.")
            self.sweep = SweepRun(folder.absolute(), given - swept, grid)
            for override in self._overrides if self.sweep.grid else ():
                if override.is_interval_sweep():
                    key, value = override.key_or_group, override.get_value_string()
                    reason = "an interval is for a search, or write values: a,b,c"
                    self.add(Problem(key, value, reason, "hydra/sweeper=optuna"))
        hydra, run_dir = unresolved["hydra"], str(unresolved["run_dir"])
        if re.search(r"\$\{now:[^}]*%S", hydra[kind]["dir"].replace("${run_dir}", run_dir)):
            self.new_folder = folder
        self.notes += [line for line in outside(plain, hydra) if line not in self.notes]
        self.config, self.composed = config, composed
        for problem in problems:
            if problem.key not in swept:
                self.add(self.with_fix(problem))

    def _resolve(self, composed: DictConfig) -> None:
        """Report each override whose interpolations cannot be resolved, and restore the files'
        value, so that further errors are found."""
        wrong: list[tuple[Override, str]] = []
        for override in self._values:
            try:
                value = OmegaConf.select(composed, override.key_or_group, throw_on_missing=False)
                if OmegaConf.is_config(value) and not override.is_hydra_override():
                    OmegaConf.to_container(value, resolve=True)
            except OmegaConfBaseException as error:
                reason = one_line(error).removeprefix(_RAISED).strip('"')
                wrong.append((override, reason))
        for override, reason in wrong:
            key, advice = override.key_or_group, self._advice()
            OmegaConf.set_readonly(composed.hydra, False)
            OmegaConf.update(composed, key, advice.in_file(key), force_add=True)
            fix = advice.default(key) or _LEAVE_OUT
            self.add(Problem(key, override.get_value_string(), reason, fix))

    def with_fix(self, problem: Problem) -> Problem:
        """Return the problem with its own fix, else the equivalent of another framework's key, else
        the value in the files."""
        advice, fix = self._advice(), problem.fix
        if not fix and "." not in problem.key:  # fsdp=true
            fix, _ = advice.translated(problem.key, override_text(problem.value))
        fix = fix or advice.default(problem.key.partition("[")[0])
        same = fix == as_override(problem.key, problem.value)
        return replace(problem, fix=_LEAVE_OUT if same or not fix else fix)


def environment(text: str) -> dict[str, str]:
    """Map the values of environment variables that a text interpolates to their names."""
    names = re.findall(r"oc\.env:[\s'\"\\]*(\w+)", text)
    return {os.environ[name]: f"${{oc.env:{name}}}" for name in names if os.environ.get(name)}


def may_set(override: Override, composed: DictConfig) -> bool:
    """Return whether a key can be set: keys in no file are arguments of user code, or Hydra's."""
    key = override.key_or_group
    group, _, rest = key.partition(".")
    if group == "hydra":  # Hydra and this program rely on the keys below it
        node = _node(composed, key)
        return not isinstance(node, DictConfig) or isinstance(override.value(), dict)
    holder = _node(composed, key.rpartition(".")[0])
    if holder is not None and not OmegaConf.is_config(holder):
        return False  # Hydra would replace a value by a mapping
    if not override.is_add() and override.type is not OverrideType.FORCE_ADD:
        return True
    name = str(OmegaConf.select(composed, f"{group}.name", throw_on_missing=False))
    own = "." in name or name == "None"  # ??? reads as None, and is reported when parsed
    named = key in flat_keys(composed) and not override.is_add()
    return named or f"{key}=".startswith(ADDED) or (group in OPEN_GROUPS and bool(rest) and own)


def mapping_kept(override: Override, composed: DictConfig) -> Iterator[str]:
    """Yield a line if the override gives a mapping and entries that it does not name stay."""
    key, value = override.key_or_group, override.value()
    node = _node(composed, key)
    if not isinstance(value, dict) or not isinstance(node, DictConfig) or key.startswith("hydra"):
        return
    if inherited := [str(name) for name in node if name not in value]:
        names = some_names(inherited, 4)
        yield f"{key}: what is given is merged into the file's {len(node)}; of these stay: {names}"


def _node(composed: DictConfig, key: str) -> Any:
    """Return a key's value; None if there is no such key or the value is missing."""
    try:
        return OmegaConf.select(composed, key, throw_on_missing=False) if key else None
    except OmegaConfBaseException:
        return None


def parsed(composed: DictConfig) -> tuple[dict[str, Any], Config, list[Problem]]:
    """Return the config without Hydra's section as plain data, parsed, and its problems.

    Text produced by an interpolation is read as if typed: ${seed}e-4 is a number, unless the key
    takes text. Raises what OmegaConf's resolvers raise.
    """
    task = copy.copy(composed)
    OmegaConf.set_struct(task, False)
    task.pop("hydra", None)
    written, resolved = OmegaConf.to_container(task), OmegaConf.to_container(task, resolve=True)
    texts: set[str] = set()
    while True:
        changed: set[str] = set()
        plain = _typed(written, resolved, texts, changed)
        config, problems = parse(plain)
        if not (refused := changed & {problem.key for problem in problems}):
            break
        texts |= refused
    return plain, config, problems


def _typed(written: Any, value: Any, texts: set[str], changed: set[str], key: str = "") -> Any:
    """Convert a config value as if it had been typed.

    written: the value with its interpolations. texts: keys whose values stay text. changed:
    collects the keys whose value is no longer text.
    """
    if isinstance(written, dict):
        inner = f"{key}." if key else ""
        items = value.items()
        return {n: _typed(written[n], v, texts, changed, f"{inner}{n}") for n, v in items}
    if isinstance(written, list):
        items = enumerate(value)
        return [_typed(written[n], v, texts, changed, f"{key}[{n}]") for n, v in items]
    made = isinstance(written, str) and isinstance(value, str) and "${" in written
    if made and key not in texts and not re.fullmatch(r"\$\{[\w.]+\}", written):  # another key's
        override = parse_override(f"key={value}")
        typed = value if override is None or override.is_sweep_override() else override.value()
        if not isinstance(typed, str):
            changed.add(key)
            return typed
    return value


def values_of(override: Override) -> list[Any]:
    value = list(override.sweep_iterator()) if override.is_sweep_override() else override.value()
    if not isinstance(value, list):
        return [value]
    return [part for item in value for part in (item if isinstance(item, list) else [item])]


def single_overrides(override: Override) -> Iterator[str]:
    """Yield the override once for each value of its sweep."""
    if not override.is_sweep_override():
        yield str(override.input_line)
    elif override.is_interval_sweep():
        interval: Any = override.value()
        yield f"{override.get_key_element()}={interval.start}"
    else:
        for value in override.sweep_string_iterator():
            yield f"{override.get_key_element()}={value}"
