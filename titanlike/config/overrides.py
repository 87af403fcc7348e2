"""Overrides as the user types them and as Hydra reads them.

The keys of a model, and of what else is the user's own, are arguments, of which a config file need
not list all. And YAML files whose aliases, written out, would be more than a machine can hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from titanlike.config.files import open_regular
from titanlike.config.schema import OPEN_GROUPS, VARIANTS, Config

ADDED = ("model.", "data.changed=")  # data.changed: the file of a user's own data may lack it
SHORT = {"timeline": "timeline.enabled"}
# keys that take a run's directory
_OF_RUNS = {"hardware": "hardware.path", "split.cost": "split.run"}


def key_of(override: str) -> str:
    """The key that an override sets."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def in_full(override: str) -> list[str]:
    """What a short override stands for: timeline=true, hardware=RUN, split.cost=RUN."""
    key, _, value = override.partition("=")
    if key in SHORT:
        return [f"{SHORT[key]}={value}"]
    if key in _OF_RUNS and ("/" in value or Path(value).is_dir()):
        return [f"{key}=run", f"{_OF_RUNS[key]}={value}"]
    return [override]


def to_hydra(override: str) -> str:
    """An override of what may be an argument of the user's own code with the ++ that lets Hydra add
    its key; any other unchanged."""
    group, dot, _ = override.partition("=")[0].partition(".")
    return f"++{override}" if dot and group in OPEN_GROUPS else override


def from_hydra(override: str) -> str:
    """The inverse."""
    group = key_of(override).partition(".")[0]
    return override.removeprefix("++") if group in OPEN_GROUPS else override


_MOST = 100_000  # values of a config


def aliases_problem(path: Path) -> str:
    """Why a file is not to be read by what writes its aliases out, as OmegaConf does; "" if it
    may."""
    known: dict[int, float] = {}

    def count(node: Any) -> float:
        if id(node) not in known:
            known[id(node)] = float("inf")  # of an alias inside of what it names
            entries = node.value if isinstance(node.value, list) else []
            parts = (entry if isinstance(entry, tuple) else [entry] for entry in entries)
            known[id(node)] = 1.0 + sum(map(count, chain.from_iterable(parts)))
        return known[id(node)]

    try:
        with open_regular(path) as file:
            root = yaml.compose(file, yaml.SafeLoader)
        values = 0 if root is None else count(root)
    except (OSError, ValueError, yaml.YAMLError):
        return ""  # told by those who read it
    except RecursionError:
        return "its values are nested too deeply"
    return f"it has {values:.2g} values, by aliases of aliases" if values > _MOST else ""


def with_choices(config: Config, choices: Mapping[str, Any]) -> Config:
    """The config with other values of keys, as {"fsdp.zero": 3}; of a group with the defaults of
    the choice that is named, as {"schedule": "1f1b"}."""
    for key, value in choices.items():
        name, _, inner = key.partition(".")
        if inner:
            group = getattr(config, name)
            known = {inner: value} if hasattr(group, inner) else {}  # else of the user's own
            value = replace(group, **known or {"args": {**group.args, inner: value}})
        elif name in VARIANTS:
            value = VARIANTS[name][value](name=value)
        config = replace(config, **{name: value})
    return config
