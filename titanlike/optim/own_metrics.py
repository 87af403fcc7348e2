"""Metrics of the user's own (`metrics.own`): functions f(output, targets) that return a sum and a
count as tensors, called with what the loss is computed of, a microbatch or a chunk of its tokens.

Of logits that tensor-parallel ranks share each gets the whole; a context-parallel rank has its
tokens. Sums and counts are added over all ranks and microbatches, so a function whose sums of parts
do not add up to its sum of the whole is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.imports import import_object
from titanlike.config.schema import Config
from titanlike.distributed.mesh import Mesh
from titanlike.distributed.transform import StepSums, Transform
from titanlike.graph.loss import Loss, OutputError
from titanlike.graph.recording import tree_flatten, tree_map
from titanlike.optim.loss import logits_of

Function = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
_TOKENS = 8  # with which a function is tried
_CLOSE = 1e-3
_NAME = re.compile(r"(?!val_)[A-Za-z]\w*(?<!_seconds)(?<!_bytes)(?<!_per_second)")
_TAKEN = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "samples",
    "time",
    "mfu",
    "skipped",
    "digest",
}


def own_functions(config: Config) -> dict[str, Function]:
    """name -> function. Raises ConfigError."""
    found: dict[str, Function] = {}
    for name, path in (config.metrics.own or {}).items():
        if not _NAME.fullmatch(name) or name in _TAKEN:
            reason, fix = "is no name for one, or of another number", "a name such as accuracy"
            raise ConfigError([Problem(f"metrics.own.{name}", path, reason, fix)])
        try:
            found[name] = import_object(path)
        except ValueError as error:
            fix = f"metrics.own={{{name}:package.module.function}}"
            raise ConfigError([Problem(f"metrics.own.{name}", path, str(error), fix)]) from None
    return found


class OwnMetrics:
    """The metrics of this rank's microbatches, by `metrics.own`. `watch` is called by the loss."""

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
        self._copies = mesh.world_size // (mesh.pp * mesh.stage_copies)  # of the same tokens
        self._found: list[Tensor] | None = None  # of each output; None = they are not watched

    def begin(self) -> None:
        """Watch the outputs from here to `take` or `take_sums`."""
        self._found = []

    def watch(self, output: Any, targets: Tensor) -> None:
        if self._found is None:
            return
        with torch.no_grad():
            output = tree_map(output, lambda x: x.detach() if isinstance(x, Tensor) else x)
            if self._tp is not None:
                part = logits_of(output)
                whole = self._tp.logits(part)
                output = tree_map(output, lambda x: whole if x is part else x)
            if isinstance(output, Tensor):  # of the next token alone
                (output, targets, _), *_ = self._loss.predictions(output, targets)
            pairs = [function(output, targets) for function in self._functions]
            sums, counts = (
                [x.float().reshape(()) for x in each] for each in zip(*pairs, strict=True)
            )
            self._found.append(torch.stack([*sums, *counts]))

    def take(self) -> Tensor:
        """This rank's part of a step's sums and counts, fp32: what all ranks' parts add up to,
        `finish` makes numbers of."""
        found, self._found = self._found or [], None
        if self._sums is not None:
            columns = torch.stack(found).unbind(1) if found else [None] * 2 * len(self.names)
            return torch.cat([self._sums.losses([] if c is None else [*c]) for c in columns])
        return self._added(found, torch.float32)

    def finish(self, total: Tensor) -> Tensor:
        both = total.view(2, len(self.names), -1)
        if self._sums is not None:
            both = torch.stack([self._sums.total(x) for x in both.flatten(0, 1)]).view(
                both[..., 0].shape
            )
        sums, counts = both.view(2, -1)
        return sums / counts

    def take_sums(self) -> Tensor:
        """This rank's sums and counts, fp64: of outputs that are weighted first."""
        found, self._found = self._found or [], None
        return self._added(found, torch.float64)

    def _added(self, found: list[Tensor], dtype: torch.dtype) -> Tensor:
        none = torch.zeros(2 * len(self.names), dtype=dtype, device=self._mesh.device)
        return sum((one.to(dtype) for one in found), none) / self._copies


def metric_problems(config: Config, output: Any, targets: Tensor) -> list[Problem]:
    """What is wrong with each function, tried on random outputs like that of a microbatch, on
    meta."""
    return [
        Problem(f"metrics.own.{name}", (config.metrics.own or {})[name], *wrong)
        for name, function in own_functions(config).items()
        if (wrong := _wrong(function, config, output, targets)) is not None
    ]


def _wrong(
    function: Function, config: Config, output: Any, targets: Tensor
) -> tuple[str, str] | None:
    fix = "return a sum and a count, tensors with one element each"
    generator = torch.Generator().manual_seed(0)
    length = targets.shape[1] if targets.dim() > 1 else 0
    try:
        classes = logits_of(output).shape[-1]
    except OutputError:
        classes = 2

    def drawn(x: Any) -> Any:
        """Two rows, of few tokens, of random numbers."""
        if not isinstance(x, Tensor) or not x.dim():
            return x
        shape = [2, *x.shape[1:]]
        if length and len(shape) > 1 and shape[1] == length:
            shape[1] = min(_TOKENS, length)
        if x.is_floating_point():
            return torch.randn(shape, generator=generator).to(x.dtype)
        return torch.randint(classes, shape, generator=generator).to(x.dtype)

    def part(value: Any, dim: int, half: int) -> Any:
        def cut(x: Any) -> Any:
            even = isinstance(x, Tensor) and x.dim() > dim and x.shape[dim] == size
            return x.chunk(2, dim)[half] if even else x

        return tree_map(value, cut)

    output, targets = tree_map(output, drawn), drawn(targets)
    in_parts = config.cp > 1 or getattr(config.loss, "chunk", None) is not None
    try:
        whole = torch.stack([x.double().reshape(()) for x in function(output, targets)])
        if len(whole) != 2:
            return f"returns {len(whole)} values", fix
        for dim in (0, 1) if in_parts and length > 1 else (0,):
            size = targets.shape[dim]
            halves = [function(part(output, dim, h), part(targets, dim, h)) for h in (0, 1)]
            added = torch.stack([torch.stack([x.double() for x in half]) for half in halves]).sum(0)
            if not torch.allclose(added, whole, _CLOSE, _CLOSE):
                if dim == 0:
                    return "its sums over two samples do not add up to that of both", fix
                reason = "its sums over parts of a sequence do not add up to that of the whole"
                return reason, "a metric of each token, or cp=1 and loss=cross_entropy"
    except Exception as error:
        shapes = [list(x.shape) for x in tree_flatten(output)[0] if isinstance(x, Tensor)]
        text = (str(error).strip().splitlines() or [""])[0]
        given = f"with an output {shapes} and targets {list(targets.shape)} it raised"
        return f"{given} {type(error).__name__}: {text}", fix
    return None
