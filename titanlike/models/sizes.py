"""Checks of a model's sizes, with messages that name the config key."""

from __future__ import annotations


def not_positive(**sizes: float) -> list[str]:
    """A message for each size that is not above 0."""
    return [
        f"{key}={value}: must be above 0; write model.{key}=1"
        for key, value in sizes.items()
        if not value > 0
    ]
