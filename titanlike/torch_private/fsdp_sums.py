"""FSDP2 without its reduce-scatter: gradients of a backward are taken, sums are given back.

torch's `set_custom_reduce_scatter` replaces the collective alone: what was accumulated before it
over microbatches, and is after it over replicas, would still be added in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from titanlike.torch_private.fsdp import _groups


class ShardedGradients:
    """The gradients of one of FSDP's groups of parameters, which it neither accumulates nor
    reduces."""

    def __init__(self, group: Any) -> None:
        """Take the place of the group's `post_backward`, which torch calls after each backward of
        its modules, and in some versions once more when all of a step are done."""
        self._group = group
        params = group.fsdp_params
        self.params = [param for param in params if param.sharded_param.requires_grad]
        infos = [param._module_info for param in self.params]
        # those of the modules, which FSDP takes over at the first forward where others were put in
        self.parameters: list[nn.Parameter] = [i.module._parameters[i.param_name] for i in infos]
        self.after_backward: Callable[[], object] = lambda: None
        group.post_backward = self._post_backward

    def _post_backward(self, *unused: Any) -> None:
        self._group._training_state = TrainingState.POST_BACKWARD
        if self._group.reshard_after_backward:
            self._group.reshard()
        self.after_backward()

    def take(self) -> list[Tensor | None]:
        """The unsharded gradients of the last backwards; afterwards there are none."""
        gradients: list[Tensor | None] = []
        for param in self.params:
            gradient = None
            if hasattr(param, "_unsharded_param"):  # it was gathered
                unsharded = param._unsharded_param
                gradient, unsharded.grad = unsharded.grad, None
                # in 2.15 it is in fp32 where the weight is in bf16
                gradient = None if gradient is None else gradient.to(unsharded.dtype)
            gradients.append(gradient)
        return gradients

    def flat(self, gradients: Sequence[Tensor | None], shards: int, at: Sequence[int]) -> Tensor:
        """Gradients as they are sharded: fp32 [shards * part], each shard's together; where there
        is none, and between them, -0.0, which added to any number leaves it as it is. Without
        autograd, which sums of a stage are made without (`parallel/exact.py`).

        at: of each the parameter that it is of.
        """
        sizes = [self._part_numel(index, shards) for index in at]
        flat = torch.full((shards, sum(sizes)), -0.0, device=self._group.device)
        for gradient, part in zip(gradients, flat.split(sizes, 1), strict=True):
            if gradient is not None:
                size, values = part.shape[1], gradient.reshape(-1)
                whole = len(values) // size  # shards; the next one has a part, others nothing
                part[:whole] = values[: whole * size].view(whole, size)
                if rest := len(values) % size:
                    part[whole, :rest] = values[-rest:]
        return flat.flatten()

    def _part_numel(self, index: int, shards: int) -> int:
        """Elements of a parameter on each of so many ranks, with the padding of the last ones."""
        rows, *inside = self.params[index]._orig_size
        return -(-rows // shards) * prod(inside)

    def give(self, part: Tensor, shards: int, at: Sequence[int]) -> None:
        """Make this rank's part of `flat` the gradients of the sharded parameters; one that is
        there several times has the sum."""
        sums: dict[int, Tensor] = {}
        offset = 0
        for index in at:
            numel = self._part_numel(index, shards)
            mine = part[offset : offset + numel]
            sums[index] = sums[index] + mine if index in sums else mine
            offset += numel
        for index, value in sums.items():
            param = self.params[index]
            held = value[: param.sharded_size.numel()].view(param.sharded_size)
            if param.offload_to_cpu:
                held = held.to("cpu")
            param.sharded_param.grad = param.to_sharded_dtensor(held)


def sharded_gradients(module: nn.Module) -> list[ShardedGradients]:
    """Of each of FSDP's groups in a module; [] where it is not wrapped."""
    return [ShardedGradients(group) for group, _ in _groups(module)]
