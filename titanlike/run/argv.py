"""Parses a command line: flags, overrides, and words that are neither (`--max-steps 100`, `pp 2`);
adds what need not be typed.

Added are `GROUP=own` if GROUP.name is an import path, the choice that GROUP.name names, also in an
experiment's file (`ConfigFiles`), and the choices of a finished run. A run folder's config is
complete and has no defaults list. To replace a group's choice there, Hydra receives the config
without that group, which is added to its defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ConfigDefault, GroupDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from titanlike.core.config.errors import Refused, quoted
from titanlike.core.config.overrides import in_full, key_of, to_hydra
from titanlike.core.config.parse import MISSING, in_folder, to_plain
from titanlike.core.config.program import conf_dir
from titanlike.core.config.schema import OPEN_GROUPS, VARIANTS, Config
from titanlike.core.config.yaml_files import aliases_problem, read_yaml

_CONFIG_FILE = re.compile(r".*\.(py|toml|ya?ml|json|sh)")
_KEY = re.compile(rf"(?!{_CONFIG_FILE.pattern}$)[A-Za-z_][\w./-]*")


@dataclass(frozen=True)
class InvalidOverride:
    """Words that do not have the form key=value, and the key that they seem to set."""

    typed: str
    key: str
    value: str


def parser() -> argparse.ArgumentParser:
    """Return Hydra's argument parser, with this program's flags."""
    made = get_args_parser()
    made.add_argument("--check", action="store_true", help="find errors, start nothing")
    return made


def parse_argv(words: Sequence[str]) -> argparse.Namespace:
    """Parse flags and `overrides`; `invalid_overrides` are the words that are neither.

    Exits with 2 if a flag has a wrong value or none.
    """
    made = parser()
    flags, others, rest = [], [], [*words]
    while rest:
        word = rest.pop(0)
        option = made._option_string_actions.get(word.partition("=")[0])
        if option is None:
            others.append(word)
            continue
        flags.append(word)
        optional = option.nargs == "?" and rest[:1] and rest[0] in (option.choices or ())
        if "=" not in word and rest and (option.nargs is None or optional):
            flags.append(rest.pop(0))
    args = made.parse_args(flags)
    items = [*_overrides(others)]
    args.overrides = [item for item in items if isinstance(item, str)]
    args.invalid_overrides = [item for item in items if isinstance(item, InvalidOverride)]
    return args


def _overrides(words: list[str]) -> Iterator[str | InvalidOverride]:
    """Yield overrides; words that are none are joined to what seems to be one setting: `steps 3`,
    `steps = 3`, `steps: 3`, another program's `--steps 3`, a list with spaces without quotes."""
    while words:
        typed = [word := words.pop(0)]
        flag = re.match(r"-+[A-Za-z]", word)
        if flag or _KEY.fullmatch(re.sub("[=:]$", "", word)):
            if not flag and words and re.fullmatch(r"=\S*", words[0]):
                typed.append(words.pop(0))
            if (flag and "=" in word) or typed[-1] not in (word, "="):
                pass  # it has its value
            elif words and "=" not in words[0] and not re.match(r"-+[A-Za-z]|[~+]", words[0]):
                typed.append(words.pop(0))  # a value
        else:
            typed += [words.pop(0) for _ in range(_unclosed(word, words))]
        if len(typed) == 1 and re.match(r"~|[+]*[A-Za-z][^=\s]*=.|[^=]+=$", word):
            yield word
        elif _CONFIG_FILE.fullmatch(word):
            yield InvalidOverride(word, "config_file", word)
        else:
            text = " ".join(typed)
            key, value = [*re.split(r"\s*[=:]\s*|\s+", text.lstrip("-"), maxsplit=1), ""][:2]
            key = key.replace("-", "_") if flag else key
            yield InvalidOverride(text, key or text, re.sub(r"\s+", "", value) or "true")


