"""What need not be written: `GROUP=own` where GROUP.name is an import path, the choice that an
experiment's file names, and choices of a finished run.

The config of a run folder is complete, without a defaults list. So that a group's choice replaces
the group there, the config is given to Hydra without that group, which is added to its defaults.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore

from titanlike.config.aliases import aliases_problem
from titanlike.config.overrides import key_of
from titanlike.config.program import conf_dir
from titanlike.config.schema import OPEN_GROUPS, VARIANTS

_GROUPS = {*VARIANTS, *OPEN_GROUPS}


def complete_choices(args: argparse.Namespace, searched: list[str]) -> set[str]:
    """Complete args.overrides, and args.config_name; returns the groups that name the user's code.

    searched: folders in which there may be more choices.
    """
    shipped = args.config_path == str(conf_dir())
    finished = None if shipped else _finished(args)
    named = {
        found[1]
        for text in args.overrides
        if (found := re.match(r"[+]*(\w+)\.name=.*\w\.\w", text)) and found[1] in OPEN_GROUPS
    }
    chosen = {key_of(text) for text in args.overrides} & _GROUPS
    by_file = {} if finished is not None else _of_experiments(args, searched)
    typed = {key_of(text): text.partition("=")[2] for text in args.overrides}
    for group, choice in by_file.items():
        if group not in typed:
            args.overrides = [f"{group}={choice}", *args.overrides]
        elif typed[group] != choice and typed[group] in VARIANTS.get(group, ()):
            args.overrides.append(f"{group}.name={typed[group]}")  # else the file's would win
    own = {
        group
        for group in OPEN_GROUPS
        if finished is not None and "." in str((finished.get(group) or {}).get("name"))
    }
    if finished is not None or (shipped and "experiment" not in map(key_of, args.overrides)):
        added = sorted(named - chosen - own)
        args.overrides = [*(f"{group}=own" for group in added), *args.overrides]
        chosen |= set(added)
    if finished is not None and chosen:
        _without(finished, chosen, args)
    owned = {key_of(text) for text in args.overrides if text.partition("=")[2] == "own"}
    return (own - chosen) | named | (owned & set(OPEN_GROUPS))


def _of_experiments(args: argparse.Namespace, searched: list[str]) -> dict[str, str]:
    """The choice of each group to which an experiment gives a `name`, but no `override /GROUP`: the
    keys that it sets are that choice's, not those of the default one."""
    found: dict[str, str] = {}
    folders = [args.config_path, args.config_dir, *searched]
    for text in args.overrides:
        name = text.partition("=")[2]
        if key_of(text) != "experiment" or not re.fullmatch(r"[\w./-]+", name):
            continue
        for folder in filter(None, folders):
            path = Path(folder.removeprefix("file://"), "experiment", f"{name}.yaml")
            try:
                config = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, yaml.YAMLError):
                continue
            found |= _named_choices(config) if isinstance(config, dict) else {}
    return found


def _named_choices(config: dict[str, Any]) -> dict[str, str]:
    defaults = config.get("defaults")
    entries = [entry for entry in defaults if isinstance(entry, dict)] if defaults else []
    overridden = {re.split("[ /]", str(key))[-1] for entry in entries for key in entry}
    choices = {}
    for group in _GROUPS - overridden:
        values = config.get(group)
        name = str(values.get("name")) if isinstance(values, dict) else ""
        if "." in name and group in OPEN_GROUPS:
            choices[group] = "own"
        elif name in VARIANTS.get(group, ()):
            choices[group] = name
    return choices


def _finished(args: argparse.Namespace) -> dict[str, Any] | None:
    """The complete config of a run that args.config_path holds; None if it is another config."""
    path = Path(args.config_path) / f"{args.config_name}.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        defaults = [*config["defaults"]]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None
    if aliases_problem(path):
        return None  # told when it is checked
    complete = all(isinstance(config.get(group), dict) for group in _GROUPS)
    return config if complete and "_self_" in defaults else None


def _without(config: dict[str, Any], chosen: set[str], args: argparse.Namespace) -> None:
    """Let Hydra compose `config` with the files of the chosen groups in place of these."""
    kept = {key: value for key, value in config.items() if key not in chosen}
    at = config["defaults"].index("_self_") + 1
    choices = [{group: None} for group in sorted(chosen)]
    kept["defaults"] = [*config["defaults"][:at], *choices, *config["defaults"][at:]]
    args.config_name = "finished_run"
    ConfigStore.instance().store(args.config_name, kept)
