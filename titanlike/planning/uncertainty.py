"""How far from its plan a run may be: what published runs of the same kind were.

`SPREADS` are of the rows of tests/planning/published.yaml, to which no constant was fitted; a test
prints them, and that four of five lie within.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from titanlike.core.config.groups.hardware import Hardware
from titanlike.core.config.schema import Config

_TENTH = 1.2816  # standard deviations from a normal distribution's mean to its outer tenths
# the devices of these rows
_MEASURED = ("h100_sxm", "h200", "b200", "gb200")


class Spread(NamedTuple):
    """Measured speed relative to the planned one: the middle four fifths of published rows."""

    rows: int
    low: float
    high: float

    @property
    def deviation(self) -> float:
        """The standard deviation of the logarithm, if it is normal."""
        return math.log(self.high / self.low) / (2 * _TENTH)


SPREADS: dict[str, Spread] = {
    "dense bf16": Spread(3, 0.83, 1.02),
    "dense float8": Spread(8, 0.89, 1.03),
    "mixture bf16": Spread(5, 0.66, 1.03),
    "mixture float8": Spread(7, 0.87, 1.05),
    "long sequences": Spread(6, 0.9, 1.08),
}
_LONG = 32768  # tokens


def kind_of(config: Config, hardware: Hardware, experts: bool) -> str:
    """The kind of a run, a key of `SPREADS` if published runs are of it. experts: it has some."""
    precision = config.precision.name
    precision = "float8" if precision == "mxfp8" else precision
    kind = f"{'mixture' if experts else 'dense'} {precision}"
    if config.seq_len >= _LONG and kind in ("dense bf16", "dense float8"):
        kind = "long sequences"
    return kind if hardware.name in _MEASURED else f"{kind} on {hardware.name}"
