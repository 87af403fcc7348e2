"""Optimizers, the learning rate over the steps, and the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlike.config.schema import AdamW, Config, ConstantLr, DecayLr, Sgd, WsdLr
from titanlike.parallel.mesh import Mesh


def build_optimizer(stage: nn.Module, config: AdamW | Sgd) -> torch.optim.Optimizer:
    """One optimizer for one stage; vectors (norms, biases) are not decayed."""
    matrices = [p for p in stage.parameters() if p.dim() >= 2]
    vectors = [p for p in stage.parameters() if p.dim() < 2]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((matrices, config.weight_decay), (vectors, 0.0))
        if params
    ] or [{"params": []}]  # a stage of buffers alone
    if isinstance(config, Sgd):
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=tuple(config.betas), eps=config.eps, fused=True
    )


def lr_factor(config: ConstantLr | DecayLr | WsdLr, step: int, steps: int) -> float:
    """Learning rate of step `step` (the first is 1) of `steps`, as a share of the peak.

    A function of the step alone: there is no state to save, and a run that goes on with more steps
    follows the longer curve.
    """
    if step < config.warmup:
        return step / config.warmup
    if isinstance(config, ConstantLr):
        return 1.0
    if isinstance(config, WsdLr):
        start = max(config.warmup, steps - round(config.decay * steps))
    else:
        start = config.warmup
    progress = min(1.0, max(0, step - start) / max(1, steps - start))
    if config.name == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return 1 - (1 - config.final) * progress


def learning_rate(config: Config, step: int) -> float:
    """The learning rate of a step."""
    return config.optimizer.lr * lr_factor(config.lr, step, config.steps)


def set_lr(optimizer: torch.optim.Optimizer, config: Config, step: int) -> None:
    """Give all parameters the learning rate of a step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor], mesh: Mesh) -> Tensor:
    """The 2-norm of all gradients of the whole model: a scalar, the same on every rank."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # over the shards
    squared = norm.to(mesh.device, torch.float32).square()
    return mesh.sum(squared, "pp").sqrt() if mesh.pp > 1 else squared.sqrt()


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], norm: Tensor, limit: float) -> None:
    """Scale all gradients so that their global norm, `norm`, is at most `limit`."""
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
