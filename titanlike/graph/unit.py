"""What a model can be cut between. Imports no torch: splits are planned without it."""

from __future__ import annotations

from typing import NamedTuple


class Unit(NamedTuple):
    """A module that is never cut, under its name in the model, such as "layers.3"."""

    name: str
    block: bool  # one of the repeated layers, which `even` and `balance` count
