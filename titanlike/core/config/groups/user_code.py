"""Models, and a user's own code as a choice of a group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from titanlike.core.config.keys import key


@dataclass
class Custom:
    """User code: `name` is an import path, `args` its keyword arguments."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Model(Custom):
    """A model family or an import path, called with `args`."""

    tp_plan: dict[str, Any] | None = key(
        None, "module names -> how tp shards them; null = the model's plan"
    )


@dataclass
class CustomOptimizer(Custom):
    """A user's optimizer class, called with the parameters, `lr` and `args`."""

    lr: float = key(3e-3, "peak learning rate", ge=0)
    clip: float | None = key(1.0, "largest global gradient norm; null = no clipping", gt=0)
    exact_on_shards: bool = key(
        False,
        "right on shards and stages (it communicates), although a trial without other ranks differs",
    )
