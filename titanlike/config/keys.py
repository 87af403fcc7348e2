"""How a config key is declared, and choices that are the user's own code."""

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


@dataclass
class Model(Custom):
    """A family or an import path, called with `args`."""

    tp_plan: dict[str, Any] | None = key(
        None, "names of modules -> how tp divides them; null = the model's own plan"
    )


@dataclass
class OwnOptimizer(Custom):
    """The user's own class, called with the parameters, `lr` and `args`."""

    lr: float = key(3e-3, "peak learning rate")
    clip: float | None = key(1.0, "largest global gradient norm; null = no clipping")
    exact_on_shards: bool = key(
        False,
        "it is right on shards and stages although trying it alone on parts gives another result",
    )
