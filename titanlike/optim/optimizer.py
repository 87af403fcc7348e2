"""The optimizers of a stage, the norm of all gradients, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.config.schema import (
    AdamW,
    Config,
    ConstantLr,
    Custom,
    DecayLr,
    Muon,
    OwnOptimizer,
    ParameterGroup,
    Sgd,
    WsdLr,
)
from titanlike.distributed.initialize import piece_seed
from titanlike.distributed.placement import Placement
from titanlike.distributed.sharding import compute_dtype
from titanlike.optim import fused
from titanlike.torch_private.dtensor import local
from titanlike.torch_private.tensors import norms


def build_optimizers(
    parameters: Mapping[str, nn.Parameter],
    model: nn.Module,
    config: Config,
    placements: Mapping[str, Placement] | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[torch.optim.Optimizer]:
    """Optimizers of some parameters of a model, by name: each has one, whose choice does not depend
    on the layout. Vectors (norms, biases) are not decayed. A group's `initial_lr` is its peak.

    model: the whole one, which may be on meta; placements: of parameters among tensor-parallel
    ranks; group: the ranks that hold the parameters together, where these are not FSDP's alone.
    Collective over these ranks.
    """
    optimizers = _by_kind(parameters, model, config, placements, group)
    if config.ema.decay is not None:
        from titanlike.optim.ema import keep_average

        for optimizer in optimizers:
            keep_average(optimizer, config.ema.decay)
    return optimizers


def _by_kind(
    parameters: Mapping[str, nn.Parameter],
    model: nn.Module,
    config: Config,
    placements: Mapping[str, Placement] | None,
    group: dist.ProcessGroup | None,
) -> list[torch.optim.Optimizer]:
    choice = config.optimizer
    # matrices first
    ordered = sorted(parameters.items(), key=lambda item: item[1].dim() < 2)
    if isinstance(choice, OwnOptimizer):
        from titanlike.optim.own import own_optimizer

        both: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
        for _, parameter in ordered:
            both[parameter.dim() < 2].append(parameter)
        return [own_optimizer(choice, *both, config.exact)]
    hidden: set[str] = set()
    if isinstance(choice, Muon):
        from titanlike.optim.muon import hidden_matrices

        hidden = hidden_matrices(model, choice)
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, parameter in ordered:
        update = parameter_update(name, parameter.dim(), choice, name in hidden)
        of_kind = groups.setdefault(update.optimizer, [])
        options = update.options()
        alike = (g for g in of_kind if all(g[key] == value for key, value in options.items()))
        if (group_of := next(alike, None)) is None:
            of_kind.append(group_of := {"params": [], **options})
        group_of["params"].append(parameter)
    if not groups:  # a stage of buffers alone
        groups = {"sgd" if isinstance(choice, Sgd) else "adamw": [{"params": []}]}
    placed = (placements or {}).items()
    parts = {parameters[name]: placement.part for name, placement in placed if name in parameters}
    optimizers: list[torch.optim.Optimizer] = []
    if "muon" in groups:
        from titanlike.optim.muon import Muon as MuonOptimizer

        assert isinstance(choice, Muon)
        # in bf16 only where gradients are no more exact
        muon = MuonOptimizer(groups["muon"], choice, compute_dtype(config), parts, group)
        optimizers.append(muon)
    if "sgd" in groups:
        sgd = fused.Sgd(groups["sgd"], lr=choice.lr)
        sgd.exact = config.exact
        optimizers.append(sgd)
    if "adamw" not in groups:
        return optimizers
    adamw = choice if isinstance(choice, AdamW | Muon) else AdamW()
    settings: dict[str, Any] = {"lr": choice.lr, "betas": tuple(adamw.betas), "eps": adamw.eps}
    if adamw.state_dtype == "bf16":
        from titanlike.optim.bf16_state import Bf16StateAdamW

        seeds = {p: piece_seed(config.seed, f"rounding of {n}", 0) for n, p in parameters.items()}
        return [*optimizers, Bf16StateAdamW(groups["adamw"], seeds, parts, **settings)]
    fused_adamw = fused.AdamW(groups["adamw"], **settings)
    fused_adamw.exact = config.exact
    return [*optimizers, fused_adamw]


@dataclass(frozen=True)
class ParameterUpdate:
    """How a parameter is updated."""

    optimizer: str  # adamw, muon or sgd
    lr: float  # its peak
    weight_decay: float
    betas: tuple[float, ...] = ()  # of adamw
    momentum: float | None = None  # of sgd and muon

    def options(self) -> dict[str, Any]:
        """Of a parameter group of the optimizer; `initial_lr` is the peak."""
        options: dict[str, Any] = {"initial_lr": self.lr, "weight_decay": self.weight_decay}
        if self.optimizer == "adamw":
            return {**options, "betas": self.betas}
        return {**options, "momentum": self.momentum}


def parameter_update(
    name: str, dim: int, choice: AdamW | Muon | Sgd, hidden: bool
) -> ParameterUpdate:
    """What updates a parameter, by its name in the whole model and number of dimensions; hidden:
    see `hidden_matrices`. The one pattern of `optimizer.groups` that matches comes before the rest."""
    groups = choice.groups or {}
    own = next((groups[pattern] for pattern in patterns_of(name, choice)), ParameterGroup())
    by_default = "muon" if hidden else "sgd" if isinstance(choice, Sgd) else "adamw"
    kind = own.optimizer or by_default
    lr, decay = choice.lr, choice.weight_decay if dim >= 2 else 0.0
    if isinstance(choice, Muon) and kind != "muon" and choice.adamw_lr is not None:
        lr = choice.adamw_lr
    lr = lr if own.lr is None else own.lr
    decay = decay if own.weight_decay is None else own.weight_decay
    if kind == "adamw":
        betas = own.betas or getattr(choice, "betas", AdamW().betas)
        return ParameterUpdate(kind, lr, decay, tuple(betas))
    momentum = choice.momentum if kind == by_default and not isinstance(choice, AdamW) else 0.0
    momentum = momentum if own.momentum is None else own.momentum
    return ParameterUpdate(kind, lr, decay, momentum=momentum)


def moment_bytes(config: Config, model: nn.Module) -> dict[str, int]:
    """Bytes that its optimizer keeps of an element of each parameter, by the parameter's name."""
    choice = config.optimizer
    shapes = {name: parameter.dim() for name, parameter in model.named_parameters()}
    if isinstance(choice, OwnOptimizer):  # as AdamW
        return dict.fromkeys(shapes, 8)
    hidden, low = set[str](), getattr(choice, "state_dtype", "") == "bf16"
    if isinstance(choice, Muon):
        from titanlike.optim.muon import hidden_matrices

        hidden = hidden_matrices(model, choice)
    found = {}
    for name, dim in shapes.items():
        update = parameter_update(name, dim, choice, name in hidden)
        mean = 4 * (update.optimizer == "muon" or bool(update.momentum))
        found[name] = (4 if low else 8) if update.optimizer == "adamw" else mean
    return found


