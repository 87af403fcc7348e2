"""The loss of a microbatch: summed over its terms, scaled so that all microbatches add up.

A mean of means is wrong as soon as microbatches hold unequal numbers of valid tokens. So every
microbatch gives the SUM of its terms times `scale`, which holds the step's normalizer; the same
number comes out whatever the layout.

A loss of the user's own is a function `f(output, targets, **args)` that returns the losses one by
one. Its sum is made here, and divided by `f.count(targets)` where it has such a method (how many of
them count, e.g. because padding does not), else by the number of losses.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.config import schema
from titanlike.config.errors import ConfigError, Problem, nearest, override_text
from titanlike.config.imports import import_object
from titanlike.config.schema import Custom
from titanlike.data.sources import IGNORE
from titanlike.graph.gradient_flow import used_by
from titanlike.graph.pytree import describe, tree_flatten, tree_map

if TYPE_CHECKING:
    from titanlike.parallel.tp.collectives import DividedVocabulary

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

    def each(self, output: Any, targets: Tensor) -> Tensor:
        """The terms one by one, those of a sequence together."""
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
        count = self.count(targets)
        assert count is not None, "a loss without a count of targets has a `measure` of its own"
        return self.total(output, targets), float(count)


class CrossEntropy(Loss):
    """Cross entropy in nats of logits [B, T, V] (computed in fp32) with targets [B, T].

    chunk: the pipeline computes it of so many tokens at a time, see `chunked_loss.py`.
    vocabulary: logits are this rank's part [B, T, V / tp]; None = all.
    """

    def __init__(
        self, chunk: int | None = None, vocabulary: DividedVocabulary | None = None
    ) -> None:
        super().__init__()
        self.chunk, self._vocabulary = chunk, vocabulary

    def total(self, output: Any, targets: Tensor) -> Tensor:
        return self._cross_entropy(output, targets, "sum")

    def each(self, output: Any, targets: Tensor) -> Tensor:
        return self._cross_entropy(output, targets, "none")

    def _cross_entropy(self, output: Any, targets: Tensor, reduction: str) -> Tensor:
        logits = logits_of(output)
        if targets.is_floating_point() or logits.shape[:-1].numel() != targets.numel():
            takes = "logits [..., vocabulary] and a whole number for each as target"
            kind = str(targets.dtype).removeprefix("torch.")
            given = f"logits {list(logits.shape)} and targets {list(targets.shape)} of {kind}"
            raise OutputError(f"it takes {takes}, not {given}")
        rows, goals = logits.flatten(0, -2).float(), targets.flatten()
        if self._vocabulary is not None:
            each = self._vocabulary.cross_entropy(rows, goals, IGNORE)
            return each.sum() if reduction == "sum" else each
        return F.cross_entropy(rows, goals, ignore_index=IGNORE, reduction=reduction)

    def count(self, targets: Tensor) -> Tensor:
        return (targets != IGNORE).sum()


class Mse(Loss):
    """Squared differences of output and targets (in fp32): their mean over all elements."""

    def total(self, output: Any, targets: Tensor) -> Tensor:
        return self.each(output, targets).sum()

    def each(self, output: Any, targets: Tensor) -> Tensor:
        output = logits_of(output)
        if output.shape != targets.shape:  # torch would broadcast, which is hardly ever intended
            shapes = f"{list(output.shape)} and {list(targets.shape)}"
            raise OutputError(f"it takes an output and targets of one shape, not {shapes}")
        return (output.float() - targets.float()).square()

    def count(self, targets: Tensor) -> Tensor:
        return torch.full((), targets.numel(), device=targets.device)


class CustomLoss(Loss):
    """A function of the user's own, `function(output, targets)`: losses, one by one."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function
        self.count_function = getattr(function, "count", None)  # targets -> how many losses count

    def losses(self, output: Any, targets: Tensor) -> Tensor:
        losses = self._function(output, targets)
        if not isinstance(losses, Tensor):
            raise OutputError(f"it returns {describe(losses)} and not a tensor of losses")
        if losses.dim() == 0:
            raise OutputError("it returns a mean or another scalar; return the losses unreduced")
        return losses

    def total(self, output: Any, targets: Tensor) -> Tensor:
        return self.losses(output, targets).float().sum()

    def each(self, output: Any, targets: Tensor) -> Tensor:
        return self.losses(output, targets)

    def count(self, targets: Tensor) -> Tensor | None:
        if self.count_function is None:
            return None
        count = self.count_function(targets)
        if isinstance(count, int | float):
            return torch.full((), count, device=targets.device)  # a copy would wait for the device
        return torch.as_tensor(count, device=targets.device).sum()

    def terms(self, output: Any, targets: Tensor) -> int:
        with torch.device("meta"):
            return self.losses(output, targets).numel()

    def measure(self, output: Any, targets: Tensor) -> tuple[Tensor, float]:
        losses, count = self.losses(output, targets), self.count(targets)
        return losses.float().sum(), float(losses.numel() if count is None else count)


