"""Overrides as the user types them and as Hydra reads them.

The keys of a model, and of what else is the user's own, are arguments, of which a config file need
not list all.
"""

from __future__ import annotations

from collections.abc import Collection

from titanlike.config.schema import OPEN_GROUPS

ADDED = ("model.", "data.changed=")  # data.changed: the file of a user's own data may lack it

SHORT = {"timeline": "timeline.enabled"}


def key_of(override: str) -> str:
    """The key that an override sets."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def to_hydra(override: str, own: Collection[str] = ()) -> str:
    """An override of an argument with the ++ that lets Hydra add its key; `timeline=true` with the key
    that it is short for; any other unchanged.

    own: groups besides the model that name code of the user's.
    """
    key, _, value = override.partition("=")
    if key in SHORT:
        return f"{SHORT[key]}={value}"
    group, dot, _ = override.partition("=")[0].partition(".")
    adds = override.startswith(ADDED) or (dot and group in own)
    return f"++{override}" if adds else override


def from_hydra(override: str) -> str:
    """The inverse."""
    group = key_of(override).partition(".")[0]
    return override.removeprefix("++") if group in OPEN_GROUPS else override
