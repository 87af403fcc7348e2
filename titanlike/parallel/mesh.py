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
from titanlike.launch.worker import Worker
from titanlike.parallel.device import return_freed_memory


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
        group = self.axes.get_group(axis) if axis else None
        dist.all_reduce(values, group=group)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Largest over all ranks, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


def choose_device(wanted: str) -> tuple[str, str, str]:
    """(device type, backend, reason) for `device=auto|cpu|cuda`."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise ValueError("device=cuda: no CUDA device is visible here; write device=auto")
    if wanted == "cpu":
        return "cpu", "gloo", "asked for"
    if there:
        reason = f"{torch.cuda.get_device_name(0)} found"
        return "cuda", "cpu:gloo,cuda:nccl", "asked for" if wanted == "cuda" else reason
    return "cpu", "gloo", "no GPU found"


def open_mesh(config: Config, worker: Worker) -> Mesh:
    """Join the process group and lay the mesh over it. `close_mesh` undoes it."""
    kind, backend, reason = choose_device(config.device)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", worker.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        # several ranks share the cores of one machine
        threads = os.cpu_count() or 1
        torch.set_num_threads(max(1, threads // worker.local_world_size))
        if config.dp > config.replicate:
            return_freed_memory()
    dist.init_process_group(
        backend,
        store=worker.store if worker.store is not None else dist.HashStore(),
        rank=worker.rank,
        world_size=worker.world_size,
        timeout=timedelta(seconds=config.launch.timeout),
        device_id=device if kind == "cuda" else None,
    )
    shape = (config.pp, config.replicate, config.dp // config.replicate)
    axes = init_device_mesh(kind, shape, mesh_dim_names=("pp", "replicate", "shard"))
    pp_rank, replica, shard = (axes.get_local_rank(name) for name in ("pp", "replicate", "shard"))
    return Mesh(
        axes,
        device,
        "nccl" if kind == "cuda" else "gloo",
        reason,
        pp=config.pp,
        dp=config.dp,
        pp_rank=pp_rank,
        dp_rank=replica * shape[2] + shard,
    )


def close_mesh() -> None:
    """Leave the process group. Not for the error path: a rank that leaves hides the first error."""
    dist.destroy_process_group()