class TermsOf(Loss):
    """Another loss, whose terms it keeps."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self._loss = loss
        self.kept: list[Tensor] = []  # of each call

    def total(self, output: Any, targets: Tensor) -> Tensor:
        self.kept.append(self._loss.each(output, targets).detach())
        return self.kept[-1].sum()


class OutputsAt(Loss):
    """No loss: keeps the logits at the places where the targets are 1."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []  # of each call

    def total(self, output: Any, targets: Tensor) -> Tensor:
        logits = logits_of(output)
        self.kept.append(logits[targets == 1].detach())
        return logits.new_zeros((), dtype=torch.float32)


def logits_of(output: Any) -> Any:
    """The tensor that a built-in loss is computed of: the output, or what is called logits in it."""
    named = isinstance(output, dict) and "logits" in output
    found = output["logits"] if named else getattr(output, "logits", None)
    if found is not None:
        return found
    if hasattr(output, "shape") or hasattr(output, "kind"):  # a tensor, or what stands for one
        return output
    found = describe(output)
    raise OutputError(f"the model's forward returns {found}, in which nothing is called logits")


def build_loss(
    config: Settings,
    device: torch.device | None = None,
    vocabulary: DividedVocabulary | None = None,
) -> Loss:
    """The loss that a config names. Raises ConfigError where it is the user's own and wrong.

    vocabulary: of logits that tensor-parallel ranks share, see `takes_divided_logits`.
    """
    if isinstance(config, Custom):
        return _own(config, device)
    if isinstance(config, schema.Mse):
        return Mse()
    chunk = config.chunk if isinstance(config, schema.ChunkedCrossEntropy) else None
    return CrossEntropy(chunk, vocabulary)


def takes_divided_logits(config: Settings) -> bool:
    """Whether tensor-parallel ranks can compute the loss from a part of the vocabulary each."""
    return isinstance(config, schema.CrossEntropy | schema.ChunkedCrossEntropy)


def check_loss(config: Settings, output: Any, targets: Tensor, rows: int) -> list[Problem]:
    """What is wrong with a loss, by a call on meta; output and targets: of a microbatch [rows, ...]."""

    def wrong(reason: str, fix: str) -> list[Problem]:
        return [Problem("loss.name", config.name, reason, fix)]

    try:
        loss = build_loss(config)
        with torch.device("meta"):
            loss.total(output, targets)
        if not isinstance(loss, CustomLoss) or loss.count_function is not None:
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


def trained_outputs(loss: Loss, output: Any, targets: Tensor) -> list[bool]:
    """For each tensor of a model's output, whether the loss uses it; both are on meta."""
    with torch.device("meta"), torch.enable_grad():
        total = loss.total(output, targets)
    return used_by(total, [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)])


_FIX = "loss.name=package.function, a function of your own that takes them"


def _twice(value: Any, rows: int) -> Any:
    """A tensor of twice as many sequences; anything else as it is."""
    batched = isinstance(value, Tensor) and value.dim() and value.shape[0] == rows
    return torch.cat([value, value]) if batched else value


def _own(config: Custom, device: torch.device | None) -> Loss:
    def wrong(reason: str, fix: str) -> ConfigError:
        return ConfigError([Problem("loss.name", config.name, reason, fix)])

    try:
        found = import_object(config.name)
    except ValueError as error:
        fix = "a function as package.module.function, on the Python path"
        fix = "" if "did you mean" in str(error) else fix
        raise wrong(str(error), fix) from None
    if not callable(found):
        raise wrong("is no function", "loss=cross_entropy")
    first = () if inspect.isclass(found) else (None, None)
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):  # written in C, without a signature
        signature = None
    if signature is not None:
        taken = list(signature.parameters.values())
        known = [p.name for p in taken[len(first) :] if p.kind != p.VAR_POSITIONAL]
        if not any(p.kind == p.VAR_KEYWORD for p in taken):
            for key in config.args.keys() - set(known):
                near = nearest(key, known)
                value = override_text(config.args[key])
                fix = (
                    f"loss.{near}={value}"
                    if near
                    else f"its arguments: {', '.join(known) or 'none'}"
                )
                reason = f"{config.name} has no such key"
                raise ConfigError([Problem(f"loss.{key}", config.args[key], reason, fix)])
        try:
            signature.bind(*first, **config.args)
        except TypeError as error:
            fix = "a function (output, targets, ...), its other arguments given as +loss.NAME=..."
            reason = f"cannot be called with (output, targets) and its keys: {error}"
            raise wrong(reason, fix) from None
    if not inspect.isclass(found):
        function = functools.partial(found, **config.args)
        function.count = getattr(found, "count", None)  # type: ignore[attr-defined]
        return CustomLoss(function)
    try:
        made = found(**config.args)
    except Exception as error:
        reason = f"building it raised {type(error).__name__}: {error}"
        raise wrong(reason, "other arguments") from error
    if not callable(made):
        reason = "is a class whose instances cannot be called"
        raise wrong(reason, "a method __call__(self, output, targets)")
    if isinstance(made, nn.Module):
        if next(made.parameters(), None) is not None:
            reason = "has parameters, and only the model's are trained"
            raise wrong(reason, "a model that holds them")
        made = made.to(device)
    return CustomLoss(made)