def _unclosed(word: str, following: list[str]) -> int:
    """Return how many following words complete a list or dict that `word` begins; 0 if none."""
    for count in range(len(following) + 1):
        text = " ".join([word, *following[:count]])
        if sum(map(text.count, "[{(")) <= sum(map(text.count, "]})")):
            return count
    return 0


_GROUPS = {*VARIANTS, *OPEN_GROUPS}


def complete_args(args: argparse.Namespace) -> None:
    """Add what need not be typed: search path, primary config, the `+` of some overrides."""
    # config folders of installed packages
    modules = [entry.load() for entry in entry_points(group="titanlike.plugins")]
    extra = [str(module.CONF) for module in modules if hasattr(module, "CONF")]
    if args.config_path is None:
        args.config_path = str(conf_dir())
    else:
        args.config_path = str(Path(args.config_path).absolute())
        extra.append(str(conf_dir()))
    args.config_name = args.config_name or "config"
    args.notes = []  # printed before anything starts
    given = []
    for text in args.overrides:
        if text.startswith("hydra.searchpath=") and (override := parse_override(text)):
            value: Any = override.value()
            extra = [*map(str, value if isinstance(value, list) else [value]), *extra]
        else:  # experiment has an entry in the defaults list; both spellings are common
            given.append(text[1:] if text.startswith("+experiment=") else text)
    args.overrides = given
    _complete_choices(args)
    args.overrides = [to_hydra(in_full(text)) for text in args.overrides]
    if extra:
        args.overrides.append(f"hydra.searchpath=[{','.join(map(quoted, extra))}]")


def _complete_choices(args: argparse.Namespace) -> None:
    """Complete args.overrides with groups' choices, and args.config_name."""
    shipped = args.config_path == str(conf_dir())
    finished = None if shipped else _finished(args)
    before = ""
    if finished is not None and args.config_name == "config":  # the folder is a run's
        finished, before = in_folder(finished, Path(args.config_path))
    named = {
        match[1]
        for text in args.overrides
        if (match := re.match(r"[+]*(\w+)\.name=.*\w\.\w", text)) and match[1] in OPEN_GROUPS
    }
    chosen = {key_of(text) for text in args.overrides} & _GROUPS
    in_run = finished or {}
    for at, text in enumerate(args.overrides):  # lr.name=cosine: select that choice's keys
        group, _, choices = text.lstrip("+").partition(".name=")
        kinds = {VARIANTS.get(group, {}).get(choice) for choice in choices.split(",")}
        now = VARIANTS.get(group, {}).get(str((in_run.get(group) or {}).get("name")))
        if group not in chosen and kinds - {None, now}:
            args.overrides[at] = f"{group}={choices}"
    chosen = {key_of(text) for text in args.overrides} & _GROUPS
    custom = {g for g in OPEN_GROUPS if "." in str((in_run.get(g) or {}).get("name"))}
    if finished is not None or (shipped and "experiment" not in map(key_of, args.overrides)):
        added = sorted(named - chosen - custom)
        args.overrides = [*(f"{group}=own" for group in added), *args.overrides]
        chosen |= set(added)
    if before and not {"run_dir", "hydra.run.dir"} & {*map(key_of, args.overrides)}:
        copied = os.path.exists(before)
        what = f"a copy of {before}, which stays as it is" if copied else f"which was in {before}"
        args.notes.append(f"the run is {args.config_path}, {what}")
    if finished is not None and (chosen or before):  # chosen groups come from their files
        defaults = {key: value for key, value in finished.items() if key not in chosen}
        at = finished["defaults"].index("_self_") + 1
        defaults["defaults"] = [*finished["defaults"]]
        defaults["defaults"][at:at] = [{group: None} for group in sorted(chosen)]
        args.config_name = "finished_run"
        ConfigStore.instance().store(args.config_name, defaults)


