"""How a config key is declared, with its bounds, and choices that are the user's own code."""

from __future__ import annotations

from dataclasses import dataclass, field
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

    bounds: at least (ge), above (gt), at most (le), below (lt), where these are narrower than BOUNDS;
    example: what an error proposes if neither the bound nor the default is right.
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


@dataclass
class Custom:
    """A choice from outside: `name` is an import path, `args` its keyword arguments."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Model(Custom):
    """A family or an import path, called with `args`."""

    tp_plan: dict[str, Any] | None = key(
        None, "names of modules -> how tp divides them; null = the model's own plan"
    )


@dataclass
class OwnOptimizer(Custom):
    """The user's own class, called with the parameters, `lr` and `args`."""

    lr: float = key(3e-3, "peak learning rate", ge=0)
    clip: float | None = key(1.0, "largest global gradient norm; null = no clipping", gt=0)
    exact_on_shards: bool = key(
        False,
        "it is right on shards and stages although trying it alone on parts gives another result",
    )
