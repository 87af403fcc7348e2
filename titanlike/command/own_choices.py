"""What need not be typed: `GROUP=own` where GROUP.name is an import path, and choices of a finished run.

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

from titanlike.config.overrides import key_of
from titanlike.config.program import conf_dir
from titanlike.config.schema import OPEN_GROUPS, VARIANTS

_GROUPS = {*VARIANTS, *OPEN_GROUPS}


def complete_choices(args: argparse.Namespace) -> set[str]:
    """Complete args.overrides, and args.config_name; returns the groups that name the user's code."""
    shipped = args.config_path == str(conf_dir())
    finished = None if shipped else _finished(args)
    named = {
        found[1]
        for text in args.overrides
        if (found := re.match(r"[+]*(\w+)\.name=.*\w\.\w", text)) and found[1] in OPEN_GROUPS
    }
    chosen = {key_of(text) for text in args.overrides} & _GROUPS
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
    typed = {key_of(text) for text in args.overrides if text.partition("=")[2] == "own"}
    return (own - chosen) | named | (typed & set(OPEN_GROUPS))


def _finished(args: argparse.Namespace) -> dict[str, Any] | None:
    """The complete config of a run that args.config_path holds; None if it is another config."""
    path = Path(args.config_path) / f"{args.config_name}.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        defaults = [*config["defaults"]]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None
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
