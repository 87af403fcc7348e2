"""Optimizers and learning-rate schedules of the user's own, by import path, checked before a start.

An optimizer (`optimizer.name=package.Class`) is a torch.optim.Optimizer, called with the parameters,
`lr` and the other keys of `optimizer`; with `weight_decay` among them, vectors (norms, biases) have
none. `optimizer.clip` clips before its step. A learning-rate schedule (`lr.name=package.function`) is
called as `function(step, steps, **keys)`, the first step is 1, and returns the share of optimizer.lr.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.config.errors import ConfigError, Problem, nearest, override_text
from titanlike.config.imports import import_object
from titanlike.config.schema import Config, Custom, OwnOptimizer

Ranks = Sequence[Sequence[tuple[int, tuple[slice, ...]]]]


def own_optimizer(
    config: OwnOptimizer, matrices: list[nn.Parameter], vectors: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """The user's optimizer of these parameters."""
    groups: list[dict[str, Any]] = [{"params": [*matrices, *vectors]}]
    if "weight_decay" in config.args:
        groups = [{"params": matrices}] if matrices else []
        groups += [{"params": vectors, "weight_decay": 0.0}] if vectors else []
    return import_object(config.name)(groups or [{"params": []}], lr=config.lr, **config.args)


def own_lr_factor(config: Custom, step: int, steps: int) -> float:
    """What the user's schedule returns for a step. Raises ConfigError where it is no share."""
    factor = import_object(config.name)(step, steps, **config.args)
    try:
        number = float(factor)
    except (TypeError, ValueError):
        number = math.nan
    if 0 <= number < math.inf:
        return number
    reason = f"returned {factor!r} for step {step} of {steps}, not a share of optimizer.lr"
    raise ConfigError([Problem("lr.name", config.name, reason, "return 0 or above, finite")])


