"""The device mesh: pipeline x replicate x shard, in this order over the ranks.

Ranks that are neighbours share a stage, so FSDP's traffic, the heaviest, stays inside a machine
where it can; pipeline neighbours are dp ranks apart. `dp` is replicate x shard.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlike.config.schema import Config
from titanlike.device import accelerator
from titanlike.device.choose import choose_device, claim_device, start_device
from titanlike.device.memory import count_anew, prepare_allocator
from titanlike.launch.worker import Worker
from titanlike.torch_private.process_groups import pipeline_backend, set_timeout


@dataclass(frozen=True)
class Mesh:
    """This rank's place; `axes` has the mesh axes pp, replicate and shard."""

    axes: DeviceMesh
    device: torch.device
    backend: str
    reason: str  # why this device and backend
    # plain numbers: to ask a DeviceMesh for them takes longer than a small kernel
    pp: int
    dp: int
    pp_rank: int
    dp_rank: int

    @property
    def world_size(self) -> int:
        return self.pp * self.dp

    def sum(self, values: Tensor, axis: str | None = None) -> Tensor:
        """Sum over all ranks, or along one axis, in place."""
        dist.all_reduce(values, group=self.axes.get_group(axis) if axis else None)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Largest over all ranks, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


def open_mesh(config: Config, worker: Worker) -> Mesh:
    """Join the process group and lay the mesh over it. `close_mesh` undoes it."""
    device, reason = choose_device(config.device, worker.local_rank, worker.local_world_size)
    backend = accelerator.own_backend(device) or "gloo"
    # objects, which are not on the device, are sent by gloo
    collectives = f"cpu:gloo,{device.type}:{backend}" if backend != "gloo" else "gloo"
    if accelerator.is_accelerator(device):
        prepare_allocator(device)
        start_device(config.device, device)
        claim_device(config.device, device, worker.rank, worker.store)
        reason = f"{accelerator.name(device)}, {reason}"
        # if NCCL fails or times out, end the process without waiting for the GPU, as torchtitan does
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    count_anew(device)
    # without device_id: with it NCCL has one communicator, and one stream, for all messages of a
    # rank, where a receive that is posted early holds up the sends behind it (interleaved schedules
    # take 13 to 27% longer, see tests/pipeline/test_message_streams.py). A barrier then takes the
    # device that is set above, and groups are made anew, not split
    dist.init_process_group(
        collectives,
        store=worker.store if worker.store is not None else dist.HashStore(),
        rank=worker.rank,
        world_size=worker.world_size,
        timeout=timedelta(seconds=config.launch.timeout),
    )
    shape = (config.pp, config.replicate, config.dp // config.replicate)
    names = ("pp", "replicate", "shard")
    messages = pipeline_backend(collectives) if config.pp > 1 else None
    axes = init_device_mesh(
        device.type,
        shape,
        mesh_dim_names=names,
        backend_override={"pp": messages} if messages else None,
    )
    for name in names:
        set_timeout(axes.get_group(name), config.launch.timeout)
    pp_rank, replica, shard = (axes.get_local_rank(name) for name in names)
    dp_rank = replica * shape[2] + shard
    return Mesh(axes, device, backend, reason, config.pp, config.dp, pp_rank, dp_rank)


def close_mesh() -> None:
    """Leave the process group. Not for the error path: a rank that leaves hides the first error."""
    dist.destroy_process_group()
