"""The loss of a microbatch: summed over its terms, scaled so that all microbatches add up.

A mean of means is wrong as soon as microbatches hold unequal numbers of valid tokens. So every
microbatch gives the SUM of its terms times `scale`, which holds the step's normalizer; the same
number comes out whatever the layout.

A loss of the user's own is a function `f(output, targets, **args)` that returns the losses one by
one. Its sum is made here, and divided by `f.count(targets)` where it has such a method (how many of
them count, e.g. because padding does not), else by the number of losses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.config import schema
from titanlike.config.errors import ConfigError, Problem, nearest
from titanlike.config.imports import import_object
from titanlike.config.schema import Custom
from titanlike.data.sources import IGNORE
from titanlike.graph.pytree import dataclass_fields, describe, is_plain_dataclass, tree_map

Settings = schema.CrossEntropy | schema.ChunkedCrossEntropy | schema.Mse | Custom


class OutputError(ValueError):
    """A model's output, or the targets, that a loss cannot take."""


class Loss:
    """`loss(output, targets)` is a scalar: the sum of a microbatch's terms, times `scale`.

    output: what the model's forward returns. targets: of the batch, [B, ...].
    """

    chunk: int | None = None  # tokens whose logits are in memory at a time; None = all

    def __init__(self) -> None:
        self.scale = torch.tensor(1.0)

    def __call__(self, output: Any, targets: Tensor) -> Tensor:
        return self.total(output, targets) * self.scale

    def total(self, output: Any, targets: Tensor) -> Tensor:
        """The sum of the terms, an fp32 scalar. Raises OutputError."""
        raise NotImplementedError

    def count(self, targets: Tensor) -> Tensor | None:
        """How many terms there are: the loss that is reported is their mean.

        None if it does not follow from the targets alone: then it is `terms`.
        """
        raise NotImplementedError

    def terms(self, output: Any, targets: Tensor) -> int:
        """How many terms are summed, from shapes alone: both are on meta."""
        raise NotImplementedError

    def measure(self, output: Any, targets: Tensor) -> tuple[Tensor, float]:
        """(sum, count) of a whole batch at once."""
        return self.total(output, targets), float(self.count(targets))


class CrossEntropy(Loss):
    """Cross entropy in nats of logits [B, T, V] (computed in fp32) with targets [B, T].

    chunk: the pipeline computes it of so many tokens at a time, see `chunked_loss.py`; what is
    computed is the same.
    """

    def __init__(self, chunk: int | None = None) -> None:
        super().__init__()
        self.chunk = chunk

    def total(self, output: Any, targets: Tensor) -> Tensor:
        logits = logits_of(output)
        if targets.is_floating_point() or logits.shape[:-1].numel() != targets.numel():
            kind = str(targets.dtype).removeprefix("torch.")
            raise OutputError(
                f"it takes logits [..., vocabulary] and a whole number for each as target, not "
                f"logits {list(logits.shape)} and targets {list(targets.shape)} of {kind}"
            )
        return F.cross_entropy(
            logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum"
        )

    def count(self, targets: Tensor) -> Tensor:
        return (targets != IGNORE).sum()


class Mse(Loss):
    """Squared differences of output and targets (in fp32): their mean over all elements."""

    def total(self, output: Any, targets: Tensor) -> Tensor:
        output = logits_of(output)
        if output.shape != targets.shape:  # torch would broadcast, which is hardly ever intended
            raise OutputError(
                f"it takes an output and targets of one shape, not {list(output.shape)} and "
                f"{list(targets.shape)}"
            )
        return (output.float() - targets.float()).square().sum()

    def count(self, targets: Tensor) -> Tensor:
        return torch.tensor(targets.numel(), device=targets.device)


class CustomLoss(Loss):
    """A function of the user's own, `function(output, targets)`: losses, one by one."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function
        self._count = getattr(function, "count", None)
        self.counts = self._count is not None

    def losses(self, output: Any, targets: Tensor) -> Tensor:
        losses = self._function(output, targets)
        if not isinstance(losses, Tensor):
            raise OutputError(f"it returns {describe(losses)} and not a tensor of losses")
        if losses.dim() == 0:
            raise OutputError("it returns a mean or another scalar; return the losses unreduced")
        return losses

    def total(self, output: Any, targets: Tensor) -> Tensor:
        return self.losses(output, targets).float().sum()

    def count(self, targets: Tensor) -> Tensor | None:
        if self._count is None:
            return None
        return torch.as_tensor(self._count(targets), device=targets.device).sum()

    def terms(self, output: Any, targets: Tensor) -> int:
        with torch.device("meta"):
            return self.losses(output, targets).numel()

    def measure(self, output: Any, targets: Tensor) -> tuple[Tensor, float]:
        losses, count = self.losses(output, targets), self.count(targets)
        return losses.float().sum(), float(losses.numel() if count is None else count)


def logits_of(output: Any) -> Any:
    """The tensor that a built-in loss is computed of: the output, or what is called logits in it."""
    named = (
        output
        if isinstance(output, dict)
        else dataclass_fields(output)
        if is_plain_dataclass(output)
        else {}
    )
    found = named.get("logits", getattr(output, "logits", None))
    if found is not None:
        return found
    if hasattr(output, "shape") or hasattr(output, "kind"):  # a tensor, or what stands for one
        return output
    raise OutputError(
        f"the model's forward returns {describe(output)}, in which nothing is called logits"
    )


def build_loss(config: Settings, device: torch.device | None = None) -> Loss:
    """The loss that a config names. Raises ConfigError where it is the user's own and wrong."""
    match config:
        case schema.CrossEntropy():
            return CrossEntropy()
        case schema.ChunkedCrossEntropy():
            return CrossEntropy(config.chunk)
        case schema.Mse():
            return Mse()
    return _own(config, device)


