"""Custom losses: a function `f(output, targets, **args)` that returns unreduced losses.

They are summed here and divided by `f.count(targets)` if there is such a method (the number of
losses that count, e.g. without padding), else by their number.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.core.config.groups.user_code import Custom
from titanlike.core.graph.loss import Loss, OutputError
from titanlike.core.graph.recording import describe, tree_map
from titanlike.core.optim import custom


class CustomLoss(Loss):
    """A loss computed by a custom function (output, targets) -> unreduced losses."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function
        self.count_function = getattr(function, "count", None)  # targets -> how many losses count

    def each(self, output: Any, targets: Tensor) -> Tensor:
        losses = self._function(output, targets)
        if not isinstance(losses, Tensor):
            raise OutputError(f"it returns {describe(losses)} and not a tensor of losses")
        if losses.dim() == 0:
            raise OutputError("it returns a mean or another scalar; return the losses unreduced")
        return losses

    def count(self, targets: Tensor) -> Tensor | None:
        if self.count_function is None:
            return None
        count = self.count_function(targets)
        if isinstance(count, int | float):
            return torch.full((), count, device=targets.device)  # a copy would wait for the device
        return torch.as_tensor(count, device=targets.device).sum()

    def why_not_of_sequences(self, output: Any, targets: Tensor, rows: int) -> str:
        if self.count_function is not None:
            return ""
        count = self.terms(output, targets)
        twice = self.terms(tree_map(output, lambda x: _twice(x, rows)), _twice(targets, rows))
        different = f"it returns {count} losses for {rows} sequences and {twice} for {2 * rows}"
        return "" if twice == 2 * count else different


def custom_loss(config: Custom, device: torch.device | None) -> CustomLoss:
    """Import and build the loss that a config names. Raises ConfigError if it is invalid."""
    function = custom.import_callable("loss", config)
    is_class = inspect.isclass(function)
    positional = {} if is_class else {"output": None, "targets": None}
    custom.check_arguments("loss", config, function, positional)
    if not is_class:
        partial: Any = functools.partial(function, **config.args)
        partial.count = getattr(function, "count", None)
        return CustomLoss(partial)
    try:
        made = function(**config.args)
    except Exception as error:
        reason = f"building it raised {type(error).__name__}: {error}"
        raise custom.wrong("loss", config, reason, "other arguments") from error
    if not callable(made):
        fix = "a method __call__(self, output, targets)"
        raise custom.wrong("loss", config, "is a class whose instances cannot be called", fix)
    if isinstance(made, nn.Module):
        if next(made.parameters(), None) is not None:
            reason = "has parameters, and only the model's are trained"
            raise custom.wrong("loss", config, reason, "a model that holds them")
        made = made.to(device)
    return CustomLoss(made)


def _twice(value: Any, rows: int) -> Any:
    """Repeat a tensor of `rows` sequences along dim 0; return anything else unchanged."""
    batched = isinstance(value, Tensor) and value.dim() and value.shape[0] == rows
    return torch.cat([value, value]) if batched else value
