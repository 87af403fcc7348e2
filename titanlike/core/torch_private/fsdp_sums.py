"""FSDP2 without its reduce-scatter: hands out unsharded gradients, and receives their sums.

torch's `set_custom_reduce_scatter` replaces only the collective: sums over microbatches before it,
and over replicas after it, would keep torch's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from titanlike.core.torch_private.fsdp import _groups


class ShardedGradients:
    """The gradients of one FSDP parameter group, which FSDP neither accumulates nor reduces."""

    def __init__(self, group: Any) -> None:
        """Replace the group's `post_backward`, which torch calls after each backward of its
        modules, and in some versions once more at the end of a step."""
        self._group = group
        params = group.fsdp_params
        self.params = [param for param in params if param.sharded_param.requires_grad]
        infos = [param._module_info for param in self.params]
        # the modules' parameters: FSDP adopts replaced ones at the first forward
        self.parameters: list[nn.Parameter] = [i.module._parameters[i.param_name] for i in infos]
        self.after_backward: Callable[[], object] = lambda: None
        group.post_backward = self._post_backward

    def _post_backward(self, *unused: Any) -> None:
        self._group._training_state = TrainingState.POST_BACKWARD
        if self._group.reshard_after_backward:
            self._group.reshard()
        self.after_backward()

    def take(self) -> list[Tensor | None]:
        """Return the unsharded gradients of the last backwards, and clear them."""
        gradients: list[Tensor | None] = []
        for param in self.params:
            gradient = None
            if hasattr(param, "_unsharded_param"):  # it was gathered
                unsharded = param._unsharded_param
                gradient, unsharded.grad = unsharded.grad, None
                # 2.15: fp32 for a bf16 weight
                gradient = None if gradient is None else gradient.to(unsharded.dtype)
            gradients.append(gradient)
        return gradients

    def flat(
        self, gradients: Sequence[Tensor | None], shards: int, indices: Sequence[int]
    ) -> Tensor:
        """Concatenate gradients shard by shard: fp32 [shards * part]; missing ones and padding are
        -0.0, the neutral element of addition. Called without autograd (`techniques/exact.py`).

        indices: of the parameters that the gradients belong to.
        """
        sizes = [self._part_numel(index, shards) for index in indices]
        flat = torch.full((shards, sum(sizes)), -0.0, device=self._group.device)
        for gradient, part in zip(gradients, flat.split(sizes, 1), strict=True):
            if gradient is not None:
                size, values = part.shape[1], gradient.reshape(-1)
                full_shards = len(values) // size  # the next shard has a part, others nothing
                part[:full_shards] = values[: full_shards * size].view(full_shards, size)
                if rest := len(values) % size:
                    part[full_shards, :rest] = values[-rest:]
        return flat.flatten()

    def _part_numel(self, index: int, shards: int) -> int:
        """A parameter's elements on each of `shards` ranks, the last ranks' padding included."""
        rows, *inside = self.params[index]._orig_size
        return -(-rows // shards) * prod(inside)

    def give(self, part: Tensor, shards: int, indices: Sequence[int]) -> None:
        """Set the sharded parameters' gradients from this rank's part of `flat`; a parameter that
        occurs several times gets the sum."""
        sums: dict[int, Tensor] = {}
        offset = 0
        for index in indices:
            numel = self._part_numel(index, shards)
            piece = part[offset : offset + numel]
            sums[index] = sums[index] + piece if index in sums else piece
            offset += numel
        for index, value in sums.items():
            param = self.params[index]
            held = value[: param.sharded_size.numel()].view(param.sharded_size)
            if param.offload_to_cpu:
                held = held.to("cpu")
            param.sharded_param.grad = param.to_sharded_dtensor(held)


def sharded_gradients(module: nn.Module) -> list[ShardedGradients]:
    """`ShardedGradients` of each FSDP group in a module; [] if it is not wrapped."""
    return [ShardedGradients(group) for group, _ in _groups(module)]
