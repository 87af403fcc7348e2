"""Custom metrics (`metrics.own`): functions f(output, targets) that return a sum and a count, as
tensors. They are called where the loss is, with a microbatch or a chunk of its tokens.

Tensor-parallel ranks pass the full logits; context-parallel ranks pass their own tokens. Sums and
counts are added over all ranks and microbatches, so functions whose sums over parts do not add up
to the sum over the full output are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.imports import import_fix, import_object
from titanlike.core.config.schema import Config
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.distributed.transform import StepSums, Transform
from titanlike.core.graph.loss import Loss
from titanlike.core.graph.recording import describe, tree_flatten, tree_map
from titanlike.core.optim.loss import logits_of

Function = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
_TOKENS = 8  # sequence length with which a function is tried
_CLOSE = 1e-3
_NAME = re.compile(r"(?!val_)[A-Za-z]\w*(?<!_seconds)(?<!_bytes)(?<!_per_second)")
_TAKEN = {  # names of a step's other metrics
    *("step", "loss", "grad_norm", "lr", "tokens", "samples", "time", "mfu", "skipped", "digest"),
    *("microbatch_losses", "busiest_expert", "idlest_expert", "dropped", "busiest_rank"),
}


def functions_of(config: Config) -> dict[str, Function]:
    """Import the custom metrics: name -> function. Raises ConfigError."""
    functions: dict[str, Function] = {}
    for name, path in (config.metrics.own or {}).items():
        if not _NAME.fullmatch(name) or name in _TAKEN:
            reason, fix = "is no name for one, or of another number", "a name such as accuracy"
            raise ConfigError([Problem(f"metrics.own.{name}", path, reason, fix)])
        try:
            functions[name] = import_object(path)
        except ValueError as error:
            fix = f"metrics.own={{{name}:package.module.function}}"
            fix = import_fix(f"metrics.own.{name}", error, fix)
            raise ConfigError([Problem(f"metrics.own.{name}", path, str(error), fix)]) from None
    return functions


class CustomMetrics:
    """Computes the custom metrics of this rank's microbatches. The loss calls `watch`."""

    def __init__(
        self,
        functions: Mapping[str, Function],
        mesh: Mesh,
        loss: Loss,
        tp: Transform | None,
        sums: StepSums | None,
    ) -> None:
        self.names, self._functions = [*functions], [*functions.values()]
        self._mesh, self._loss, self._tp, self._sums = mesh, loss, tp, sums
        # ranks with the same tokens
        self._copies = mesh.world_size // (mesh.pp * mesh.stage_copies)
        self._found: list[Tensor] | None = None  # a vector per output; None = not watching

    def begin(self) -> None:
        """Watch the outputs from now until `take` or `take_sums`."""
        self._found = []

    def watch(self, output: Any, targets: Tensor) -> None:
        """Between `begin` and `take`, add the sums and counts of a microbatch, or a chunk of it: an
        fp32 vector [2 * metrics], the sums first.

        output: what the model returns; with tensor parallelism its logits are this rank's shard
        [..., vocabulary / tp], and functions get the full ones; targets [B, T].
        """
        if self._found is None:
            return
        with torch.no_grad():
            output = tree_map(output, lambda x: x.detach() if isinstance(x, Tensor) else x)
            if self._tp is not None:
                shard = logits_of(output)
                full = self._tp.logits(shard)
                output = tree_map(output, lambda x: full if x is shard else x)
            if isinstance(output, Tensor):  # without the logits of multi-token prediction
                (output, targets, _), *_ = self._loss.predictions(output, targets)
            pairs = [_numbers(function, output, targets) for function in self._functions]
            self._found.append(torch.stack(pairs, 1).flatten().float())

    def take(self) -> Tensor:
        """This rank's sums and counts of a step, fp32, to all-reduce; `finish` makes metrics of the
        total."""
        if self._sums is None:
            return self.take_sums().float()
        values, self._found = self._found or [], None
        columns = ([one[i] for one in values] for i in range(2 * len(self.names)))
        return torch.cat([*map(self._sums.losses, columns)])

    def finish(self, total: Tensor) -> Tensor:
        both = total.view(2 * len(self.names), -1)
        added = both[:, 0] if self._sums is None else torch.stack([*map(self._sums.total, both)])
        return torch.div(*added.view(2, -1))

    def take_sums(self) -> Tensor:
        """This rank's sums and counts, fp64 [2 * metrics], for a caller that weights them."""
        values, self._found = self._found or [], None
        none = torch.zeros(2 * len(self.names), dtype=torch.float64, device=self._mesh.device)
        return sum((one.double() for one in values), none) / self._copies


def metric_problems(config: Config, output: Any, targets: Tensor) -> list[Problem]:
    """Return problems of each function, tried on random tensors of a microbatch's kind.

    output, targets: of a microbatch, on meta.
    """
    length = targets.shape[1] if targets.dim() > 1 else 0
    in_parts = config.cp > 1 or getattr(config.loss, "chunk", None) is not None
    leaves = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
    classes, generator = max(leaves[0].shape[-1], 1), torch.Generator().manual_seed(0)

    def drawn(x: Any) -> Any:
        """Return random values for two samples of at most `_TOKENS` tokens."""
        if not isinstance(x, Tensor) or not x.dim():
            return x
        tokens = length > 1 and x.dim() > 1 and x.shape[1] == length
        shape = [2, min(_TOKENS, length), *x.shape[2:]] if tokens else [2, *x.shape[1:]]
        if x.is_floating_point():
            return torch.randn(shape, generator=generator).to(x.dtype)
        return torch.randint(classes, shape, generator=generator).to(x.dtype)

    tried = tree_map(output, drawn), drawn(targets)
    problems = []
    for name, function in functions_of(config).items():
        fix = "return a sum and a count, tensors with one element each"
        try:
            full = _numbers(function, *tried)
            reason = ""
            for dim, split in enumerate(
                ("two samples", "parts of a sequence")[: 1 + (in_parts and length > 1)]
            ):
                size = tried[1].shape[dim]
                added = sum(_numbers(function, *_half(tried, dim, size, half)) for half in (0, 1))
                if not reason and not torch.allclose(torch.as_tensor(added), full, _CLOSE, _CLOSE):
                    reason = f"its sums over {split} do not add up to that of the whole"
                    fix = "a metric of each token, or cp=1 and loss=cross_entropy" if dim else fix
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0]
            shapes = f"an output {describe(tried[0])} and targets {list(tried[1].shape)}"
            reason = f"with {shapes} it raised {type(error).__name__}: {text}"
        if reason:
            problems.append(
                Problem(f"metrics.own.{name}", (config.metrics.own or {})[name], reason, fix)
            )
    return problems


def _numbers(function: Function, output: Any, targets: Tensor) -> Tensor:
    pair = [torch.as_tensor(x, device=targets.device) for x in function(output, targets)]
    total, count = (x.double().reshape(()) for x in pair)  # of one that counts on the CPU, too
    return torch.stack([total, count])


def _half(value: Any, dim: int, size: int, half: int) -> Any:
    def cut(x: Any) -> Any:
        divided = isinstance(x, Tensor) and x.dim() > dim and x.shape[dim] == size
        return x.chunk(2, dim)[half] if divided else x

    return tree_map(value, cut)
