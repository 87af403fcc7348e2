"""How a config key is declared: its default and the line that `--help` prints for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NewType

Seconds = NewType("Seconds", float)  # written as a number, or as 45s, 90m, 11h30m, 11:30:00


def key(default: Any, doc: str) -> Any:
    """A config field: its default and the line that `--help` prints for it."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"doc": doc})
    if callable(default):
        return field(default_factory=default, metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})


def required(doc: str) -> Any:
    """A config field without a default: its choice is an error until the user gives it."""
    return field(metadata={"doc": doc})


@dataclass
class Custom:
    """A choice from outside: `name` is an import path, `args` its keyword arguments."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)
