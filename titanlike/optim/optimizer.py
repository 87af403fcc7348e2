"""The optimizers of a stage, the norm of all gradients, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.config.imports import import_object
from titanlike.config.optimizer import Optimizer, ParameterGroup
from titanlike.config.schema import Config, ConstantLr, Custom, DecayLr, OwnOptimizer, WsdLr
from titanlike.distributed.initialize import piece_seed
from titanlike.distributed.placement import Placement, experts_of
from titanlike.distributed.sharding import compute_dtype
from titanlike.graph.units import find_units
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
    hidden = hidden_matrices(model, choice)
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, parameter in ordered:
        update = parameter_update(name, parameter.dim(), choice, name in hidden)
        of_kind = groups.setdefault(update.name, [])
        options = group_options(update)
        alike = (g for g in of_kind if all(g[key] == value for key, value in options.items()))
        if (group_of := next(alike, None)) is None:
            of_kind.append(group_of := {"params": [], **options})
        group_of["params"].append(parameter)
    if not groups:  # a stage of buffers alone
        groups = {choice.other_kind or choice.name: [{"params": []}]}
    placed = (placements or {}).items()
    context = fused.OptimizerContext(
        parts={parameters[n]: placement.part for n, placement in placed if n in parameters},
        group=group,
        dtype=compute_dtype(config.precision),  # in bf16 only where gradients are no more exact
        seeds={p: piece_seed(config.seed, f"rounding of {n}", 0) for n, p in parameters.items()},
        exact=config.exact,
    )
    kinds = {kind: choice.of_kind(kind) for kind in groups}
    # those that communicate first
    first = sorted(kinds, key=lambda kind: not kinds[kind].whole_matrices)
    return [
        import_object(kinds[kind].implementation)(groups[kind], kinds[kind], context)
        for kind in first
    ]


def parameter_update(name: str, dim: int, choice: Optimizer, hidden: bool) -> Optimizer:
    """What updates a parameter, by its name in the whole model and number of dimensions, with the
    settings of this parameter; hidden: see `hidden_matrices`. The one pattern of `optimizer.groups`
    that matches comes before the rest."""
    own = next(((choice.groups or {})[p] for p in patterns_of(name, choice)), ParameterGroup())
    by_default = choice.name if hidden or not choice.whole_matrices else choice.other_kind
    update = choice.of_kind(own.optimizer or by_default)
    given = {key: getattr(own, key) for key in ("lr", "weight_decay", *update.group_keys)}
    given = {key: value for key, value in given.items() if value is not None}
    return replace(update, **{"weight_decay": update.weight_decay if dim >= 2 else 0.0, **given})


def group_options(update: Optimizer) -> dict[str, Any]:
    """Of a parameter group of torch's optimizer; `initial_lr` is the peak."""
    values = {key: getattr(update, key) for key in update.group_keys}
    tuples = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    return {"initial_lr": update.lr, "weight_decay": update.weight_decay, **tuples}


def hidden_matrices(model: nn.Module, optimizer: Any) -> set[str]:
    """Names of the parameters of a whole model that an optimizer of whole matrices (Muon) updates:
    2-D ones of the blocks and those of experts, but for embeddings, what is used outside of the
    blocks too, and those that the config leaves to others. Empty for other optimizers."""
    if not getattr(optimizer, "whole_matrices", False):
        return set()
    in_blocks: set[int] = set()
    elsewhere = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    of_experts = {id(p) for module in experts_of(model).values() for p in module.parameters()}
    units = find_units(model)
    groups = (optimizer.groups or {}).items()
    others = [p for p, g in groups if g.optimizer not in (None, optimizer.name)]
    others += getattr(optimizer, optimizer.other_kind, [])
    head = model.get_submodule(units[-1].name)  # of a chain of layers, each of which is a block
    for unit in units:
        module = model.get_submodule(unit.name)
        inside = unit.block and not (module is head and isinstance(head, nn.Linear))
        (in_blocks if inside else elsewhere).update(map(id, module.parameters()))
    return {
        name
        for name, parameter in model.named_parameters()
        if (parameter.dim() == 2 or (parameter.dim() == 3 and id(parameter) in of_experts))
        and id(parameter) in in_blocks - elsewhere
        and not any(fnmatchcase(name, pattern) for pattern in others)
    }


def update_bytes(choice: Optimizer | OwnOptimizer, model: nn.Module) -> dict[str, tuple[int, int]]:
    """Of each parameter, by its name: bytes of optimizer state that an element has, and of memory
    traffic when it is updated."""
    shapes = {name: parameter.dim() for name, parameter in model.named_parameters()}
    if isinstance(choice, OwnOptimizer):
        from titanlike.optim.own import state_bytes

        state = state_bytes(choice)
        return dict.fromkeys(shapes, (state, 12 + 2 * state))
    hidden = hidden_matrices(model, choice)
    updates = {n: parameter_update(n, dim, choice, n in hidden) for n, dim in shapes.items()}
    return {name: (update.state_bytes, update.touched_bytes) for name, update in updates.items()}


def moment_bytes(choice: Optimizer | OwnOptimizer, model: nn.Module) -> dict[str, int]:
    """Bytes that its optimizer keeps of an element of each parameter, by the parameter's name."""
    return {name: state for name, (state, _) in update_bytes(choice, model).items()}


def patterns_of(name: str, choice: Optimizer) -> list[str]:
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
