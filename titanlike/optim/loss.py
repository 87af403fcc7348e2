"""The loss of a microbatch: summed over its terms, scaled so that all microbatches add up.

A mean of means is wrong as soon as microbatches hold unequal numbers of valid tokens. So every
microbatch gives the SUM of its terms times `scale`, which holds the step's normalizer; the same
number comes out whatever the layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlike.config import schema
from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Custom
from titanlike.data.sources import IGNORE
from titanlike.graph.loss import Loss, OutputError
from titanlike.graph.recording import describe, tree_flatten, used_by

# (logits fp32 [N, V], targets [N], the target that does not count, z-loss) -> losses [N]
DividedCrossEntropy = Callable[[Tensor, Tensor, int, float], Tensor]
Settings = schema.CrossEntropy | schema.ChunkedCrossEntropy | schema.Mse | Custom


class CrossEntropy(Loss):
    """Cross entropy in nats of logits [B, T, V] (computed in fp32) with targets [B, T].

    chunk: the pipeline computes it of so many tokens at a time, see `chunked_loss.py`.
    divided: computes it of logits that are this rank's part of the vocabulary; None = of all.
    z_loss: the coefficient of log(sum(exp(logits)))^2 of a token, which training adds to its loss
    so that logits do not drift (PaLM, arXiv 2204.02311, section 5).
    mtp_weight: of the losses of further predicted tokens: in training, where it is not 0, logits
    [B, (1 + P) * T, V] are those of the next token, then of the P after it.
    """

    def __init__(
        self,
        chunk: int | None = None,
        divided: DividedCrossEntropy | None = None,
        z_loss: float = 0.0,
        mtp_weight: float = 0.0,
    ) -> None:
        super().__init__()
        self.chunk, self._divided, self._z_loss = chunk, divided, z_loss
        self._mtp_weight = mtp_weight

    def total(self, output: Any, targets: Tensor) -> Tensor:
        parts = self.predictions(logits_of(output), targets)
        totals = [w * self._cross_entropy(x, t, "sum", self._z_loss) for x, t, w in parts]
        return torch.stack(totals).sum() if len(totals) > 1 else totals[0]

    def total_and_gradient(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self._divided is not None:
            return super().total_and_gradient(output, targets)
        rows = output.detach().flatten(0, -2)
        if self.compiled and rows.is_meta:  # one kernel that reads them and writes as many
            return rows.new_zeros((), dtype=torch.float32), rows.exp().view_as(output)
        function = _compiled_cross_entropy() if self.compiled else cross_entropy_and_gradient
        total, gradient = function(rows, targets.flatten(), self._z_loss)
        return total, gradient.view_as(output)

    def predictions(self, x: Any, targets: Tensor) -> list[tuple[Any, Tensor, float]]:
        several = self._mtp_weight and targets.dim() == 2 and x.dim() == 3
        rows = targets.shape[-1]
        more = x.shape[1] // rows - 1 if several and x.shape[1] % rows == 0 else 0
        found = [(x[:, :rows] if more else x, targets, 1.0)]
        for later in range(
            1, more + 1 if torch.is_grad_enabled() else 1
        ):  # of their own last tokens nothing is known
            ignored = targets.new_full((len(targets), later), IGNORE)
            shifted = torch.cat([targets[:, later:], ignored], 1)
            part = x[:, later * rows : (later + 1) * rows]
            found.append((part, shifted, self._mtp_weight / more))
        return found

    def evaluated(self, output: Any, targets: Tensor) -> Tensor:
        (x, targets, _), *_ = self.predictions(logits_of(output), targets)
        return self._cross_entropy(x, targets, "sum")

    def each(self, output: Any, targets: Tensor) -> Tensor:
        return self._cross_entropy(output, targets, "none")

    def _cross_entropy(
        self, output: Any, targets: Tensor, reduction: str, z_loss: float = 0.0
    ) -> Tensor:
        logits = logits_of(output)
        if targets.dtype != torch.int64 or logits.shape[:-1].numel() != targets.numel():
            takes = "logits [..., vocabulary] and an int64 for each as target"
            kind = str(targets.dtype).removeprefix("torch.")
            given = f"logits {list(logits.shape)} and targets {list(targets.shape)} of {kind}"
            raise OutputError(f"it takes {takes}, not {given}")
        rows, goals = logits.flatten(0, -2).float(), targets.flatten()
        if self._divided is not None:
            losses = self._divided(rows, goals, IGNORE, z_loss)
            return losses.sum() if reduction == "sum" else losses
        loss = F.cross_entropy(rows, goals, ignore_index=IGNORE, reduction=reduction)
        if z_loss:
            squares = rows.logsumexp(-1).square().masked_fill(goals == IGNORE, 0)
            loss = loss + z_loss * squares.sum()
        return loss

    def count(self, targets: Tensor) -> Tensor:
        return (targets != IGNORE).sum()


def cross_entropy_and_gradient(
    logits: Tensor, targets: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """The summed cross entropy of logits [N, V] with targets [N], an fp32 scalar, and its gradient
    with respect to the logits, in their dtype; computed in fp32, without autograd.

    What autograd makes of it reads and writes fp32 logits six times. Compiled, these are in no
    memory: the logits are read twice, for the sum of a row and for its gradient (as the fused
    kernel of arXiv 2410.10989 does).
    """
    counted = targets != IGNORE
    at = targets.masked_fill(~counted, 0).unsqueeze(-1)
    rows = logits.float()
    logs = torch.log_softmax(rows, -1)
    of_targets = logs.gather(-1, at)
    losses, weights = -of_targets, counted.float().unsqueeze(-1)
    if z_loss:
        log_sums = rows.gather(-1, at) - of_targets
        losses = losses + z_loss * log_sums.square()
        weights = weights * (1 + 2 * z_loss * log_sums)
    del rows  # of as much memory as all that follows
    gradient = logs.exp_().mul_(weights).to(logits.dtype)
    missing = of_targets.exp() * weights - counted.float().unsqueeze(-1)
    gradient.scatter_(-1, at, missing.to(logits.dtype))
    return losses.squeeze(-1).masked_fill(~counted, 0).sum(), gradient


@functools.cache
def _compiled_cross_entropy() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(cross_entropy_and_gradient)


class Mse(Loss):
    """Squared differences of output and targets (in fp32): their mean over all elements."""

    def each(self, output: Any, targets: Tensor) -> Tensor:
        output = logits_of(output)
        if output.shape != targets.shape:  # torch would broadcast, which is hardly ever intended
            shapes = f"{list(output.shape)} and {list(targets.shape)}"
            raise OutputError(f"it takes an output and targets of one shape, not {shapes}")
        return (output.float() - targets.float()).square()

    def count(self, targets: Tensor) -> Tensor:
        return torch.full((), targets.numel(), device=targets.device)


class Kept(Loss):
    """No loss: keeps what a function gives of each (output, targets), without gradients."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self._function = function
        self.kept: list[Any] = []

    def total(self, output: Any, targets: Tensor) -> Tensor:
        self.kept.append(self._function(output, targets))
        return torch.zeros((), device=targets.device)


