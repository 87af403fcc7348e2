"""A pipeline stage: some units of the model, under their names in it, and a generated forward."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.graph.cut import StageGraph
from titanlike.graph.stage_forward import write_forward
from titanlike.graph.unit import Unit
from titanlike.torch_private.pipeline_runtime import FIELD


class Stage(nn.Module):
    """Consecutive units of a model: received tensors -> tensors for the next stage.

    The first stage receives the batch's "inputs"; keyword arguments are the batch's fields.
    Parameters have the names that they have in the model. There is one generated forward for each
    shape of batch, in training and in evaluation (see `stage_forward.py`).
    """

    def __init__(self, model: nn.Module, units: Iterable[str], weights: Iterable[str]) -> None:
        """Take the modules `units`, and the parameters and buffers `weights`, out of the model."""
        super().__init__()
        self._forwards: dict[Hashable, Callable[..., Any]] = {}
        self._selected: Hashable = None
        self.source = ""  # of the forward that was generated last
        for name in units:
            path, _, last = name.rpartition(".")
            self._parent(path).add_module(last, model.get_submodule(name))
        for name in weights:
            path, _, last = name.rpartition(".")
            owner, parent = model.get_submodule(path), self._parent(path)
            if last in owner._parameters:
                parent.register_parameter(last, owner._parameters[last])
            else:
                persistent = last not in owner._non_persistent_buffers_set
                parent.register_buffer(last, owner._buffers[last], persistent=persistent)

    def _parent(self, path: str) -> nn.Module:
        """The module at `path`, created with those above it where it does not exist."""
        module: nn.Module = self
        for name in path.split(".") if path else ():
            if name not in module._modules:
                module.add_module(name, nn.Module())
            child = module._modules[name]
            assert child is not None
            module = child
        return module

    def add_forwards(
        self, shapes: Hashable, graphs: dict[bool, StageGraph], index: int, device: torch.device
    ) -> None:
        """Generate and select the forwards for batches of these shapes.

        graphs: by `self.training`; index: of the stage.
        """
        for training, graph in graphs.items():
            self.source, forward = write_forward(self, graph, first=index == 0, device=device)
            self._forwards[shapes, training] = forward
        self._selected = shapes

    def select_forward(self, shapes: Hashable) -> None:
        """Run the forward for batches of these shapes from now on."""
        self._selected = shapes

    def forward(self, *received: Tensor, **batch: Tensor) -> Tensor | tuple[Tensor, ...]:
        fields = {name.removeprefix(FIELD): tensor for name, tensor in batch.items()}
        return self._forwards[self._selected, self.training](received, fields)


def fsdp_groups(stage: nn.Module, units: Sequence[Unit], used: Iterable[str]) -> list[list[str]]:
    """Names of the units that FSDP gathers together: each block alone, consecutive others (norm
    and head) as one group.

    used: weights that the stage's forward uses directly. They, weights that two units share, and
    the units that contain them are gathered with the stage as a whole.
    """
    used = set(used)
    parameters = stage.named_parameters(remove_duplicate=False)
    seen = {id(parameter) for name, parameter in parameters if name in used}
    shared = set(seen)
    parameters_of = [{id(p) for p in stage.get_submodule(unit.name).parameters()} for unit in units]
    for own in parameters_of:
        shared |= own & seen
        seen |= own
    groups: list[list[str]] = []
    before: Unit | None = None
    for unit, own in zip(units, parameters_of, strict=True):
        if not own or own & shared:
            continue
        if before is not None and not unit.block and not before.block:
            groups[-1].append(unit.name)
        else:
            groups.append([unit.name])
        before = unit
    return groups