def check_loss(config: Settings, output: Any, targets: Tensor, rows: int) -> list[Problem]:
    """What is wrong with a loss, by a call on meta; output and targets: of a microbatch [rows, ...]."""

    def wrong(reason: str, fix: str) -> list[Problem]:
        return [Problem("loss.name", config.name, reason, fix)]

    try:
        loss = build_loss(config)
        with torch.device("meta"):
            loss.total(output, targets)
        if not isinstance(loss, CustomLoss) or loss.counts:
            return []
        one = loss.terms(output, targets)
        two = loss.terms(tree_map(output, lambda x: _twice(x, rows)), _twice(targets, rows))
    except ConfigError as error:
        return error.problems
    except OutputError as error:
        scalar = "scalar" in str(error)
        fix = "reduction='none', without .mean() and .sum()" if scalar else _FIX
        return wrong(str(error), fix)
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        if "meta" in text:
            reason = f"it reads the values of tensors ({text}); it is called here on shapes alone"
            return wrong(reason, "write it without .item(), .tolist() and `if tensor:`")
        shapes = f"an output that is {describe(output)} and targets {list(targets.shape)}"
        return wrong(f"with {shapes} it raised {type(error).__name__}: {text}", _FIX)
    if two != 2 * one:
        reason = f"it returns {one} losses for {rows} sequences and {two} for {2 * rows}"
        return wrong(reason, "return the losses of each sequence by itself, [B, ...]")
    return []


_FIX = "loss.name=package.function, a function of your own that takes them"


def _twice(value: Any, rows: int) -> Any:
    """A tensor of twice as many sequences; anything else as it is."""
    if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != rows:
        return value
    return torch.cat([value, value])


def _own(config: Custom, device: torch.device | None) -> Loss:
    def wrong(key: str, value: Any, reason: str, fix: str) -> ConfigError:
        return ConfigError([Problem(key, value, reason, fix)])

    try:
        found = import_object(config.name)
    except ValueError as error:
        fix = "a function as package.module.function, on the Python path"
        fix = "" if "did you mean" in str(error) else fix
        raise wrong("loss.name", config.name, str(error), fix) from None
    if not callable(found):
        raise wrong("loss.name", config.name, "is no function", "loss=cross_entropy")
    first = () if inspect.isclass(found) else (None, None)
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):  # written in C, without a signature
        signature = None
    if signature is not None:
        taken = signature.parameters.values()
        known = [p.name for p in list(taken)[len(first) :] if p.kind not in (p.VAR_POSITIONAL,)]
        if not any(p.kind == p.VAR_KEYWORD for p in taken):
            for key in config.args.keys() - set(known):
                near = nearest(key, known)
                fix = f"loss.{near}=..." if near else f"its arguments: {', '.join(known) or 'none'}"
                raise wrong(f"loss.{key}", config.args[key], f"{config.name} has no such key", fix)
        try:
            signature.bind(*first, **config.args)
        except TypeError as error:
            fix = "a function (output, targets, ...), its other arguments given as +loss.NAME=..."
            reason = f"cannot be called with (output, targets) and its keys: {error}"
            raise wrong("loss.name", config.name, reason, fix) from None
    if not inspect.isclass(found):
        return CustomLoss(_with(found, config.args))
    try:
        made = found(**config.args)
    except Exception as error:
        reason = f"building it raised {type(error).__name__}: {error}"
        raise wrong("loss.name", config.name, reason, "other arguments") from error
    if not callable(made):
        reason = "is a class whose instances cannot be called"
        raise wrong("loss.name", config.name, reason, "a method __call__(self, output, targets)")
    if isinstance(made, nn.Module):
        if next(made.parameters(), None) is not None:
            reason = "has parameters, and only the model's are trained"
            raise wrong("loss.name", config.name, reason, "a model that holds them")
        made = made.to(device)
    return CustomLoss(made)


def _with(function: Callable[..., Any], args: dict[str, Any]) -> Callable[[Any, Tensor], Any]:
    def call(output: Any, targets: Tensor) -> Any:
        return function(output, targets, **args)

    count = getattr(function, "count", None)
    if count is not None:
        call.count = count  # type: ignore[attr-defined]
    return call
