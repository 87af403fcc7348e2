"""Custom optimizers and learning-rate schedules, named by import path and checked before a launch.

An optimizer (`optimizer.name=package.Class`) is a torch.optim.Optimizer, called with the
parameters, `lr` and the other keys of `optimizer`; if `weight_decay` is one of them, vectors
(norms, biases) have none. Gradients are clipped by `optimizer.clip` before its step. A
learning-rate schedule (`lr.name=package.function`) is called as `function(step, steps, **keys)`,
step 1 first, and returns the learning rate relative to optimizer.lr.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.core.config.errors import ConfigError, Problem, nearest, override_text
from titanlike.core.config.groups.user_code import Custom, CustomOptimizer
from titanlike.core.config.imports import import_fix, import_object, of_a_library
from titanlike.core.config.schema import Config
from titanlike.core.optim.fused import around_step, padded, take_back
from titanlike.core.torch_private.dtensor import local

# for each rank, the index of its shard of a matrix and of a vector; None = it has none
Ranks = Sequence[tuple[Any, Any]]


def custom_optimizer(
    config: CustomOptimizer,
    matrices: list[nn.Parameter],
    vectors: list[nn.Parameter],
    exact: bool = False,
) -> torch.optim.Optimizer:
    """Build the custom optimizer of these parameters. exact: with numerics=exact."""
    groups: list[dict[str, Any]] = [{"params": [*matrices, *vectors]}]
    if "weight_decay" in config.args:
        groups = [{"params": matrices}] if matrices else []
        groups += [{"params": vectors, "weight_decay": 0.0}] if vectors else []
    made = import_object(config.name)(groups or [{"params": []}], lr=config.lr, **config.args)
    if exact:
        around_step(made, partial(_step_on_whole_registers, made))
    return made


def _step_on_whole_registers(optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
    """Step an elementwise optimizer on shards (weights, gradients, state) padded to full CPU vector
    registers; see `padded`."""
    groups, state = [group["params"] for group in optimizer.param_groups], optimizer.state
    wide: dict[nn.Parameter, nn.Parameter] = {}
    optimizer.state = defaultdict(dict)
    for parameter in chain(*groups):
        wide[parameter] = other = nn.Parameter(
            padded(local(parameter.detach())), parameter.requires_grad
        )
        if parameter.grad is not None:
            other.grad = padded(local(parameter.grad))
        if parameter in state:
            optimizer.state[other] = {
                key: padded(local(value)) if _is_like(value, parameter) else value
                for key, value in state[parameter].items()
            }
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [wide[parameter] for parameter in parameters]
    step()
    with torch.no_grad():
        for parameter, other in wide.items():
            take_back(local(parameter), other)
            for key, value in optimizer.state.get(other, {}).items():
                if not _is_like(value, other):
                    state[parameter][key] = value
                    continue
                if not _is_like(state[parameter].get(key), parameter):
                    state[parameter][key] = torch.zeros_like(parameter, dtype=value.dtype)
                take_back(local(state[parameter][key]), value)
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters
    optimizer.state = state


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def custom_lr_factor(config: Custom, step: int, steps: int) -> float:
    """Call the custom schedule. Raises ConfigError unless it returns a finite number >= 0."""
    factor = import_object(config.name)(step, steps, **config.args)
    try:
        number = float(factor)
    except (TypeError, ValueError):
        number = math.nan
    if 0 <= number < math.inf:
        return number
    reason = f"returned {factor!r} for step {step} of {steps}, not a share of optimizer.lr"
    raise ConfigError([Problem("lr.name", config.name, reason, "return 0 or above, finite")])


def problems(config: Config, in_layers: str = "") -> Iterator[Problem]:
    """Yield problems of the custom optimizer and schedule, by trying them.

    in_layers: the override with which ranks do not shard matrices within layers; "" = they do not.
    """
    try:
        if isinstance(config.lr, Custom):
            function = import_callable("lr", config.lr)
            check_arguments("lr", config.lr, function, {"step": 1, "steps": config.last_step})
            last = config.last_step
            for step in {1, (last + 1) // 2, last}:
                _tried("lr", config.lr, custom_lr_factor, config.lr, step, last)
        if isinstance(config.optimizer, CustomOptimizer):
            _check_optimizer(config.optimizer)
            _check_parts(config, config.optimizer, in_layers)
    except ConfigError as error:
        yield from error.problems


def _check_optimizer(config: CustomOptimizer) -> None:
    """Raise ConfigError if the optimizer cannot step, or its state cannot be saved in a checkpoint."""
    if config.name in ("torch.optim.Muon", "torch.optim._muon.Muon"):
        reason = "takes matrices alone, and on shards a dozen messages for each of them"
        raise wrong("optimizer", config, reason, "optimizer=muon")
    kind = import_callable("optimizer", config)
    check_arguments("optimizer", config, kind, {"parameters": []}, lr=config.lr)
    if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)):
        raise wrong("optimizer", config, "is no torch.optim.Optimizer", "a subclass of it")
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    matrix.grad, vector.grad = torch.ones(2, 2), torch.ones(2)
    optimizer = _tried("optimizer", config, custom_optimizer, config, [matrix], [vector])
    _tried("optimizer", config, optimizer.step)
    for key, value in (item for state in optimizer.state.values() for item in state.items()):
        if value is not None and not isinstance(value, Tensor):
            reason = f"keeps {type(value).__name__} {key!r} as state, and checkpoints hold tensors"
            raise wrong("optimizer", config, reason, f"keep {key!r} as a tensor")


def state_bytes(config: CustomOptimizer) -> int:
    """Bytes of state per element of a matrix, measured after a step on a small one."""
    matrix = nn.Parameter(torch.ones(64, 64))
    matrix.grad = torch.ones(64, 64)
    optimizer = _tried("optimizer", config, custom_optimizer, config, [matrix], [])
    _tried("optimizer", config, optimizer.step)
    tensors = [value for value in optimizer.state[matrix].values() if isinstance(value, Tensor)]
    return math.ceil(sum(t.nbytes for t in tensors if t.dim()) / matrix.numel())


def _check_parts(config: Config, choice: CustomOptimizer, in_layers: str) -> None:
    """Raise ConfigError if shards of the model need an elementwise optimizer and this one is not.

    It is tried on two full tensors, and on the shards that two ranks would have.
    """
    fast = "optimizer=adamw or numerics=fast"
    if choice.exact_on_shards or getattr(import_object(choice.name), "exact_on_shards", False):
        if config.exact:
            reason = "not with numerics=exact: it asks other ranks for what it needs"
            raise wrong("optimizer", choice, reason, fast)
        return
    everything, upper, lower = slice(0, 6), slice(0, 3), slice(3, 6)
    left, right = (everything, slice(0, 2)), (everything, slice(2, 4))
    by_rows, by_tensors = [(upper, upper), (lower, lower)], [(everything, None), (None, everything)]
    replicas = fast if config.exact else f"replicate={config.dp}{' cp=1' * (config.cp > 1)}"
    stages = fast if config.exact else "pp=1"
    layers = f"the parts of two {in_layers.partition('=')[0]} ranks"
    # with numerics=exact all layouts must give equal results, also those not in use here
    trials: list[tuple[object, str, Ranks, str]] = [
        (config.shards > 1 or config.exact, "the shards of two ranks", by_rows, replicas),
        (config.pp > 1 or config.exact, "two stages", by_tensors, stages),
        (in_layers, layers, by_rows, in_layers),
        (in_layers, layers, [(left, upper), (right, lower)], in_layers),
    ]
    if not any(needed for needed, *_ in trials):
        return
    choice = replace(choice, lr=0.01)  # with a tiny learning rate no weight changes
    unsharded = _tried(
        "optimizer", choice, _trained, choice, [(everything, everything)], config.exact
    )
    updates = unsharded.diff(dim=0)
    # the last bit of weights may differ: vectorized functions round differently
    allowed = (1e-3 * updates.abs().amax(1)).clamp(min=1e-6 * unsharded.abs().max())
    for _, where, ranks, fix in (trial for trial in trials if trial[0]):
        parts = _tried("optimizer", choice, _trained, choice, ranks, config.exact)
        equal = (parts.diff(dim=0) - updates).abs().amax(1) <= allowed
        if not equal[updates.isfinite().all(1)].all():
            reason = f"is not elementwise: it updates a model in {where} otherwise than a whole one"
            if not config.exact:
                reason += (
                    " (write optimizer.exact_on_shards=true if it asks the other ranks for what it "
                    "needs)"
                )
            raise wrong("optimizer", choice, reason, fix)


# some optimizers do something different every 10, 100 or 200 steps
_STEPS = 210


def _trained(choice: CustomOptimizer, ranks: Ranks, exact: bool) -> Tensor:
    """Train a matrix and a vector of six rows for `_STEPS` steps; return both, flattened, before
    the first and after each step: [1 + steps, elements]. Each rank has its own optimizer for its
    shards."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in ((6, 4), (6,))]
    size = torch.arange(1.0, 7.0)  # scale of each row's gradient
    steps = []
    for _ in range(_STEPS):
        drawn = [torch.randn(weight.shape, generator=generator) for weight in weights]
        steps.append([(size * gradient.movedim(0, -1)).movedim(-1, 0) for gradient in drawn])
    results = [[weight.clone() for weight in weights] for _ in range(_STEPS + 1)]
    for parts in ranks:
        shards = {
            tensor: nn.Parameter(weights[tensor][part].clone())
            for tensor, part in enumerate(parts)
            if part is not None
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            matrices, vectors = ([shards[index]] if index in shards else [] for index in (0, 1))
            optimizer = custom_optimizer(choice, matrices, vectors, exact)
            for gradients, after in zip(steps, results[1:], strict=True):
                for tensor, parameter in shards.items():
                    parameter.grad = gradients[tensor][parts[tensor]].clone()
                optimizer.step()
                for tensor, parameter in shards.items():
                    after[tensor][parts[tensor]] = parameter.detach()
    flat = [torch.cat([weight.flatten() for weight in weights]) for weights in results]
    return torch.stack(flat)


def _tried(group: str, config: Custom, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code raises
        reason = f"trying it raised {type(error).__name__}: {error}"
        fix = f"other values of {group}.*, or another {group}"
        raise wrong(group, config, reason, fix) from error


# --- functions and classes that a config names, also losses ------------------------------------


def import_callable(group: str, config: Custom) -> Any:
    """Import the function or class that `group` (lr, loss, optimizer) names. Raises ConfigError."""
    try:
        imported = import_object(config.name)
    except ValueError as error:
        fix = import_fix(f"{group}.name", error, "name it as package.module.attribute")
        raise wrong(group, config, str(error), fix) from None
    if not callable(imported):
        raise wrong(group, config, "is no function and no class", "name a function or class")
    made = {"lr": (float,), "loss": (Tensor, nn.Module), "optimizer": (torch.optim.Optimizer,)}
    if kind := of_a_library(config.name, imported, *made[group]):
        raise wrong(group, config, f"is a {kind}", "name code of your own")
    return imported


def check_arguments(
    group: str, config: Custom, function: Any, positional: Mapping[str, Any], **named: Any
) -> None:
    """Raise ConfigError if a function cannot be called with these arguments and the config's keys.

    positional: by the names that the error message shows.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # written in C, without a signature
        return
    parameters = list(signature.parameters.values())
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    keys = [p.name for p in parameters[len(positional) :] if p.kind not in variable]
    if not any(parameter.kind == variable[0] for parameter in parameters):
        for key in (key for key in config.args if key not in keys):
            near, value = nearest(key, keys), config.args[key]
            fix = f"{group}.{near}={override_text(value)}"
            fix = fix if near else f"its keys: {', '.join(keys) or 'none'}"
            reason = f"{config.name} has no such key"
            raise ConfigError([Problem(f"{group}.{key}", value, reason, fix)])
    try:
        signature.bind(*positional.values(), **named, **config.args)
    except TypeError as error:
        called = ", ".join([*positional, *named])
        reason = f"cannot be called with ({called}) and its keys: {error}; it takes {signature}"
        raise wrong(group, config, reason, f"give its arguments as {group}.NAME") from None


def wrong(group: str, config: Custom, reason: str, fix: str) -> ConfigError:
    return ConfigError([Problem(f"{group}.name", config.name, reason, fix)])
