"""Overrides as the user types them and as Hydra reads them.

A model's keys are its constructor's arguments, of which a config file need not list all.
"""

from __future__ import annotations

_ADDED = ("model.", "data.changed=")  # data.changed: the file of a user's own data may lack it


def key_of(override: str) -> str:
    """The key that an override sets."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def to_hydra(override: str) -> str:
    """`model.KEY=...` with the ++ that lets Hydra add the key; any other override unchanged."""
    return f"++{override}" if override.startswith(_ADDED) else override


def from_hydra(override: str) -> str:
    """The inverse."""
    return override[2:] if override.removeprefix("++").startswith(_ADDED) else override
