"""The unit of splitting. Imports no torch, so that splits can be planned without it."""

from __future__ import annotations

from typing import NamedTuple


class Unit(NamedTuple):
    """A module that is never cut, by its name in the model, such as "layers.3"."""

    name: str
    block: bool  # one of the repeated layers, which split=even and split.balance count
