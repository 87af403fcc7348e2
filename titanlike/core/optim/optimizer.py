"""The optimizers of a stage, the global gradient norm, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.core.config.groups.optimization import ConstantLr, DecayLr, WsdLr
from titanlike.core.config.groups.user_code import Custom, CustomOptimizer
from titanlike.core.config.imports import import_object
from titanlike.core.config.optimizer import Optimizer, ParameterGroup
from titanlike.core.config.schema import Config
from titanlike.core.distributed.placement import Placement, experts_of
from titanlike.core.distributed.sharding import compute_dtype
from titanlike.core.graph.units import find_units
from titanlike.core.optim import fused
from titanlike.core.torch_private.dtensor import local
from titanlike.core.torch_private.tensors import norms


def build_optimizers(
    parameters: Mapping[str, nn.Parameter],
    model: nn.Module,
    config: Config,
    placements: Mapping[str, Placement] | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[torch.optim.Optimizer]:
    """Build the optimizers of a model's parameters on this rank: one for each kind that updates
    some, or the custom one. Collective over `group`.

    The choice of each parameter's optimizer does not depend on the layout. Vectors (see
    `matrices_of`) have no weight decay. A group's `initial_lr` is its peak.

    model: the full model, may be on meta; placements: of tensor-parallel parameters; group: the
    ranks that share parameters, None = FSDP's.
    """
    choice, matrix_names = config.optimizer, matrices_of(model)
    matrices = {name: p for name, p in parameters.items() if name in matrix_names}
    vectors = {name: p for name, p in parameters.items() if name not in matrix_names}
    if isinstance(choice, CustomOptimizer):
        from titanlike.core.optim.custom import custom_optimizer

        both = [*matrices.values()], [*vectors.values()]
        optimizers = [custom_optimizer(choice, *both, config.exact)]
    else:
        groups = _param_groups(matrices | vectors, model, choice)
        if not groups:  # a stage without parameters
            groups = {choice.other_kind or choice.name: [{"params": []}]}
        placed = (placements or {}).items()
        context = fused.OptimizerContext(
            parts={parameters[n]: placement.part for n, placement in placed if n in parameters},
            group=group,
            dtype=compute_dtype(config.precision),  # bf16 only if gradients are bf16 as well
            exact=config.exact,
        )
        kinds = {kind: choice.of_kind(kind) for kind in groups}
        # optimizers that communicate come first
        ordered = sorted(kinds.items(), key=lambda item: not item[1].whole_matrices)
        optimizers = [
            import_object(of.implementation)(groups[kind], of, context) for kind, of in ordered
        ]
    if config.ema.decay is not None:
        from titanlike.techniques.ema import keep_average

        for optimizer in optimizers:
            keep_average(optimizer, config.ema.decay)
    return optimizers


def _param_groups(
    parameters: Mapping[str, nn.Parameter], model: nn.Module, choice: Optimizer
) -> dict[str, list[dict[str, Any]]]:
    """Kind of optimizer -> its `param_groups`, each of the parameters with the same options."""
    matrices, hidden = matrices_of(model), hidden_matrices(model, choice)
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, parameter in parameters.items():
        update = parameter_update(name, name in matrices, choice, name in hidden)
        kind_groups = groups.setdefault(update.name, [])
        options = {key: getattr(update, key) for key in update.group_keys}
        options = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
        options |= {"initial_lr": update.lr, "weight_decay": update.weight_decay}  # lr: the peak
        alike = (g for g in kind_groups if all(g[key] == value for key, value in options.items()))
        if (matching := next(alike, None)) is None:
            kind_groups.append(matching := {"params": [], **options})
        matching["params"].append(parameter)
    return groups


def parameter_update(name: str, matrix: bool, choice: Optimizer, hidden: bool) -> Optimizer:
    """The optimizer config that updates a parameter, with the settings for this parameter.

    name: in the full model; matrix: whether it is in `matrices_of`; hidden: whether it is in
    `hidden_matrices`. The pattern of `optimizer.groups` that matches, if any, overrides the
    defaults.
    """
    override = next(((choice.groups or {})[p] for p in patterns_of(name, choice)), ParameterGroup())
    by_default = choice.name if hidden or not choice.whole_matrices else choice.other_kind
    update = choice.of_kind(override.optimizer or by_default)
    given = {key: getattr(override, key) for key in ("lr", "weight_decay", *update.group_keys)}
    given = {key: value for key, value in given.items() if value is not None}
    return replace(update, **{"weight_decay": update.weight_decay if matrix else 0.0, **given})


def matrices_of(model: nn.Module) -> set[str]:
    """Names of the parameters that are matrices, or stacks of them: they decay.

    All others are vectors, or stacks of vectors, one for each expert, head or layer: norms and
    biases of any shape, by their names, and [E, F] in a module whose own parameters are stacks of
    as many, of matrices [E, F, D] as well; but no router's.
    """
    found: set[str] = set()
    for path, module in model.named_modules():
        own = dict(module.named_parameters(path, recurse=False))
        dims, sizes = {p.dim() for p in own.values()}, {p.shape[:1] for p in own.values()}
        plain = isinstance(module, nn.Linear | nn.Embedding) or hasattr(module, "kernel_size")
        stacks = 3 in dims and min(dims) == 2 and len(sizes) == 1
        norm = path.endswith(("norm", "norms")) or type(module).__name__.endswith("Norm")
        for name, parameter in own.items():
            words = name.rpartition(".")[2].split("_")
            vector = parameter.dim() < 2 or words[-1] in ("bias", "biases") or "norm" in words
            if stacks and parameter.dim() == 2:
                vector |= not {"router", "gate", "wg", "centroids"} & {*words}
            if plain and parameter.dim() > 1 or not (vector or norm):
                found.add(name)
    return found & dict(model.named_parameters()).keys()


def hidden_matrices(model: nn.Module, optimizer: Any) -> set[str]:
    """Names of the parameters that a matrix optimizer (Muon) updates; empty for other optimizers.

    These are matrices [rows, columns] of blocks and experts' matrices, except embeddings,
    parameters also used outside of blocks, and those that the config assigns to a different
    optimizer.
    """
    if not getattr(optimizer, "whole_matrices", False):
        return set()
    in_blocks, matrices = set[int](), matrices_of(model)
    elsewhere = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    expert_ids = {id(p) for module in experts_of(model).values() for p in module.parameters()}
    units = find_units(model)
    groups = (optimizer.groups or {}).items()
    excluded = [p for p, g in groups if g.optimizer not in (None, optimizer.name)]
    excluded += getattr(optimizer, optimizer.other_kind, [])
    head = model.get_submodule(units[-1].name)  # in a plain chain of layers it is a block as well
    for unit in units:
        module = model.get_submodule(unit.name)
        inside = unit.block and not (module is head and isinstance(head, nn.Linear))
        (in_blocks if inside else elsewhere).update(map(id, module.parameters()))
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == (3 if id(parameter) in expert_ids else 2)
        and name in matrices
        and id(parameter) in in_blocks - elsewhere
        and not any(fnmatchcase(name, pattern) for pattern in excluded)
    }


def update_bytes(
    choice: Optimizer | CustomOptimizer, model: nn.Module
) -> dict[str, tuple[int, int]]:
    """Map each parameter to (bytes of optimizer state, bytes of memory traffic of an update), both
    per element; a frozen one has neither."""
    none = {name: (0, 0) for name, p in model.named_parameters() if not p.requires_grad}
    names = [name for name, _ in model.named_parameters() if name not in none]
    if isinstance(choice, CustomOptimizer):
        from titanlike.core.optim.custom import state_bytes

        state = state_bytes(choice)
        return none | dict.fromkeys(names, (state, 12 + 2 * state))
    hidden, matrices = hidden_matrices(model, choice), matrices_of(model)
    updates = {n: parameter_update(n, n in matrices, choice, n in hidden) for n in names}
    return none | {n: (each.state_bytes, each.touched_bytes) for n, each in updates.items()}


def moment_bytes(choice: Optimizer | CustomOptimizer, model: nn.Module) -> dict[str, int]:
    """Map each parameter's name to the bytes of optimizer state per element."""
    return {name: state for name, (state, _) in update_bytes(choice, model).items()}


