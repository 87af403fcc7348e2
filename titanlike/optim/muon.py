"""Muon (https://kellerjordan.github.io/posts/muon, arXiv 2502.16982), exact on shards and parts.

torch.optim.Muon works on shards, too, but every product of a matrix is then a message (11 to 16 for
each matrix), all ranks compute, and sums over shards are rounded to bf16 in another order: updates
differ from one process's by 2% to 30%, the more the nearer a gradient is to a low rank. Here the
momentum is kept on the shards, and `Orthogonalizer` gathers whole matrices, in fp32 where the run is.
Test: `test_fences.py::test_torchs_muon_sends_many_messages_and_rounds_otherwise_on_shards`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlike.config.schema import Muon as MuonConfig
from titanlike.distributed.placement import Part, experts_of
from titanlike.graph.find_units import find_units
from titanlike.optim.orthogonalize import Orthogonalizer, newton_schulz, shard_group
from titanlike.optim.skipping import SkippingOptimizer, select
from titanlike.torch_private.dtensor import local


class Muon(SkippingOptimizer):
    """Updates matrices by their orthogonalized momentum; the arithmetic of torch.optim.Muon."""

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        config: MuonConfig,
        dtype: torch.dtype,
        parts: Mapping[nn.Parameter, Part | None] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Collective over the ranks that share the matrices.

        matrices: [rows, columns]; or those of experts, [experts, rows, columns], each a matrix of its
        own: a rank's shard is of whole experts, which it orthogonalizes itself. dtype: in which matrices are orthogonalized, and sent to be; parts: of those that are divided
        among tensor-parallel ranks; group: the ranks that share them; None = FSDP's.
        """
        groups = [{"params": [*matrices]}]
        super().__init__(groups, {"lr": config.lr, "weight_decay": config.weight_decay})
        self._config, self._dtype = config, dtype
        flat = [matrix for matrix in matrices if matrix.dim() == 2]
        self._shared = (group or shard_group(flat[0])) if flat else None
        self._orthogonalize = Orthogonalizer(flat, parts or {}, self._shared, config.ns_steps)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Collective over the ranks that share the matrices; a matrix without gradient is left
        alone."""
        assert closure is None
        for group in self.param_groups:
            reached = [p for p in group["params"] if p.grad is not None]
            for parameter in (p for p in reached if p.dim() == 3):
                update = newton_schulz(self._update(parameter), self._config.ns_steps)
                self._apply(parameter, update, parameter.shape[1:], group)
            parameters = [p for p in reached if p.dim() == 2]
            if parameters and self._shared is not None:
                self._step(parameters, group)  # in two messages
            else:
                for parameter in parameters:
                    self._step([parameter], group)

    def _step(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        updates = [self._update(parameter) for parameter in parameters]
        results = self._orthogonalize(parameters, updates)
        for parameter, result in zip(parameters, results, strict=True):
            self._apply(parameter, result, self._orthogonalize.shapes[parameter], group)

    def _apply(
        self,
        parameter: nn.Parameter,
        result: Tensor,
        shape: Sequence[int],
        group: dict[str, Any],
    ) -> None:
        """shape: of a whole matrix."""
        weights, skip = local(parameter), self.skip_of(parameter)
        rate = group["lr"] * lr_ratio(self._config.adjust_lr, *shape)
        updated = weights * (1 - group["lr"] * group["weight_decay"])
        updated.add_(result.to(weights.device), alpha=-rate)
        select(skip, weights, updated)

    def _update(self, parameter: nn.Parameter) -> Tensor:
        """What this rank has of the momentum, which is moved on, where it is orthogonalized."""
        state, momentum = self.state[parameter], self._config.momentum
        assert parameter.grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, mean = local(parameter.grad), local(state["momentum_buffer"])
        select(self.skip_of(parameter), mean, mean.lerp(gradient, 1 - momentum))
        update = gradient.lerp(mean, momentum) if self._config.nesterov else mean
        device = update.device
        if isinstance(parameter, DTensor):  # shards may be in CPU memory
            device = torch.device(parameter.device_mesh.device_type)
        return update.to(device, self._dtype)


def lr_ratio(adjust_lr: str, rows: int, columns: int) -> float:
    """By what the learning rate of a matrix is multiplied."""
    if adjust_lr == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))  # as large an update as AdamW's, on average


def hidden_matrices(model: nn.Module, optimizer: Any) -> set[str]:
    """Names of the parameters of a whole model that Muon updates, if that is the optimizer: 2-D ones
    of the blocks and those of experts, but for embeddings, what is used outside of the blocks too, and those that the
    config leaves to AdamW."""
    if not isinstance(optimizer, MuonConfig):
        return set()
    in_blocks: set[int] = set()
    elsewhere = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    of_experts = {id(p) for module in experts_of(model).values() for p in module.parameters()}
    units = find_units(model)
    head = model.get_submodule(units[-1].name)  # of a chain of layers, each of which is a block
    for unit in units:
        module = model.get_submodule(unit.name)
        inside = unit.block and not (module is head and isinstance(head, nn.Linear))
        (in_blocks if inside else elsewhere).update(map(id, module.parameters()))
    return {
        name
        for name, parameter in model.named_parameters()
        if (parameter.dim() == 2 or (parameter.dim() == 3 and id(parameter) in of_experts))
        and id(parameter) in in_blocks - elsewhere
        and not any(fnmatchcase(name, pattern) for pattern in optimizer.adamw)
    }
