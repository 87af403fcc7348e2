"""Tables of cases, of which the default tests run a sample and `pytest -m slow` the rest."""

from __future__ import annotations

import re
from typing import Any

import pytest

Cells = list[Any]  # values, or what pytest.param returns
Rows = dict[str, Any]  # by their names
GRID = pytest.mark.grid  # and slow, by conftest.py


def cells(default: Rows, more: Rows, rest: Rows | None = None, most: int | None = None) -> Cells:
    """Cases: those of `more` are slow, of `rest` grid; most: of `default`, of which others are slow."""
    more = dict(list(default.items())[most:] if most else {}) | more
    default = dict(list(default.items())[:most])
    slow_ones = [
        pytest.param(case, id=name, marks=pytest.mark.slow if name in more else GRID)
        for name, case in ((rest or {}) | more).items()
        if name not in default
    ]
    return [pytest.param(case, id=name) for name, case in default.items()] + slow_ones


def meshes(*names: str) -> dict[str, dict[str, int]]:
    """Layouts by their names, "pp=2 dp=2", as keys of a config; "one process" has none."""
    return {name: {k: int(n) for k, n in re.findall(r"(\w+)=(\d+)", name)} for name in names}


def slow(*cases: Any, marks: Any = pytest.mark.slow) -> Cells:
    """Cases without names; a tuple holds the values of several arguments."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*value, marks=marks) for value in values]
