"""Overrides as a user types them, and as Hydra takes them: the model's keys are its constructor's to
say, so that each may be a new one."""

from __future__ import annotations


def to_hydra(override: str) -> str:
    """An override, or its key, that Hydra adds where the model's file does not have it."""
    return f"++{override}" if override.startswith("model.") else override


def from_hydra(override: str) -> str:
    """The inverse."""
    return override[2:] if override.startswith("++model.") else override