def _finished(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the complete config of the run in args.config_path; None if it is not a run's."""
    try:
        config = read_yaml(Path(args.config_path) / f"{args.config_name}.yaml")
    except (OSError, ValueError):  # reported when composing
        return None
    if not isinstance(config, dict) or "_self_" not in (config.get("defaults") or ()):
        return None
    return config if all(isinstance(config.get(group), dict) for group in _GROUPS) else None


def parse_override(text: str, loader: ConfigLoaderImpl | None = None) -> Override | None:
    """Parse an override; None for a syntax error."""
    try:  # glob() needs the loader, which parse_override() does not pass on
        return OverridesParser.create(config_loader=loader).parse_overrides([text])[0]
    except HydraException:
        return None


class ConfigFiles(ConfigRepository):
    """The config files that Hydra finds. Raises Refused for one that must not be composed."""

    def __init__(self, search_path: ConfigSearchPath, chosen: Collection[str]) -> None:
        super().__init__(search_path)
        self._chosen = chosen  # groups with a choice on the command line, other than `own`

    def load_config(self, config_path: str) -> ConfigResult | None:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        group, _, name = config_path.partition("/")
        in_files = source is not None and source.scheme() == "file"  # not from a package
        path = Path(getattr(source, "path", ""), f"{config_path}.yaml")
        foreign = in_files and not path.is_relative_to(conf_dir())
        if foreign and (reason := aliases_problem(path)):
            raise Refused(group, name, f"{path}: {reason}", "write its values out, once each")
        result = super().load_config(config_path)
        if result is None:
            return result
        if in_files:
            _complete(result, group, name)
        if group != "experiment":
            return result
        if not result.header.get("package") and result.config:
            reason = f"{path} has no line `# @package _global_`, without which its keys are"
            reason += " below experiment"
            raise Refused(group, name, reason, "write `# @package _global_` as its first line")
        # a `name` without `override /GROUP`: the section's other keys belong to that choice
        defaults = result.defaults_list = [*(result.defaults_list or ())]
        listed = {str(getattr(default, "group", "")).strip("/") for default in defaults}
        plain: Any = OmegaConf.to_container(result.config)
        for each in sorted({*VARIANTS, *OPEN_GROUPS} - listed):
            named = str(plain[each].get("name")) if isinstance(plain.get(each), dict) else ""
            own = "." in named and each in OPEN_GROUPS
            if own or named in VARIANTS.get(each, ()):
                choice = "own" if own else named
                defaults.append(GroupDefault(group=f"/{each}", value=choice, override=True))
                if not own or each in self._chosen:
                    del result.config[each]["name"]
        return result


def _complete(file: ConfigResult, group: str, name: str) -> None:
    """Add the keys missing from a primary config (no name) or a group's choice, with the schema's
    defaults. A file based on another one only has what differs."""
    plain: Any = OmegaConf.to_container(file.config)
    files = (each for each in file.defaults_list or () if isinstance(each, ConfigDefault))
    based = any(not each.is_self() for each in files)
    if based or not isinstance(plain, dict) or file.header.get("package"):
        return
    if not name:
        _add_defaults(file.config, to_plain(Config()))
    elif (variant := VARIANTS.get(group, {}).get(str(plain.get("name")))) is not None:
        fields = dataclasses.fields(variant)
        required = {f.name: MISSING for f in fields if f.default is f.default_factory}
        _add_defaults(file.config, to_plain(variant(**required)), f"{group}.")


def _add_defaults(config: Any, defaults: dict[str, Any], above: str = "") -> None:
    """Add the schema's keys that a file lacks, except groups, which have files."""
    for key, value in defaults.items():
        if above + key in VARIANTS or above + key in OPEN_GROUPS:
            continue
        if key not in config:
            config[key] = value
        elif isinstance(value, dict):
            _add_defaults(config[key], value, f"{key}.")


def one_line(error: Exception) -> str:
    """Return Hydra's message in one line."""
    says_nothing = not str(error).strip() or str(error).startswith("Error merging override")
    cause = error.__cause__ if says_nothing and error.__cause__ else error
    return " ".join(str(cause).split()).partition(" full_key: ")[0]


def flat_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a config."""
    name: Any
    for name in node:
        yield f"{prefix}{name}"
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from flat_keys(child, f"{prefix}{name}.")
