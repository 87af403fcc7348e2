"""Declares config keys, with their bounds and conditions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Any, NewType

if TYPE_CHECKING:  # types in Python; the names tell `parse` which spellings a config may use
    Seconds = float
    Bytes = int
    Batches = int
    Paths = str | list[str]
else:
    Seconds = NewType("Seconds", float)  # written as a number, or as 45s, 90m, 11h30m, 11:30:00
    Bytes = NewType("Bytes", int)  # written as a number, or as 75GiB, 75GB, 75G (powers of 1024)
    Batches = NewType("Batches", int)  # written as a number, or as all, which is 0
    Paths = NewType("Paths", list)  # a path, or a list of paths


MAX_RANKS = 1_000_000
MAX_VOCAB = 2**31 - 1
BOUNDS: dict[str, dict[str, Any]] = {  # default bounds of numbers, by a key's annotation
    "int": {"le": 2**40},
    "Batches": {"ge": 0, "le": 2**40},
    "float": {"le": 1e18},
    "Seconds": {"gt": 0, "le": 1e9, "example": "12h"},
    "Bytes": {"ge": 2**20, "le": 2**60, "example": "80GiB"},
}


# conditions of a text, or of each text in a list: (predicate, error if it is false)
Texts = tuple[tuple[Callable[[str], object], str], ...]
LONGEST_FILE = 200  # bytes of a file name: 255 less what temporary names append
# fmt: off
PATH: Texts = (
    (lambda path: max(len(name.encode()) for name in path.split("/")) <= LONGEST_FILE,
     f"a name in it has more than {LONGEST_FILE} bytes"),
    (re.compile(r"[^\x00-\x1f\x7f]*").fullmatch,
     "a path with a line break or another control character cannot be printed"),
)
# fmt: on
# W&B refuses others, but only once the run has started
NAME: Texts = ((lambda name: 1 <= len(name) <= 128, "must have 1 to 128 characters"),)
PROJECT: Texts = (*NAME, (re.compile(r"[^/\\#?%:]*").fullmatch, r"cannot have / \ # ? % : in it"))
TAG: Texts = ((lambda tag: 1 <= len(tag) <= 64, "a tag has 1 to 64 characters"),)
RENAME: Texts = ((lambda rule: ":" in rule, "is not old:new"),)


def key(default: Any, doc: str, texts: Texts = (), **bounds: Any) -> Any:
    """Declare a config field: default, the line that `--help` prints, conditions of its texts, and
    bounds of its numbers.

    bounds: >= (ge), > (gt), <= (le), < (lt), where narrower than BOUNDS; items: length of a list;
    example: the value that an error proposes if neither the bound nor the default works.
    """
    metadata = {"doc": doc, "bounds": bounds, "texts": texts}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def required(doc: str, **bounds: Any) -> Any:
    """Declare a config field without a default: its choice is an error until the user gives a
    value."""
    return field(metadata={"doc": doc, "bounds": {"example": 1e12} | bounds})
