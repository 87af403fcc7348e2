"""The device mesh: pipeline x replicate x shard x parts of layers, in this order over the ranks.

Ranks that are neighbours share the layers (`LAYER_AXES`), then the sequences (cp), then a stage
(dp): the heaviest traffic stays inside a machine where it can; pipeline neighbours are as many
ranks apart as have a stage. FSDP shards weights over the ranks of dp in one replica and of cp:
together they are the axis shard, in which those of cp are neighbours. All arithmetic of ranks is
here.
"""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import LAYER_AXES, Config
from titanlike.device import accelerator
from titanlike.device.choose import choose_device, claim_device, ranks_of, start_device
from titanlike.device.memory import count_anew, prepare_allocator
from titanlike.launch.failures import describe
from titanlike.launch.worker import Worker
from titanlike.torch_private.process_groups import pipeline_backend, set_timeout


@dataclass(frozen=True)
class Mesh:
    """This rank's place; `axes` has the mesh axes pp, replicate and shard, and each of LAYER_AXES
    where that is more than one: an axis has torch make a group for every rank, one after the
    other."""

    axes: DeviceMesh  # not of `one_process`
    device: torch.device
    backend: str
    reason: str  # why this device and backend
    # plain numbers: to ask a DeviceMesh for them takes longer than a small kernel
    pp: int
    dp: int
    cp: int
    layer_ranks: int  # that have a part of every layer each
    pp_rank: int
    dp_rank: int
    cp_rank: int
    layer_part: int  # which of these parts
    # of experts, whose weights are sharded over fewer ranks: expert_shard, and replicate where that
    # is more than one; None without expert parallelism
    expert_axes: DeviceMesh | None = None
    expert_group: dist.ProcessGroup | None = None  # the ranks that have all experts together

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.layer_ranks

    @property
    def layers_rank(self) -> int:
        """The rank, if those that share layers were one."""
        return (self.pp_rank * self.dp + self.dp_rank) * self.cp + self.cp_rank

    @property
    def stage_copies(self) -> int:
        """Ranks that have this rank's stages, or shards of them: those of dp and cp."""
        return self.dp * self.cp

    def neighbours(self, axis: str, count: int) -> list[int]:
        """The ranks of the block of `count` neighbours along an axis that this one is in, in
        order."""
        names, place = self.axes.mesh_dim_names, [*_coordinate(self.axes)]
        assert names is not None
        dim = names.index(axis)
        start = place[dim] // count * count
        place[dim] = slice(start, start + count)
        return self.axes.mesh[tuple(place)].tolist()

    def stage_ranks(self, pp_rank: int) -> list[int]:
        """All ranks that have a pipeline rank's stages, in order."""
        return self.axes.mesh[pp_rank].flatten().tolist()

    def weight_group(self, seconds: float) -> dist.ProcessGroup | None:
        """The ranks that have a replica of this rank's stages together; None where FSDP has that
        group. Collective over them; seconds: its timeout."""
        if self.layer_ranks == 1:
            return None
        pp_rank, replica, *_ = _coordinate(self.axes)
        ranks = self.axes.mesh[pp_rank, replica].flatten().tolist()
        *_, innermost = self.axes.get_all_groups()
        return innermost if len(ranks) == innermost.size() else new_group(ranks, seconds)

    def sum(self, values: Tensor, axis: str | None = None) -> Tensor:
        """Sum over all ranks, or along one axis, in place."""
        if self.world_size == 1:
            return values
        group = self.axes.get_group(axis) if axis else None
        if group is None or group.size() > 1:
            dist.all_reduce(values, group=group)
        return values

    def sum_copies(self, values: Tensor) -> Tensor:
        """Sum over the ranks that have this rank's stages or shards of them, in place."""
        return self.sum(self.sum(values, "shard"), "replicate")

    def max(self, values: Tensor) -> Tensor:
        """Largest over all ranks, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


def one_process(device: torch.device) -> Mesh:
    """The mesh of a process that has joined no group."""
    axes: Any = None
    alone: dict[str, Any] = dict.fromkeys(("pp", "dp", "cp", "layer_ranks"), 1)
    first: dict[str, Any] = dict.fromkeys(("pp_rank", "dp_rank", "cp_rank", "layer_part"), 0)
    return Mesh(axes, device, backend="", reason="", **alone, **first)


def open_mesh(config: Config, worker: Worker) -> Mesh:
    """Join the process group, if that is not done, and lay the mesh over it. `close_mesh` undoes
    it."""
    device, reason = choose_device(config, worker.local_rank, worker.local_world_size)
    backend = accelerator.own_backend(device) or "gloo"
    collectives = accelerator.backends(device)
    if accelerator.is_accelerator(device):
        prepare_allocator(device)
        start_device(config.device, device)
        claim_device(config, device, worker.rank, worker.local_world_size, worker.store)
        reason = f"{accelerator.name(device)}, {reason}"
    count_anew(device)
    store = worker.store if worker.store is not None else dist.HashStore()
    local_ranks = worker.local_world_size
    join_group(config, device, worker.rank, worker.world_size, local_ranks, store)
    return lay_mesh(config, device, backend, reason, pipeline_backend(collectives))


def join_group(
    config: Config,
    device: torch.device,
    rank: int,
    world_size: int,
    local_ranks: int,
    store: dist.Store | None = None,
) -> None:
    """Join the process group of all ranks, if that is not done; store: None = as the environment
    says. What it sets holds for the groups that are made from now on, too. Raises ConfigError where
    NCCL cannot connect ranks that share a GPU.

    gloo, which sends objects, connects each pair of a group's ranks when it is made: from about 500
    ranks more sockets than a process may have by default (gloo#419).
    """
    if accelerator.is_accelerator(device):
        # if NCCL fails or times out, end the process without waiting for the GPU, as torchtitan
        # does
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # a pair connects at its first message
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # of a kernel whose own limit is lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    shared = ranks_of(device, config, local_ranks)
    needed = _shared_environment(rank, world_size == local_ranks) if shared > 1 else {}
    for name, value in needed.items():
        os.environ.setdefault(name, value)
    try:
        # without device_id: with it NCCL has one communicator, and one stream, for all messages of
        # a rank, where a receive that is posted early holds up the sends behind it (interleaved
        # schedules take 13 to 27% longer, see tests/pipeline/test_message_streams.py). A barrier
        # then takes the device that is set above, and groups are made anew, not split
        if not dist.is_initialized():
            dist.init_process_group(
                accelerator.backends(device),
                timeout=timedelta(seconds=config.launch.timeout),
                store=store,
                rank=rank,
                world_size=world_size,
            )
        if shared > 1:
            accelerator.limit_memory(device, 1 / shared)
            # makes NCCL's communicator, which others wait for until their first collective
            dist.all_reduce(torch.zeros(1, device=device))
            accelerator.synchronize(device)
    except dist.DistBackendError as error:
        if shared == 1 or describe(rank, error).transport:  # of a peer that failed
            raise
        said = str(error).partition("Last error:")[2].split("\n")
        said = next(filter(None, map(str.strip, [*said, *str(error).split("\n")])), "")
        users = [name for name, value in needed.items() if os.environ[name] != value]
        fix = f"unset {' '.join(users)}" if users else "device=cpu, or a GPU for each rank"
        reason = f"NCCL does not connect ranks that share a GPU here: {said}"
        key = "launch.ranks_per_device"
        raise ConfigError([Problem(key, config.launch.ranks_per_device, reason, fix)]) from error


def _shared_environment(rank: int, one_machine: bool) -> dict[str, str]:
    """What NCCL needs to connect ranks that share a GPU: it refuses two on one device of a host,
    and a host is what has this id; then messages go by sockets alone."""
    off = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
    loopback = {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"} if one_machine else {}
    return {"NCCL_HOSTID": f"titanlike-{rank}", "NCCL_NET": "Socket", **off, **loopback}


def lay_mesh(
    config: Config, device: torch.device, backend: str, reason: str, messages: str | None = None
) -> Mesh:
    """The mesh over the process group that is joined. Collective.

    messages: the backend of the pipeline's groups, where they need another than the default group.
    """
    sizes = {"pp": config.pp, "replicate": config.replicate, "shard": config.shards}
    names = (*sizes, *(axis for axis in LAYER_AXES if getattr(config, axis) > 1))
    shape = tuple(sizes.get(name) or getattr(config, name) for name in names)
    axes = init_device_mesh(
        device.type,
        shape,
        mesh_dim_names=names,
        backend_override={"pp": messages} if messages and config.pp > 1 else None,
    )
    for name in names:
        set_timeout(axes.get_group(name), config.launch.timeout)
    pp_rank, replica, shard = (axes.get_local_rank(name) for name in names[:3])
    in_replica, cp_rank = divmod(shard, config.cp)
    dp_rank = replica * (config.dp // config.replicate) + in_replica
    mesh = Mesh(
        axes,
        device,
        backend,
        reason,
        pp=config.pp,
        dp=config.dp,
        cp=config.cp,
        layer_ranks=config.layer_ranks,
        pp_rank=pp_rank,
        dp_rank=dp_rank,
        cp_rank=cp_rank,
        layer_part=dist.get_rank() % config.layer_ranks,
    )
    return mesh if config.ep == 1 else _with_experts(mesh, config)


def new_group(ranks: list[int], seconds: float) -> dist.ProcessGroup:
    """A group that its ranks alone make; seconds: its timeout. torch counts the groups that a rank
    makes, to name the next one."""
    return dist.new_group(ranks, timeout=timedelta(seconds=seconds), use_local_synchronization=True)


def _coordinate(axes: DeviceMesh) -> tuple[Any, ...]:
    place = axes.get_coordinate()
    assert place is not None, "every rank is in the mesh"
    return tuple(place)


def _with_experts(mesh: Mesh, config: Config) -> Mesh:
    """The ranks of the axis shard are ep neighbours, so many times. Collective."""
    pp_rank, replica, shard, *others = _coordinate(mesh.axes)
    every_ep = slice(shard % config.ep, None, config.ep)
    alike = mesh.axes.mesh[(pp_rank, slice(None), every_ep, *others)]
    group = new_group(mesh.neighbours("shard", config.ep), config.launch.timeout)
    shards = new_group(alike[replica].tolist(), config.launch.timeout)
    if config.replicate == 1:
        names, groups, ranks = ("expert_shard",), shards, alike[0]
    else:
        names, ranks = ("replicate", "expert_shard"), alike
        groups = [mesh.axes.get_group("replicate"), shards]
    axes = DeviceMesh.from_group(groups, mesh.device.type, mesh=ranks, mesh_dim_names=names)
    return replace(mesh, expert_axes=axes, expert_group=group)


def close_mesh() -> None:
    """Leave the process group. Not for the error path: a rank that leaves hides the first error."""
    dist.destroy_process_group()
