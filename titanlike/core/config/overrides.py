"""Overrides, as users type them and as Hydra reads them; short forms.

Keys of a model, and of a user's own code, are arguments that config files need not list; Hydra
needs ++ for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titanlike.core.config.schema import OPEN_GROUPS, VARIANTS, Config

# data.changed: not in the config file of a user's data
ADDED = ("model.", "data.changed=", "validation.data.")
_OPEN = (*(f"{group}." for group in OPEN_GROUPS), "validation.data.")
SHORT = {"timeline": "timeline.enabled"}


def key_of(override: str) -> str:
    """Return the key that an override sets."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def in_full(override: str) -> str:
    """Expand a short override: timeline=true."""
    key, equals, value = override.partition("=")
    return f"{SHORT.get(key, key)}{equals}{value}"


def to_hydra(override: str) -> str:
    """Prefix an override of a user's argument, or of a validation set's key, with ++, so that Hydra
    adds its key; return others unchanged."""
    return f"++{override}" if override.startswith(_OPEN) else override


def from_hydra(override: str) -> str:
    """Undo `to_hydra`."""
    return override.removeprefix("++") if f"{key_of(override)}.".startswith(_OPEN) else override


def with_choices(config: Config, choices: Mapping[str, Any]) -> Config:
    """Set keys of a config, as {"fsdp.zero": 3}; for a group, the named choice with its defaults,
    as {"schedule": "1f1b"}."""
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
