"""The optimizers of a stage, and the norm of all gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlike.config.schema import Config, Muon, OwnOptimizer, Sgd
from titanlike.optim import muon
from titanlike.optim.bf16_state import Bf16StateAdamW
from titanlike.optim.own import own_optimizer
from titanlike.parallel.initialize import piece_seed
from titanlike.parallel.mesh import Mesh
from titanlike.parallel.sharding import compute_dtype


@dataclass(frozen=True)
class StageState:
    """What this rank trains of one stage that has parameters or buffers."""

    stage: nn.Module
    optimizers: list[torch.optim.Optimizer]  # of different parameters
    # parameter in the stage -> its name in the whole model, one for all copies of a tied one
    names: dict[str, str]
    owned: frozenset[str]  # names in the whole model; each parameter is owned by one stage

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All of the stage's, by the name in the whole model."""
        for name, parameter in self.stage.named_parameters():
            yield self.names[name], parameter

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def optimizer_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What is remembered of a parameter: {} where it was never updated."""
        return optimizer_state(self.optimizers, parameter)

    def owns(self, name: str) -> bool:
        """Whether a parameter or buffer, by its name in the whole model, counts in this stage: in
        the gradient norm and in a checkpoint. A tied parameter counts in one stage alone."""
        return name in self.owned or name not in self.names.values()


def optimizer_state(
    optimizers: Iterable[torch.optim.Optimizer], parameter: nn.Parameter
) -> dict[str, Any]:
    """What the one of these optimizers that updates a parameter remembers of it; {} before that."""
    found = (optimizer.state.get(parameter) for optimizer in optimizers)
    return next((state for state in found if state), {})


def build_optimizers(
    parameters: Mapping[str, nn.Parameter], model: nn.Module, config: Config
) -> list[torch.optim.Optimizer]:
    """Of some parameters of a model, by name: each by one optimizer, whose choice does not depend on
    the layout. Vectors (norms, biases) are not decayed. A group's `initial_lr` is its peak.

    model: the whole one, which may be on meta.
    """
    choice = config.optimizer
    rest, optimizers = dict(parameters), []
    hidden = muon.hidden_matrices(model, choice)
    if matrices := [rest.pop(name) for name in parameters if name in hidden]:
        # in bf16 only where gradients are no more exact
        optimizers = [muon.Muon(matrices, choice, compute_dtype(config))]
    if rest or not optimizers:  # neither: a stage of buffers alone
        optimizers.append(_elementwise_optimizer(rest, config))
    return optimizers


def _elementwise_optimizer(
    parameters: Mapping[str, nn.Parameter], config: Config
) -> torch.optim.Optimizer:
    choice = config.optimizer
    matrices = [p for p in parameters.values() if p.dim() >= 2]
    vectors = [p for p in parameters.values() if p.dim() < 2]
    if isinstance(choice, OwnOptimizer):
        return own_optimizer(choice, matrices, vectors)
    decays = ((matrices, choice.weight_decay), (vectors, 0.0))
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay} for params, decay in decays if params
    ]
    groups = groups or [{"params": []}]
    if isinstance(choice, Sgd):
        return torch.optim.SGD(groups, lr=choice.lr, momentum=choice.momentum)
    lr = choice.lr
    if isinstance(choice, Muon) and choice.adamw_lr is not None:
        lr = choice.adamw_lr
    groups = [{**group, "initial_lr": lr} for group in groups]
    options = {"lr": lr, "betas": tuple(choice.betas), "eps": choice.eps}
    if choice.state_dtype == "bf16":
        seeds = {p: piece_seed(config.seed, f"rounding of {n}", 0) for n, p in parameters.items()}
        return Bf16StateAdamW(groups, seeds, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


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
