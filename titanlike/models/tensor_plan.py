"""The tensor-parallel plan of a model: that in its YAML, its own, or its transformers config's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config
from titanlike.models.hf_tensor_plan import has_transformers_plan, transformers_plan
from titanlike.parallel.tp.plan import Entry, named, parse_plan

KEY = "model.tp_plan"


def written_plan(config: Config) -> Mapping[str, Any] | None:
    """The plan in the config; None = the model's own counts."""
    return getattr(config.model, "tp_plan", None)  # a Config made in Python may have a Custom


def tensor_plan(config: Config, model: nn.Module) -> dict[str, Entry]:
    """Module -> how it is divided. Raises ConfigError where the model has no plan, or a wrong one."""
    plain = written_plan(config)
    if plain is None:
        own = getattr(model, "tp_plan", None)
        if callable(own):
            plain = own()
        elif has_transformers_plan(model):
            plain = transformers_plan(model, config.tp)
    if not plain:
        name = model.config.model_type if has_transformers_plan(model) else config.model.name
        reason = f"{name} has no tensor-parallel plan"
        fix = f"tp=1 dp={config.dp * config.tp}, or a plan (docs/tensor_parallel.md)"
        raise ConfigError([Problem("tp", config.tp, reason, fix)])
    return named(model, parse_plan(plain, KEY), KEY)
