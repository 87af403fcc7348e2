"""Which checkpoints `keep`, `keep_every` and `keep_best` delete. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from titanlike.config.schema import Checkpoint


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint."""

    step: int
    val_loss: float | None  # None where its step was not validated


def superseded(saved: list[Saved], settings: Checkpoint) -> list[int]:
    """The steps to delete, oldest first; never the newest."""
    if settings.keep == 0:
        return []
    kept = {one.step for one in sorted(saved, key=lambda one: one.step)[-settings.keep :]}
    if settings.keep_every:
        kept |= {one.step for one in saved if one.step % settings.keep_every == 0}
    validated = [one for one in saved if one.val_loss is not None and isfinite(one.val_loss)]
    # of equal ones the earlier is the best
    best = sorted(validated, key=lambda one: (one.val_loss, one.step))[: settings.keep_best]
    kept |= {one.step for one in best}
    return sorted(one.step for one in saved if one.step not in kept)