def problems(config: Config) -> Iterator[Problem]:
    """What is wrong with the user's own optimizer and schedule, by trying them."""
    try:
        if isinstance(config.lr, Custom):
            _check_arguments("lr", config.lr, (1, config.steps))
            for step in {1, (config.steps + 1) // 2, config.steps}:
                _tried("lr", config.lr, own_lr_factor, config.lr, step, config.steps)
        if isinstance(config.optimizer, OwnOptimizer):
            _check_optimizer(config.optimizer)
            _check_parts(config, config.optimizer)
    except ConfigError as error:
        yield from error.problems


def _check_optimizer(config: OwnOptimizer) -> None:
    """Raise ConfigError for an optimizer that does not take a step, or whose state is not saved."""
    if config.name in ("torch.optim.Muon", "torch.optim._muon.Muon"):
        reason = "takes matrices alone, and on shards a dozen messages for each of them"
        raise _wrong("optimizer", config, reason, "optimizer=muon")
    found = _check_arguments("optimizer", config, ([],), lr=config.lr)
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        raise _wrong("optimizer", config, "is no torch.optim.Optimizer", "a subclass of it")
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    matrix.grad, vector.grad = torch.ones(2, 2), torch.ones(2)
    optimizer = _tried("optimizer", config, own_optimizer, config, [matrix], [vector])
    _tried("optimizer", config, optimizer.step)
    for key, value in (item for state in optimizer.state.values() for item in state.items()):
        if value is not None and not isinstance(value, Tensor):
            reason = f"keeps {type(value).__name__} {key!r} as state, and checkpoints hold tensors"
            raise _wrong("optimizer", config, reason, f"keep {key!r} as a tensor")


def _check_parts(config: Config, choice: OwnOptimizer) -> None:
    """Raise ConfigError for an optimizer that is not elementwise, where it would see parts of the
    model: it is tried on two tensors whole, and on the parts that two ranks would have."""
    sharded, staged, divided = config.shards > 1, config.pp > 1, config.tp > 1
    says_so = getattr(import_object(choice.name), "exact_on_shards", False)
    if choice.exact_on_shards or says_so or not (sharded or staged or divided):
        return
    choice = replace(choice, lr=0.01)  # the smallest ones change nothing
    everything, upper, lower = (slice(0, 6),), (slice(0, 3),), (slice(3, 6),)
    left, right = (slice(0, 6), slice(0, 2)), (slice(0, 6), slice(2, 4))
    by_rows: Ranks = [[(0, rows), (1, rows)] for rows in (upper, lower)]
    in_parts: list[tuple[str, Ranks, str]] = []
    whole = " cp=1" if config.cp > 1 else ""
    if sharded:
        in_parts.append(("the shards of two ranks", by_rows, f"replicate={config.dp}{whole}"))
    if staged:
        ranks = [[(0, everything)], [(1, everything)]]
        in_parts.append(("two stages", ranks, "pp=1"))
    if divided:
        by_columns: Ranks = [[(0, left), (1, upper)], [(0, right), (1, lower)]]
        in_parts += [("the parts of two tp ranks", cut, "tp=1") for cut in (by_rows, by_columns)]
    whole = _tried("optimizer", choice, _trained, choice, [[(0, everything), (1, everything)]])
    updates = whole.diff(dim=0)
    # a last digit of the weights may differ where functions are computed of vectors
    allowed = (1e-3 * updates.abs().amax(1)).clamp(min=1e-6 * whole.abs().max())
    for where, ranks, fix in in_parts:
        parts = _tried("optimizer", choice, _trained, choice, ranks)
        right = (parts.diff(dim=0) - updates).abs().amax(1) <= allowed
        if not right[updates.isfinite().all(1)].all():
            reason = (
                f"is not elementwise: it updates a model in {where} otherwise than a whole one (write "
                "optimizer.exact_on_shards=true if it asks the other ranks for what it needs)"
            )
            raise _wrong("optimizer", choice, reason, fix)


# some optimizers do another thing each 10, 100 or 200 steps
_STEPS = 210


def _trained(choice: OwnOptimizer, ranks: Ranks) -> Tensor:
    """A matrix and a vector of six rows, flat, before and after each of some steps; each rank has an
    optimizer of its own for the elements (tensor 0 or 1, which) that it holds."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in ((6, 4), (6,))]
    size = torch.arange(1.0, 7.0)  # of each row's gradient
    steps = []
    for _ in range(_STEPS):
        drawn = [torch.randn(weight.shape, generator=generator) for weight in weights]
        steps.append([(size * gradient.movedim(0, -1)).movedim(-1, 0) for gradient in drawn])
    found = [[weight.clone() for weight in weights] for _ in range(_STEPS + 1)]
    for held in ranks:
        parameters = [nn.Parameter(weights[tensor][place].clone()) for tensor, place in held]
        matrices = [parameter for parameter in parameters if parameter.dim() == 2]
        vectors = [parameter for parameter in parameters if parameter.dim() == 1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            optimizer = own_optimizer(choice, matrices, vectors)
            for gradients, after in zip(steps, found[1:], strict=True):
                for parameter, (tensor, place) in zip(parameters, held, strict=True):
                    parameter.grad = gradients[tensor][place].clone()
                optimizer.step()
                for parameter, (tensor, place) in zip(parameters, held, strict=True):
                    after[tensor][place] = parameter.detach()
    return torch.stack([torch.cat([weight.flatten() for weight in every]) for every in found])


def _tried(group: str, config: Custom, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code raises
        reason = f"trying it raised {type(error).__name__}: {error}"
        raise _wrong(
            group, config, reason, f"other values of {group}.*, or another {group}"
        ) from error


def _check_arguments(group: str, config: Custom, given: Sequence[Any], **named: Any) -> Any:
    """The imported object. Raises ConfigError if it cannot be called with its keys."""
    try:
        found = import_object(config.name)
    except ValueError as error:
        fix = "" if "did you mean" in str(error) else "name it as package.module.attribute"
        raise _wrong(group, config, str(error), fix) from None
    if not callable(found):
        raise _wrong(group, config, "cannot be called", "name a function or class")
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):  # written in C, without a signature
        return found
    known = [p.name for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD][len(given) :]
    if not any(p.kind == p.VAR_KEYWORD for p in signature.parameters.values()):
        unknown = [key for key in config.args if key not in known]
        if unknown:
            near = nearest(unknown[0], known)
            value = config.args[unknown[0]]
            fix = (
                f"{group}.{near}={override_text(value)}"
                if near
                else f"its keys: {', '.join(known)}"
            )
            reason = f"{config.name} has no such argument"
            raise ConfigError([Problem(f"{group}.{unknown[0]}", value, reason, fix)])
    try:
        signature.bind(*given, **named, **config.args)
    except TypeError as error:
        reason = f"cannot be called with its keys: {error}; it takes {signature}"
        raise _wrong(group, config, reason, f"give its arguments as {group}.NAME") from None
    return found


def _wrong(group: str, config: Custom, reason: str, fix: str) -> ConfigError:
    return ConfigError([Problem(f"{group}.name", config.name, reason, fix)])