def logits_of(output: Any) -> Any:
    """The tensor that a built-in loss is computed of: the output, or what is called logits in
    it."""
    named = isinstance(output, dict) and "logits" in output
    logits = output["logits"] if named else getattr(output, "logits", None)
    if logits is not None:
        return logits
    if hasattr(output, "shape") or hasattr(output, "kind"):  # a tensor, or what stands for one
        return output
    reason = f"the model's forward returns {describe(output)}, in which nothing is called logits"
    raise OutputError(reason)


def build_loss(
    config: Settings,
    device: torch.device | None = None,
    divided: DividedCrossEntropy | None = None,
) -> Loss:
    """The loss that a config names. Raises ConfigError where it is the user's own and wrong.

    divided: of logits that ranks share, see `takes_divided_logits`.
    """
    if isinstance(config, Custom):
        from titanlike.optim.custom_loss import custom_loss

        return custom_loss(config, device)
    if isinstance(config, schema.Mse):
        return Mse()
    chunk = config.chunk if isinstance(config, schema.ChunkedCrossEntropy) else None
    return CrossEntropy(chunk, divided, config.z_loss, config.mtp_weight)


def takes_divided_logits(config: Settings) -> bool:
    """Whether tensor-parallel ranks can compute the loss from a part of the vocabulary each."""
    return isinstance(config, schema.CrossEntropy | schema.ChunkedCrossEntropy)


def check_loss(config: Settings, output: Any, targets: Tensor, rows: int) -> list[Problem]:
    """What is wrong with a loss, by a call on meta; output and targets: of a microbatch [rows,
    ...]."""
    fix = "loss.name=package.function, a function of your own that takes them"
    try:
        loss = build_loss(config)
        with torch.device("meta"):
            loss.total(output, targets)
        if not (reason := loss.why_not_of_sequences(output, targets, rows)):
            return []
        fix = "return the losses of each sequence by itself, [B, ...]"
    except ConfigError as error:
        return error.problems
    except OutputError as error:
        reason = str(error)
        fix = "reduction='none', without .mean() and .sum()" if "scalar" in reason else fix
        if targets.dtype != torch.int64 and not targets.is_floating_point():
            fix = "targets.long() in the data"
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        if "meta" in text:
            reason = f"it reads the values of tensors ({text}); it is called here on shapes alone"
            fix = "write it without .item(), .tolist() and `if tensor:`"
        else:
            shapes = f"an output that is {describe(output)} and targets {list(targets.shape)}"
            reason = f"with {shapes} it raised {type(error).__name__}: {text}"
    return [Problem("loss.name", config.name, reason, fix)]


def trained_outputs(loss: Loss, output: Any, targets: Tensor) -> list[bool]:
    """Whether the loss uses each tensor of a model's output; both are on meta."""
    with torch.device("meta"), torch.enable_grad():
        total = loss.total(output, targets)
    return used_by(total, [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)])
