"""How a config key is declared, with its bounds."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, NewType

if TYPE_CHECKING:  # what Python code writes; the names below tell how a config file may write it
    Seconds = float
    Bytes = int
    Paths = str | list[str]
else:
    Seconds = NewType("Seconds", float)  # written as a number, or as 45s, 90m, 11h30m, 11:30:00
    Bytes = NewType("Bytes", int)  # written as a number, or as 75GiB, 75GB, 75G (powers of 1024)
    Paths = NewType("Paths", list)  # a path, or a list of paths


MAX_RANKS = 1_000_000
MAX_VOCAB = 2**31 - 1
BOUNDS: dict[str, dict[str, Any]] = {  # of numbers, by what a key is declared as
    "int": {"le": 2**40},
    "float": {"le": 1e18},
    "Seconds": {"gt": 0, "le": 1e9, "example": "12h"},
    "Bytes": {"ge": 2**20, "le": 2**60, "example": "80GiB"},
}


def key(default: Any, doc: str, **bounds: Any) -> Any:
    """A config field: its default, the line that `--help` prints for it, and bounds of its numbers.

    bounds: at least (ge), above (gt), at most (le), below (lt), where these are narrower than
    BOUNDS; example: what an error proposes if neither the bound nor the default is right.
    """
    metadata = {"doc": doc, "bounds": bounds}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def required(doc: str, **bounds: Any) -> Any:
    """A config field without a default: its choice is an error until the user gives it."""
    return field(metadata={"doc": doc, "bounds": {"example": 1e12} | bounds})
