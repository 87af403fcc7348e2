"""What a model's sizes must be, in the words of its keys."""

from __future__ import annotations


def not_positive(**sizes: float) -> list[str]:
    """A problem for each size that is zero or less."""
    return [
        f"{key}={value}: must be above 0; write model.{key}=1"
        for key, value in sizes.items()
        if not value > 0
    ]
