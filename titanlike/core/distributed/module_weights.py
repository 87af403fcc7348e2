"""Initial weights by modules' own `reset_parameters` and the model's `_init_weights`, block by
block: of a model whose constructor would need more memory than a rank has.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.device.memory import total_memory
from titanlike.core.distributed.initialize import piece_seed, seeded
from titanlike.core.distributed.placement import Slices

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_SHARE = 0.8  # of a rank's share of host memory: what constructing a model may take


def too_large_to_construct(model: nn.Module) -> bool:
    """Whether host memory is too small to construct the full model, in fp32, on each rank here."""
    room = total_memory(torch.device("cpu"), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return room is not None and sum(4 * p.numel() for p in model.parameters()) > _SHARE * room


class ModuleWeights:
    """Weights as `reset_parameters` of each module and `_init_weights` of the model leave them.

    One block is allocated at a time: a module of a ModuleList, or a direct child of the model. Each
    of its modules runs `reset_parameters`, inner ones first, then `model._init_weights(module)`,
    with torch's generator seeded by (seed, name of the module). Other writes to parameters that the
    constructor makes are not repeated.
    """

    origin = (
        "each module's reset_parameters and the model's _init_weights, from seed and name: the "
        "whole model does not fit into the memory of a rank"
    )

    def __init__(self, model: nn.Module, name: str, seed: int, buffers: dict[str, Tensor]) -> None:
        """model: on meta; name: of `model.name`. Raises ConfigError for parameters that nothing
        sets."""
        self._model, self._seed, self._buffers = model, seed, buffers
        self._block: tuple[str, dict[str, Tensor]] = "", {}
        self._of_all = getattr(model, "_init_weights", None)
        self._name = name
        for path, module in model.named_modules():
            names = [last for last, _ in module.named_parameters(recurse=False)]
            above = (model.get_submodule(at) for at in _ancestors(path, self._top(path)))
            if names and self._of_all is None and not any(map(_reset_of, above)):
                raise self._problem(f"{path}.{names[0]}".strip("."))

    def _problem(self, parameter: str) -> ConfigError:
        reason = (
            f"its constructor needs more memory than a rank has, and neither reset_parameters of a "
            f"module nor _init_weights of the model sets {parameter}"
        )
        fix = "a reset_parameters of its module, or the model's initial(name) -> (mean, std)"
        return ConfigError([Problem("model.name", self._name, reason, fix)])

    def _top(self, path: str) -> str:
        """The name of the block that contains a module."""
        names = path.split(".")
        for depth in range(1, len(names) + 1):
            if not isinstance(self._model.get_submodule(".".join(names[:depth])), _CONTAINERS):
                return ".".join(names[:depth])
        return path

    def block(self, name: str, shape: torch.Size, place: Slices) -> Tensor:
        top = self._top(name.rpartition(".")[0])
        if self._block[0] != top or not self._block[1]:
            self._block = top, self._values(top)
        return self._block[1][name][place]

    def buffer(self, name: str) -> Tensor:
        return self._buffers[name]

    @torch.no_grad()
    def _values(self, top: str) -> dict[str, Tensor]:
        """Initialize a block; its parameters by their names in the model. For the model itself,
        those that it holds directly."""
        block = self._model.get_submodule(top)
        if top:
            block = copy.deepcopy(block)
        else:  # the model itself: its children stay on meta
            block = copy.copy(block)
            block._parameters = dict(block._parameters)
        held = [(path, m) for path, m in block.named_modules(prefix=top) if top or m is block]
        for _, module in held:
            for last, parameter in module._parameters.items():
                if parameter is not None:
                    real = torch.full_like(parameter, torch.nan, device="cpu")
                    module._parameters[last] = nn.Parameter(real, parameter.requires_grad)
            for last, buffer in module._buffers.items() if top else ():
                if buffer is not None:
                    module._buffers[last] = torch.zeros_like(buffer, device="cpu")
        inner_first = sorted(held, key=lambda item: -len(item[0].split(".")) if item[0] else 0)
        for run in (_reset_of, lambda module: self._of_all and (lambda: self._of_all(module))):
            for path, module in inner_first:
                if (call := run(module)) is not None:
                    with seeded(piece_seed(self._seed, path, 0)):
                        call()
        parameters = {f"{path}.{n}".strip("."): p for path, m in held for n, p in _own(m)}
        for name, values in parameters.items():
            if values.isnan().any():
                raise self._problem(name)
        return parameters


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((n, p.detach()) for n, p in module._parameters.items() if p is not None)


def _ancestors(path: str, top: str) -> Iterator[str]:
    """The names of the module and its parents, up to its block's."""
    while path != top:
        yield path
        path = path.rpartition(".")[0]
    yield top


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    names = ("reset_parameters", "_reset_parameters")  # the latter of nn.MultiheadAttention
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)
