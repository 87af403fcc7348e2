"""FSDP2 inside a stage: what is sharded, in which precision, and for how long.

`zero` says what stays sharded while a step runs (arXiv 1910.02054):

1. optimizer state: parameters are gathered and gradients reduced once a step, a stage at a time.
   The least traffic. The only one for zero-bubble schedules: their backward is split in two, and
   FSDP's hooks lose gradients between the halves.
2. also gradients: reduced block by block in every backward.
3. also parameters: gathered block by block in every forward and backward. The least memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.core.config.groups.computation import Precision, ScaledPrecision
from titanlike.core.config.schema import Config
from titanlike.core.device.accelerator import is_accelerator
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.distributed.placement import experts_of
from titanlike.core.graph.recording import tree_map
from titanlike.core.torch_private.autograd import shaped


def compute_dtype(precision: Precision) -> torch.dtype:
    """The dtype of activations."""
    return torch.bfloat16 if precision.low else torch.float32


def wrapped_in_fsdp(config: Config) -> bool:
    """Whether stages are wrapped in FSDP: to shard, replicate or offload them."""
    return config.dp * config.cp > 1 or config.fsdp.cpu_offload


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module, found by a method that FSDP adds, so that FSDP
    is not imported where it is not used."""
    return hasattr(module, "unshard")


def shard_stage(
    stage: nn.Module, groups: list[list[str]], config: Config, mesh: Mesh, zero: int
) -> None:
    """Apply `fully_shard` to a stage in place: each group of its modules, then the root.

    With nothing to shard or offload the stage stays a plain module. Its
    inputs, from the batch or from other stages, are in the compute dtype already.
    """
    if next(stage.parameters(), None) is None:
        return  # an empty stage
    if not wrapped_in_fsdp(config):
        return
    from torch.distributed.fsdp import (  # a tenth of the CPU time of a short run without it
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
    )

    from titanlike.core.torch_private.fsdp import gather_with

    # only axes larger than one: a mesh of one axis is FSDP, of two HSDP
    axes = ("replicate", "shard") if config.replicate > 1 else ("shard",)
    dtype = torch.bfloat16 if config.precision.low else None
    # reduce_dtype is always given: left out, it means bf16 in torch 2.13 and fp32 in 2.15.
    precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh.axes[axes], "mp_policy": precision}
    # a rank that has all shards would only cast them again
    options["reshard_after_forward"] = zero == 3 and config.shards > 1
    if config.fsdp.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=is_accelerator(mesh.device))
    for module in (stage, *(stage.get_submodule(name) for group in groups for name in group)):
        fresh = type(module) is nn.Linear and not module._forward_hooks
        module.register_forward_hook(partial(_not_a_view, fresh))  # before FSDP's own
    units: list[list[Any]] = [[] for _ in groups]  # FSDP units nested in each group: experts
    if mesh.expert_axes is not None:  # before the blocks that they are in
        of_experts = options | {"mesh": mesh.expert_axes}
        of_experts["reshard_after_forward"] = zero == 3 and config.shards > config.ep_shards
        for path, experts in experts_of(stage).items():
            part = fully_shard(experts, **of_experts)
            for group, unit in zip(groups, units, strict=True):
                for block in (name for name in group if path.startswith(f"{name}.")):
                    unit.append(part)
                    if config.compile:
                        gather_with(part, stage.get_submodule(block))
    for group, unit in zip(groups, units, strict=True):
        fully_shard([stage.get_submodule(name) for name in group], **options)
        unit.insert(0, stage.get_submodule(group[0]))
    fully_shard(stage, **options)
    if zero == 3 and mesh.expert_axes is not None:
        # FSDP gathers ahead what a host that runs ahead asks for: here it waits for each layer's
        # routes, and the experts, the most of a block, would be gathered when they are needed
        for before, after in pairwise(units):
            before[0].set_modules_to_forward_prefetch(after)
            after[0].set_modules_to_backward_prefetch(before)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # sums, not averages: the loss is scaled by 1 / (global count)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo and others know no PreMulSum


def _not_a_view(fresh: bool, module: nn.Module, args: Any, output: Any) -> Any:
    """Copy results that are views and have a gradient: FSDP's hooks on a view are lost if it is
    changed in place, which an expanded one cannot be. fresh: the module's forward makes what they
    are views of and keeps nothing of it, as a linear layer with a bias: they are not copied."""

    def replaced(x: Any) -> Any:
        is_view = isinstance(x, Tensor) and x.requires_grad and x._base is not None
        if not is_view or 0 in x.stride():
            return x
        return shaped(x, x.shape) if fresh and "forward" not in vars(module) else x.clone()

    return tree_map(output, replaced)


# --- what stays on a rank ------------------------------------------------------------------------


@dataclass(frozen=True)
class StateBytes:
    """Bytes of training state per parameter element on one rank's device."""

    fsdp: bool  # whether stages are wrapped, see `shard_stage`
    shards: int
    weights: float  # the parameter; always allocated
    optimizer: float  # optimizer state; always allocated
    gathered: float  # the all-gathered parameter, within a step
    gradient: float  # within a step, from the first backward on
    reduced_gradient: float  # after the reduction

    @classmethod
    def of(cls, config: Config, zero: int, moments: int = 0) -> StateBytes:
        """moments: bytes of optimizer state per element, see `moment_bytes`."""
        optimizer = moments + 4 * (config.ema.decay is not None)
        shards = config.shards
        offload = config.fsdp.cpu_offload
        computing = compute_dtype(config.precision).itemsize
        fsdp = wrapped_in_fsdp(config)
        weights, moments = (0.0, 0.0) if offload else (4 / shards, optimizer / shards)
        if computing < 4 and not fsdp:
            weights += computing  # see `techniques/cast_parameters.py`
        reduced = 0.0 if offload else 4 / shards
        gathered = computing if fsdp and (zero < 3 or shards == 1) else 0
        if isinstance(config.precision, ScaledPrecision) and shards == 1:
            # see `techniques/low_precision/float8.py`; for two products, if no scale is for both
            gathered += 1 + (config.precision.recipe != "tensorwise")
        gradient = 4 if fsdp and zero == 1 else reduced
        return cls(fsdp, shards, weights, moments, gathered, gradient, reduced)

    @property
    def kept(self) -> float:
        """Bytes that are always allocated."""
        return self.weights + self.optimizer

    @property
    def whole(self) -> float:
        """Bytes within a step, with gradients."""
        return self.kept + self.gathered + self.gradient
