"""YAML files whose aliases, written out, would be more than a machine can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_MOST = 100_000  # values of a config


def aliases_problem(path: Path) -> str:
    """Why a file is not to be read by what writes its aliases out, as OmegaConf does; "" if it may."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return ""  # told by those who read it
    known: dict[int, float] = {}

    def count(node: Any) -> float:
        if id(node) not in known:
            known[id(node)] = float("inf")  # of an alias inside of what it names
            entries = node.value if isinstance(node.value, list) else []
            parts = [
                part
                for entry in entries
                for part in (entry if isinstance(entry, tuple) else [entry])
            ]
            known[id(node)] = 1.0 + sum(map(count, parts))
        return known[id(node)]

    try:
        values = 0 if root is None else count(root)
    except RecursionError:
        return "its values are nested too deeply"
    return f"it has {values:.2g} values, by aliases of aliases" if values > _MOST else ""
