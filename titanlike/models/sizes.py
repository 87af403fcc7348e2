"""Checks of a model's sizes, with messages that name the config key."""

from __future__ import annotations


def not_positive(**sizes: float) -> list[str]:
    """A message for each size that is not above 0."""
    heads = sizes.get("heads", 1)
    if not heads > 0:
        heads = max(sizes.get("kv_heads", 1), 1)
    fits = {"heads": heads, "dim": 32 * heads}  # which the other sizes divide
    return [
        f"{key}={value}: must be above 0; write model.{key}={fits.get(key, 1)}"
        for key, value in sizes.items()
        if not value > 0
    ]
