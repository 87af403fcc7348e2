"""Built-in losses: summed over the terms of a microbatch, and scaled so that microbatches add up.

A mean of means is wrong if microbatches have different numbers of valid tokens. So each microbatch
returns the SUM of its terms times `scale`, which contains the normalizer of the whole step; the
result is the same in every layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.groups import optimization
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.data.sources import IGNORE
from titanlike.core.graph.loss import Loss, OutputError
from titanlike.core.graph.recording import describe, tree_flatten, used_by

# (this rank's logits fp32 [N, V / tp], targets [N], ignore_index, z-loss) -> losses [N]
DividedCrossEntropy = Callable[[Tensor, Tensor, int, float], Tensor]
Settings = optimization.CrossEntropy | optimization.ChunkedCrossEntropy | optimization.Mse | Custom


class CrossEntropy(Loss):
    """Cross entropy in nats of logits [B, T, V] (computed in fp32) with targets [B, T].

    chunk: tokens per chunk, see `chunked_loss.py`; None = no chunks. divided: computes the losses
    from this rank's shard of the vocabulary; None = logits are full. z_loss: coefficient of
    log(sum(exp(logits)))^2, which training adds to a token's loss to keep logits from drifting
    (PaLM, arXiv 2204.02311, section 5). mtp_weight: weight of multi-token prediction: if not 0,
    logits in training are [B, (1 + P) * T, V], those of the next token, then of P tokens after it.
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
        if self.compiled and rows.is_meta:  # same memory traffic as the compiled kernel
            return rows.new_zeros((), dtype=torch.float32), rows.exp().view_as(output)
        function = _compiled_cross_entropy() if self.compiled else cross_entropy_and_gradient
        total, gradient = function(rows, targets.flatten(), self._z_loss)
        return total, gradient.view_as(output)

    def predictions(self, x: Any, targets: Tensor) -> list[tuple[Any, Tensor, float]]:
        several = self._mtp_weight and targets.dim() == 2 and x.dim() == 3
        rows = targets.shape[-1]
        more = x.shape[1] // rows - 1 if several and x.shape[1] % rows == 0 else 0
        terms = [(x[:, :rows] if more else x, targets, 1.0)]
        for later in range(
            1, more + 1 if torch.is_grad_enabled() else 1
        ):  # the targets of their last tokens lie beyond the sequence
            ignored = targets.new_full((len(targets), later), IGNORE)
            shifted = torch.cat([targets[:, later:], ignored], 1)
            part = x[:, later * rows : (later + 1) * rows]
            terms.append((part, shifted, self._mtp_weight / more))
        return terms

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
    """Compute the summed cross entropy of logits [N, V] with targets [N], an fp32 scalar, and its
    gradient with respect to the logits, in their dtype. Computes in fp32, without autograd.

    Autograd reads and writes fp32 logits six times. Compiled, this reads the logits twice (for a
    row's sum, and for its gradient) and materializes no fp32 copy, as the fused kernel of arXiv
    2410.10989.
    """
    counted = targets != IGNORE
    index = targets.masked_fill(~counted, 0).unsqueeze(-1)
    rows = logits.float()
    logs = torch.log_softmax(rows, -1)
    target_logs = logs.gather(-1, index)
    losses, weights = -target_logs, counted.float().unsqueeze(-1)
    if z_loss:
        log_sums = rows.gather(-1, index) - target_logs
        losses = losses + z_loss * log_sums.square()
        weights = weights * (1 + 2 * z_loss * log_sums)
    del rows  # frees as much memory as the rest needs
    gradient = logs.exp_().mul_(weights).to(logits.dtype)
    missing = target_logs.exp() * weights - counted.float().unsqueeze(-1)
    gradient.scatter_(-1, index, missing.to(logits.dtype))
    return losses.squeeze(-1).masked_fill(~counted, 0).sum(), gradient


@functools.cache
def _compiled_cross_entropy() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(cross_entropy_and_gradient)


class Mse(Loss):
    """Squared error of output and targets (in fp32), averaged over all elements."""

    def each(self, output: Any, targets: Tensor) -> Tensor:
        output = logits_of(output)
        if output.shape != targets.shape:  # torch would broadcast, which is hardly ever intended
            shapes = f"{list(output.shape)} and {list(targets.shape)}"
            raise OutputError(f"it takes an output and targets of one shape, not {shapes}")
        return (output.float() - targets.float()).square()

    def count(self, targets: Tensor) -> Tensor:
        return torch.full((), targets.numel(), device=targets.device)


class Kept(Loss):
    """Not a loss: collects what a function returns for each (output, targets), without gradients."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self._function = function
        self.kept: list[Any] = []

    def total(self, output: Any, targets: Tensor) -> Tensor:
        self.kept.append(self._function(output, targets))
        return torch.zeros((), device=targets.device)


def logits_of(output: Any) -> Any:
    """Return the logits of a model's output: its `logits` entry or attribute, else the output
    itself."""
    named = isinstance(output, dict) and "logits" in output
    logits = output["logits"] if named else getattr(output, "logits", None)
    if logits is not None:
        return logits
    if hasattr(output, "shape") or hasattr(output, "kind"):  # a tensor, or a recorded node
        return output
    reason = f"the model's forward returns {describe(output)}, in which nothing is called logits"
    raise OutputError(reason)


def build_loss(
    config: Settings, device: torch.device | None = None, divided: DividedCrossEntropy | None = None
) -> Loss:
    """Build the loss that a config names. Raises ConfigError if it is a custom loss and invalid.

    divided: cross entropy of vocabulary-parallel logits, see `takes_divided_logits`.
    """
    if isinstance(config, Custom):
        from titanlike.core.optim.custom_loss import custom_loss

        return custom_loss(config, device)
    if isinstance(config, optimization.Mse):
        return Mse()
    chunk = config.chunk if isinstance(config, optimization.ChunkedCrossEntropy) else None
    return CrossEntropy(chunk, divided, config.z_loss, config.mtp_weight)


def takes_divided_logits(config: Settings) -> bool:
    """Whether the loss can be computed from logits sharded over the vocabulary (loss parallel)."""
    return isinstance(config, optimization.CrossEntropy | optimization.ChunkedCrossEntropy)


def check_loss(config: Settings, output: Any, targets: Tensor, rows: int) -> list[Problem]:
    """Return problems of a loss, by calling it on meta.

    output, targets: of a microbatch, [rows, ...], on meta.
    """
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
    """Whether the loss uses each tensor of a model's output; output and targets are on meta."""
    with torch.device("meta"), torch.enable_grad():
        total = loss.total(output, targets)
    return used_by(total, [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)])
