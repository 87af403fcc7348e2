"""The number of readers of a stream, and their share of a batch. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from titanlike.core.config.errors import Problem
from titanlike.core.config.schema import Config

_MOST_READERS = 64  # upper bound of the default


def rows_of(config: Config, step: int) -> int:
    """Return the number of samples in the global batch of a step (from 0)."""
    if not config.ramp:
        return config.batch_size
    return (config.tokens(step + 1) - config.tokens(step)) // config.seq_len


def _common_rows(config: Config) -> int:
    stages = (size * length // config.seq_len for _, size, length in config.ramp_stages())
    return math.gcd(*stages)


def default_readers(config: Config) -> int:
    """Return the largest number up to `_MOST_READERS` that divides every global batch."""
    rows = _common_rows(config)
    return max(n for n in range(1, min(rows, _MOST_READERS) + 1) if rows % n == 0)


def held_out_problems(config: Config) -> Iterator[Problem]:
    """Yield an error if all of a stream would be held out."""
    if config.validation.every and not config.validation.batches:
        reason = "a stream has no end; so many batches of it are held out"
        yield Problem("validation.batches", "all", reason, "validation.batches=100")


def reader_problems(config: Config, readers: int | None) -> Iterator[Problem]:
    """Yield an error if the number of readers does not fit batch and dp. readers: None = default."""
    rows, dp = _common_rows(config), config.dp
    chosen = default_readers(config) if readers is None else readers
    fitting = [n for n in range(dp, rows + 1, dp) if rows % n == 0]
    if chosen in fitting or not fitting:  # an invalid dp is reported elsewhere
        return
    near = min(fitting, key=lambda n: abs(n - chosen))
    reason = f"each of the {dp} dp ranks reads as many, and each reader the same number of a "
    reason += f"batch's {rows} samples"
    yield Problem(
        "data.readers", "null" if readers is None else chosen, reason, f"data.readers={near}"
    )
