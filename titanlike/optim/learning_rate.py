"""The learning rate: a function of the step alone, so that there is no state to save.

A run that is resumed with more steps follows the longer curve.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from titanlike.config.schema import Config, ConstantLr, Custom, DecayLr, WsdLr
from titanlike.optim.own import own_lr_factor


def lr_factor(config: ConstantLr | DecayLr | WsdLr | Custom, step: int, steps: int) -> float:
    """Learning rate of step `step` (the first is 1) of `steps`, as a share of the peak."""
    if isinstance(config, Custom):
        return own_lr_factor(config, step, steps)
    if step < config.warmup:
        return step / config.warmup
    if isinstance(config, ConstantLr):
        return 1.0
    start = config.warmup
    if isinstance(config, WsdLr):
        start = max(start, steps - round(config.decay * steps))
    progress = min(1.0, max(0, step - start) / max(1, steps - start))
    if config.name == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return 1 - (1 - config.final) * progress


def learning_rate(config: Config, step: int) -> float:
    return config.optimizer.lr * lr_factor(config.lr, step, config.steps)


def set_lr(optimizers: Iterable[torch.optim.Optimizer], config: Config, step: int) -> None:
    """Give all parameters the learning rate of a step; groups with a peak of their own (`initial_lr`)
    keep their ratio to the others."""
    factor = lr_factor(config.lr, step, config.steps)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.get("initial_lr", config.optimizer.lr) * factor
