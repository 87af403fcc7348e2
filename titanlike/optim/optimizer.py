"""Optimizers, one a stage, and the norm of all gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlike.config.schema import AdamW, OwnOptimizer, Sgd
from titanlike.optim.own import own_optimizer
from titanlike.parallel.mesh import Mesh


@dataclass(frozen=True)
class StageState:
    """What this rank trains of one stage that has parameters or buffers."""

    stage: nn.Module
    optimizer: torch.optim.Optimizer
    # parameter in the stage -> its name in the whole model, one for all copies of a tied one
    names: dict[str, str]
    owned: frozenset[str]  # names in the whole model; each parameter is owned by one stage

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All of the stage's, by the name in the whole model."""
        for name, parameter in self.stage.named_parameters():
            yield self.names[name], parameter

    def owns(self, name: str) -> bool:
        """Whether a parameter or buffer, by its name in the whole model, counts in this stage: in
        the gradient norm and in a checkpoint. A tied parameter counts in one stage alone."""
        return name in self.owned or name not in self.names.values()


def build_optimizer(stage: nn.Module, config: AdamW | Sgd | OwnOptimizer) -> torch.optim.Optimizer:
    """One optimizer for one stage; vectors (norms, biases) are not decayed."""
    matrices = [p for p in stage.parameters() if p.dim() >= 2]
    vectors = [p for p in stage.parameters() if p.dim() < 2]
    if isinstance(config, OwnOptimizer):
        return own_optimizer(config, matrices, vectors)
    decays = ((matrices, config.weight_decay), (vectors, 0.0))
    groups = [{"params": params, "weight_decay": decay} for params, decay in decays if params]
    groups = groups or [{"params": []}]  # a stage of buffers alone
    if isinstance(config, Sgd):
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    betas = tuple(config.betas)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


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
