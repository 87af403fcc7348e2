"""The whole model of one process, with its initial values, for comparison."""

from __future__ import annotations

import torch
from torch import nn

from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.distributed.initialize import initialize
from titanlike.core.models.registry import build_model, initial_weights_of, resolve_model


def real(model: Custom | Config, seed: int = 0) -> nn.Module:
    """In fp32 on the CPU, in training mode; of a config, with its sizes and its seed."""
    if isinstance(model, Config):
        model, seed = resolve_model(model), model.seed
    found = build_model(model)
    initialize(found, initial_weights_of(model, seed), torch.device("cpu"))
    return found.train()
