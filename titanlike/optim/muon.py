"""Muon (https://kellerjordan.github.io/posts/muon, arXiv 2502.16982), exact on FSDP's shards.

torch.optim.Muon works on shards, too, but every product of a matrix is then a message (11 to 16 for
each matrix), all ranks compute, and sums over shards are rounded to bf16 in another order: updates
differ from one process's by 2% to 30%, the more the nearer a gradient is to a low rank. Here the
momentum is kept on the shards, and `orthogonalize` gathers whole matrices, in fp32 where the run is.
Test: `test_fences.py::test_torchs_muon_sends_many_messages_and_rounds_otherwise_on_shards`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlike.config.schema import Muon as MuonConfig
from titanlike.graph.find_units import find_units
from titanlike.optim.orthogonalize import orthogonalize, shard_group
from titanlike.optim.skipping import SkippingOptimizer, local, select


class Muon(SkippingOptimizer):
    """Updates matrices by their orthogonalized momentum; the arithmetic of torch.optim.Muon."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], config: MuonConfig, dtype: torch.dtype
    ) -> None:
        """dtype: in which matrices are orthogonalized, and sent to be."""
        groups = [{"params": [*matrices]}]
        super().__init__(groups, {"lr": config.lr, "weight_decay": config.weight_decay})
        self._config, self._dtype = config, dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Collective over the ranks that share the matrices; a matrix without gradient is left
        alone."""
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters and shard_group(parameters[0]) is not None:
                self._step(parameters, group)  # in two messages
            else:
                for parameter in parameters:
                    self._step([parameter], group)

    def _step(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        updates = [self._update(parameter) for parameter in parameters]
        results = orthogonalize(parameters, updates, self._config.ns_steps)
        for parameter, result in zip(parameters, results, strict=True):
            weights, skip = local(parameter), self.skip_of(parameter)
            rate = group["lr"] * lr_ratio(self._config.adjust_lr, parameter.shape)
            updated = weights * (1 - group["lr"] * group["weight_decay"])
            updated.add_(result.to(weights.device), alpha=-rate)
            select(skip, weights, updated)

    def _update(self, parameter: nn.Parameter) -> Tensor:
        """This rank's rows of the momentum, which is moved on, where they are orthogonalized."""
        state, momentum = self.state[parameter], self._config.momentum
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, mean = local(parameter.grad), local(state["momentum_buffer"])
        select(self.skip_of(parameter), mean, mean.lerp(gradient, 1 - momentum))
        update = gradient.lerp(mean, momentum) if self._config.nesterov else mean
        device = update.device
        if isinstance(parameter, DTensor):  # shards may be in CPU memory
            device = torch.device(parameter.device_mesh.device_type)
        return update.to(device, self._dtype)


def lr_ratio(adjust_lr: str, shape: torch.Size) -> float:
    """By what the learning rate of a matrix is multiplied."""
    rows, columns = shape
    if adjust_lr == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))  # as large an update as AdamW's, on average


def hidden_matrices(model: nn.Module, optimizer: Any) -> set[str]:
    """Names of the parameters of a whole model that Muon updates, if that is the optimizer: 2-D ones
    of the blocks, but for embeddings, what is used outside of the blocks too, and those that the
    config leaves to AdamW."""
    if not isinstance(optimizer, MuonConfig):
        return set()
    in_blocks: set[int] = set()
    elsewhere = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    units = find_units(model)
    head = model.get_submodule(units[-1].name)  # of a chain of layers, each of which is a block
    for unit in units:
        module = model.get_submodule(unit.name)
        inside = unit.block and not (module is head and isinstance(head, nn.Linear))
        (in_blocks if inside else elsewhere).update(map(id, module.parameters()))
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2
        and id(parameter) in in_blocks - elsewhere
        and not any(fnmatchcase(name, pattern) for pattern in optimizer.adamw)
    }