def patterns_of(name: str, choice: Optimizer) -> list[str]:
    """The patterns of `optimizer.groups` that match a name; a valid config has at most one."""
    return [pattern for pattern in choice.groups or () if fnmatchcase(name, pattern)]


@torch.no_grad()
def gradient_norms(parameters: Sequence[Tensor]) -> Tensor:
    """The 2-norm of this rank's shard of each gradient, fp32 [parameters], on one device.

    0 for parameters without gradient; NaN or inf if the gradient has NaN or inf.
    """
    parts = {i: local(p.grad) for i, p in enumerate(parameters) if p.grad is not None}
    alike: dict[Any, list[int]] = {}
    for i, part in parts.items():
        alike.setdefault((part.device, part.dtype), []).append(i)
    if len(alike) == 1 and len(parts) == len(parameters):  # the usual case
        return torch.stack(norms([*parts.values()])).float()
    device = next((part.device for part in parts.values()), torch.device("cpu"))
    result = [torch.zeros((), device=device)] * len(parameters)
    for places in alike.values():
        for i, norm in zip(places, norms([parts[i] for i in places]), strict=True):
            result[i] = norm.to(device, torch.float32)
    return torch.stack(result) if result else torch.zeros(0)


def clip_divisor(norm: Tensor, limit: float) -> Tensor:
    """The divisor of all gradients that clips their global norm, `norm`, to at most `limit`."""
    return ((norm + 1e-6) / limit).clamp(min=1.0)


# --- the learning rate -------------------------------------------------------------------------


def lr_factor(config: ConstantLr | DecayLr | WsdLr | Custom, step: float, steps: float) -> float:
    """Learning rate of step `step` (the first is 1) of `steps`, relative to the peak.

    A function of the step alone, so nothing is saved in checkpoints; a run resumed with more steps
    follows the longer curve.
    """
    if isinstance(config, Custom):
        from titanlike.core.optim.custom import custom_lr_factor

        return custom_lr_factor(config, int(step), int(steps))
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
    """The relative learning rate of a step. With `ramp`, a step counts as its share of a full
    batch."""
    position: float = step
    steps: float = config.last_step
    if config.ramp:
        full = config.batch_size * config.seq_len
        position, steps = config.tokens(step) / full, config.tokens(config.last_step) / full
        if isinstance(config.lr, Custom):
            position, steps = max(1, round(position)), max(1, round(steps))
    return lr_factor(config.lr, position, steps)


def set_lr(optimizers: Iterable[torch.optim.Optimizer], config: Config, step: int) -> None:
    """Set the learning rate of a step; groups with their own peak (`initial_lr`) keep their
    ratio."""
    factor = _factor(config, step)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            lr = group.get("initial_lr", config.optimizer.lr) * factor
            if isinstance(group["lr"], Tensor):  # torchao's optimizers take no other
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
