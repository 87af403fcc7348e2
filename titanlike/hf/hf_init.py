"""Initial weights of a transformers model from scratch, without the full model in memory.

transformers initializes module by module with torch's functions. It does so once on the meta
device, where each parameter's writes are recorded: a normal distribution or a constant. A rank then
initializes the rows of its shards from (seed, name), as for any other model. Parameters initialized
differently (a ramp, a uniform distribution) come from a model constructed with only these in
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from titanlike.core.distributed.initialize import draw, drawing_threads, parameters_on_meta, seeded
from titanlike.core.distributed.placement import Slices

_CONSTANT = {"zero_": 0.0, "zeros_": 0.0, "ones_": 1.0}


@dataclass(frozen=True)
class Write:
    """A write to a parameter, or to one row: normal(mean, std), or the constant mean if std is
    0."""

    row: int | None  # None = all
    mean: float
    std: float


class ScratchWeights:
    """`InitialWeights` by transformers' own initialization, from seed and parameter name."""

    origin = "from scratch: transformers' initialization, from seed and parameter name"

    def __init__(self, build: Callable[[], Any], seed: int, everything: bool = True) -> None:
        """build: constructs the model on torch's default device; everything: initialize parameters
        and buffers, else only buffers."""
        self._seed = seed
        with torch.device("meta"):
            meta = build()
        self._writes = record_initialization(meta) if everything else {}
        custom = {name for name, writes in self._writes.items() if writes is None}
        parts = [name.rpartition(".") for name in custom]
        real_ones = {(type(meta.get_submodule(path)), last) for path, _, last in parts}
        on_meta = parameters_on_meta(lambda module, name: (type(module), name) in real_ones)
        with seeded(seed), on_meta, torch.device("cpu"):
            real = build()
        values = dict(real.named_parameters())
        self._custom = {name: values[name].detach() for name in custom}
        self._buffers = dict(real.named_buffers(remove_duplicate=False))

    def block(self, name: str, shape: torch.Size, place: Slices) -> Tensor:
        if name in self._custom:
            return self._custom[name][place]
        rows, *inside = place or (slice(0, 1),)
        out = torch.empty(0)
        writes = self._writes[name]
        assert writes is not None
        for write in writes:
            if write.row is None:
                threads = drawing_threads()
                out = draw(shape, rows, self._seed, name, write.mean, write.std, threads)
            elif rows.start <= write.row < rows.stop:
                out[write.row - rows.start] = write.mean
        return out[:, *inside] if inside else out

    def buffer(self, name: str) -> Tensor:
        return self._buffers[name]


def record_initialization(model: Any) -> dict[str, list[Write] | None]:
    """Record transformers' writes to each parameter of a model on meta; None for a parameter with
    any that is neither normal nor constant."""
    recorder = _Recorder(model)
    with torch.no_grad(), recorder:
        model.initialize_weights()
    return {name: recorder.writes.get(name) for name, _ in model.named_parameters()}


class _Recorder(TorchFunctionMode):
    """Records in-place calls of torch's functions on a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._rows: dict[int, tuple[str, int]] = {}  # id of a row -> its parameter and index
        self._alive: list[Tensor] = []  # rows, so that ids stay unique
        self.writes: dict[str, list[Write] | None] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        called = getattr(function, "__name__", "")
        target = args[0] if args else kwargs.get("tensor")
        result = function(*args, **kwargs)
        if not isinstance(target, Tensor):
            return result
        name = self._names.get(id(target))
        if called == "__getitem__" and name is not None and type(args[1]) is int:
            self._rows[id(result)] = name, args[1] % target.size(0)
            self._alive.append(result)
        elif called.endswith("_") and not called.startswith("__") or called == "__setitem__":
            base = target._base if target._base is not None else target
            name, row = self._rows.get(id(target), (self._names.get(id(base)), None))
            if name is not None:
                unknown_view = target is not base and row is None
                self._add(name, row, None if unknown_view else _distribution(called, args, kwargs))
        return result

    def _add(self, name: str, row: int | None, distribution: tuple[float, float] | None) -> None:
        before = self.writes.get(name)
        if distribution is None or (row is not None and (before is None or distribution[1] != 0)):
            self.writes[name] = None
        else:
            written = before or []
            self.writes[name] = [*(written if row is not None else []), Write(row, *distribution)]


def _distribution(
    called: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[float, float] | None:
    """(mean, std) of a recorded write; None if it is neither normal nor constant."""
    if called in _CONSTANT:
        return _CONSTANT[called], 0.0
    if called == "normal_":
        arguments = dict(zip(("tensor", "mean", "std"), args, strict=False)) | kwargs
        return float(arguments.get("mean", 0.0)), float(arguments.get("std", 1.0))
    if called in ("fill_", "constant_"):
        value: Any = args[1] if len(args) > 1 else kwargs.get("val", kwargs.get("value"))
        return float(value), 0.0
    return None
