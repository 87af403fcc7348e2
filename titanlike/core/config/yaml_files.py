"""YAML that others may have written: bounded in bytes, depth, and values that aliases repeat."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from titanlike.core.config.files import read_text

_MOST_BYTES = 1 << 20
_MOST = 100_000  # values, aliases expanded
_DIGITS = 100  # of a number: of base 60 more would take quadratic time


def read_yaml(path: Path) -> Any:
    """Read a YAML file as plain data. Raises OSError, ValueError with a reason without the path."""
    return parse_yaml(read_text(path, _MOST_BYTES))


def parse_yaml(text: str) -> Any:
    """Parse YAML to plain data. Raises ValueError."""
    try:
        if reason := _problem(text):
            raise ValueError(reason)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (ArithmeticError, LookupError, AttributeError) as error:  # !!bool x
        raise ValueError(f"a value is not what its tag says: {error}") from None


def aliases_problem(path: Path) -> str:
    """Return why a YAML file must not be expanded (an alias bomb); "" if it may be."""
    try:
        return _problem(read_text(path, _MOST_BYTES))
    except (FileNotFoundError, yaml.YAMLError):
        return ""  # the reader reports these
    except (OSError, ValueError) as error:
        return str(error)


def _problem(text: str) -> str:
    known: dict[int, float] = {}

    def count(node: Any) -> float:
        if node.tag.endswith((":int", ":float")) and len(node.value) > _DIGITS:
            raise ValueError(f"it has a number of {len(node.value):,} characters")
        if id(node) not in known:
            known[id(node)] = float("inf")  # an alias within its own anchor
            entries = node.value if isinstance(node.value, list) else []
            parts = (entry if isinstance(entry, tuple) else [entry] for entry in entries)
            known[id(node)] = 1.0 + sum(map(count, chain.from_iterable(parts)))
        return known[id(node)]

    try:
        root = yaml.compose(text, yaml.SafeLoader)
        values = 0 if root is None else count(root)
    except RecursionError:
        return "its values are nested too deeply"
    return f"it has {values:.2g} values, by aliases of aliases" if values > _MOST else ""
