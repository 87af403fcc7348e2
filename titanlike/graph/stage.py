"""One stage: the units of the whole model that it runs, under their names in it, and a forward.

The forward is written from a `StageGraph`, one for each shape of batch and for training and
evaluation apart; `Stage.source` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from titanlike.graph.cut import StageGraph
from titanlike.graph.stage_forward import write_forward
from titanlike.graph.unit import Unit
from titanlike.torch_private.pipelining import FIELD


class Stage(nn.Module):
    """Runs consecutive units of a model: what arrives -> what is sent on.

    The first stage takes the batch's "inputs", the others what the stage before sends; keyword
    arguments are fields of the batch. Parameters have the names that they have in the model.
    """

    def __init__(self, model: nn.Module, units: Iterable[str], weights: Iterable[str]) -> None:
        """model: is taken apart."""
        super().__init__()
        self._programs: dict[Hashable, Callable[..., Any]] = {}
        self._current: Hashable = None
        self.source = ""
        for name in units:
            path, _, last = name.rpartition(".")
            self._container(path).add_module(last, model.get_submodule(name))
        for name in weights:
            path, _, last = name.rpartition(".")
            owner, here = model.get_submodule(path), self._container(path)
            if last in owner._parameters:
                here.register_parameter(last, owner._parameters[last])
            else:
                persistent = last not in owner._non_persistent_buffers_set
                here.register_buffer(last, owner._buffers[last], persistent=persistent)

    def _container(self, path: str) -> nn.Module:
        module: nn.Module = self
        for name in path.split(".") if path else ():
            if name not in module._modules:
                module.add_module(name, nn.Module())
            module = module._modules[name]
        return module

    def add_forwards(
        self, shapes: Hashable, graphs: dict[bool, StageGraph], index: int, device: torch.device
    ) -> None:
        """Write the forwards for batches of some shapes; graphs: in training, in evaluation."""
        for training, graph in graphs.items():
            self.source, program = write_forward(self, graph, first=index == 0, device=device)
            self._programs[shapes, training] = program
        self._current = shapes

    def select_forward(self, shapes: Hashable) -> None:
        """Run batches of these shapes from now on."""
        self._current = shapes

    def forward(self, *arrived: Tensor, **batch: Tensor) -> Tensor | tuple[Tensor, ...]:
        fields = {name.removeprefix(FIELD): tensor for name, tensor in batch.items()}
        return self._programs[self._current, self.training](arrived, fields)


def fsdp_groups(stage: nn.Module, units: Sequence[Unit], used: Iterable[str]) -> list[list[str]]:
    """Names of what is gathered together: each block by itself, neighbours that are none (norm and
    head) as one.

    used: weights that the stage's forward uses itself. They, and weights that two units share,
    belong to the stage as a whole, and so do the units that hold them.
    """
    seen: set[int] = {id(stage.get_parameter(name)) for name in used if _is_parameter(stage, name)}
    twice = set(seen)
    for unit in units:
        own = {id(parameter) for parameter in stage.get_submodule(unit.name).parameters()}
        twice |= own & seen
        seen |= own
    groups: list[list[str]] = []
    before: Unit | None = None
    for unit in units:
        own = {id(parameter) for parameter in stage.get_submodule(unit.name).parameters()}
        if not own or own & twice:
            continue
        if before is not None and not unit.block and not before.block:
            groups[-1].append(unit.name)
        else:
            groups.append([unit.name])
        before = unit
    return groups


def _is_parameter(stage: nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return last in stage.get_submodule(path)._parameters