def patterns_of(name: str, choice: AdamW | Muon | Sgd) -> list[str]:
    """The patterns of `optimizer.groups` that match a parameter's name; checked to be one at most."""
    return [pattern for pattern in choice.groups or () if fnmatchcase(name, pattern)]


@torch.no_grad()
def gradient_norms(parameters: Sequence[Tensor]) -> Tensor:
    """The 2-norm of this rank's part of each gradient, fp32 [parameters], on one device; 0 where
    there is none. Not a number, or infinite, where the gradient is."""
    parts = {at: local(p.grad) for at, p in enumerate(parameters) if p.grad is not None}
    alike: dict[Any, list[int]] = {}
    for at, part in parts.items():
        alike.setdefault((part.device, part.dtype), []).append(at)
    if len(alike) == 1 and len(parts) == len(parameters):  # as nearly always
        return torch.stack(norms([*parts.values()])).float()
    device = next((part.device for part in parts.values()), torch.device("cpu"))
    result = [torch.zeros((), device=device)] * len(parameters)
    for places in alike.values():
        for at, norm in zip(places, norms([parts[at] for at in places]), strict=True):
            result[at] = norm.to(device, torch.float32)
    return torch.stack(result) if result else torch.zeros(0)


def square_sum(norms: Tensor, shares: Tensor | None) -> Tensor:
    """What this rank adds to the square of the norm of all gradients: a scalar.

    shares: of each gradient, 1 / the tensor-parallel ranks that have the same; None = 1.
    """
    squares = norms.square()
    return (squares if shares is None else squares * shares).sum()


def norm_of_squares(squares: Tensor, config: Config) -> Tensor:
    """The 2-norm of all gradients of the whole model, from `square_sum` summed over all ranks:
    replicas of a shard count once."""
    return (squares / config.replicate).sqrt()


def clip_divisor(norm: Tensor, limit: float) -> Tensor:
    """What all gradients are divided by so that their global norm, `norm`, is at most `limit`."""
    return ((norm + 1e-6) / limit).clamp(min=1.0)


# --- the learning rate -------------------------------------------------------------------------


def lr_factor(config: ConstantLr | DecayLr | WsdLr | Custom, step: float, steps: float) -> float:
    """Learning rate of step `step` (the first is 1) of `steps`, as a share of the peak.

    A function of the step alone, so that there is no state to save; a run that is resumed with more
    steps follows the longer curve.
    """
    if isinstance(config, Custom):
        from titanlike.optim.own import own_lr_factor

        return own_lr_factor(config, int(step), int(steps))
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
    return config.optimizer.lr * _factor(config, step)


def _factor(config: Config, step: int) -> float:
    """With `ramp`, steps of the schedule are counted in full batches: by tokens."""
    at: float = step
    steps: float = config.steps
    if config.ramp:
        full = config.batch_size * config.seq_len
        at, steps = config.tokens(step) / full, config.tokens(config.steps) / full
        if isinstance(config.lr, Custom):
            at, steps = max(1, round(at)), max(1, round(steps))
    return lr_factor(config.lr, at, steps)


def set_lr(optimizers: Iterable[torch.optim.Optimizer], config: Config, step: int) -> None:
    """Give all parameters the learning rate of a step; groups with a peak of their own
    (`initial_lr`) keep their ratio to the others."""
    factor = _factor(config, step)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.get("initial_lr", config.optimizer.lr) * factor
