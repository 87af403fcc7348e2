"""The device mesh: pp x replicate x shard x LAYER_AXES (tp, ...), the last one varying fastest.

So tp ranks are adjacent, then cp ranks, then dp ranks: the heaviest traffic stays inside a machine
where it can. Neighbouring pipeline stages are dp * cp * tp ranks apart. The axis shard is what
FSDP shards weights over: the dp ranks of one replica times the cp ranks, which are adjacent in it.
All arithmetic of ranks is here.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.groups.jobs import Launch
from titanlike.core.config.schema import LAYER_AXES, Config
from titanlike.core.device import accelerator
from titanlike.core.device.choose import choose_device, claim_device, ranks_of, start_device
from titanlike.core.device.memory import count_anew, prepare_allocator
from titanlike.core.launch.failures import describe
from titanlike.core.launch.worker import Worker
from titanlike.core.torch_private.process_groups import pipeline_backend


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinates. `axes` has the mesh axes pp, replicate and shard, and each of
    LAYER_AXES only where its size is > 1."""

    axes: DeviceMesh  # not of `one_process`
    device: torch.device
    backend: str
    reason: str  # why this device and backend
    # plain numbers, as looking them up in a DeviceMesh takes longer than a small kernel
    pp: int
    dp: int
    cp: int
    layer_ranks: int  # ranks that share each layer (tp)
    pp_rank: int
    dp_rank: int
    cp_rank: int
    layer_part: int  # this rank's index among them
    # FSDP's mesh for experts, which are sharded over fewer ranks: expert_shard, and replicate where
    # that is > 1; None without expert parallelism
    expert_axes: DeviceMesh | None = None
    expert_group: dist.ProcessGroup | None = None  # the ranks that have all experts together
    # all ranks, with the config's timeout, where a program made the default group; None = that
    everyone: dist.ProcessGroup | None = None

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.layer_ranks

    @property
    def layers_rank(self) -> int:
        """This rank's number if each group of ranks that share layers is counted as one."""
        return (self.pp_rank * self.dp + self.dp_rank) * self.cp + self.cp_rank

    @property
    def stage_copies(self) -> int:
        """The number of ranks with this rank's stages, or shards of them: dp * cp."""
        return self.dp * self.cp

    def neighbours(self, axis: str, count: int) -> list[int]:
        """Cut an axis into blocks of `count` adjacent ranks; the ranks of this one's block, in
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
        """The group of ranks that together hold one replica of this rank's stages; None where FSDP
        has made it. Collective over them; seconds: its timeout."""
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
        group = self.axes.get_group(axis) if axis else self.everyone
        if group is None or group.size() > 1:
            dist.all_reduce(values, group=group)
        return values

    def sum_copies(self, values: Tensor) -> Tensor:
        """Sum over the ranks that have this rank's stages or shards of them, in place."""
        return self.sum(self.sum(values, "shard"), "replicate")

    def max(self, values: Tensor) -> Tensor:
        """Largest over all ranks, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.everyone)
        return values

    def max_of(self, number: float) -> float:
        """The largest of all ranks' numbers, on the host."""
        if self.world_size == 1:
            return number
        return self.max(torch.tensor(number, dtype=torch.float64, device=self.device)).item()


def one_process(device: torch.device) -> Mesh:
    """The mesh of a single process without a process group."""
    axes: Any = None
    alone: dict[str, Any] = dict.fromkeys(("pp", "dp", "cp", "layer_ranks"), 1)
    first: dict[str, Any] = dict.fromkeys(("pp_rank", "dp_rank", "cp_rank", "layer_part"), 0)
    return Mesh(axes, device, backend="", reason="", **alone, **first)


def open_mesh(config: Config, worker: Worker) -> Mesh:
    """Initialize the process group, unless that is done, and make the mesh. `close_mesh` undoes
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
    local_ranks, is_callers = worker.local_world_size, dist.is_initialized()
    join_group(config.launch, device, worker.rank, worker.world_size, local_ranks, store)
    messages = pipeline_backend(collectives)
    return lay_mesh(config, device, backend, reason, messages, is_callers)


def join_group(
    launch: Launch,
    device: torch.device,
    rank: int,
    world_size: int,
    local_ranks: int,
    store: dist.Store | None = None,
) -> None:
    """Initialize the default process group, unless that is done; store: None = from the
    environment. The environment variables that it sets also apply to later groups. Raises
    ConfigError where NCCL cannot connect ranks that share a GPU.

    gloo, which sends objects, connects each pair of ranks when a group is made: from about 500
    ranks that is more sockets than a process may have by default (gloo#419).
    """
    if accelerator.is_accelerator(device):
        # if NCCL fails or times out, end the process without waiting for the GPU, as torchtitan
        # does
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # a pair connects at its first message
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # of a kernel whose own limit is lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    shared = ranks_of(device, launch, local_ranks)
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
                timeout=timedelta(seconds=launch.timeout),
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
        lines = str(error).partition("Last error:")[2].split("\n")
        lines = next(filter(None, map(str.strip, [*lines, *str(error).split("\n")])), "")
        users = [name for name, value in needed.items() if os.environ[name] != value]
        fix = f"unset {' '.join(users)}" if users else "device=cpu, or a GPU for each rank"
        reason = f"NCCL does not connect ranks that share a GPU here: {lines}"
        key = "launch.ranks_per_device"
        raise ConfigError([Problem(key, launch.ranks_per_device, reason, fix)]) from error


def _shared_environment(rank: int, one_machine: bool) -> dict[str, str]:
    """Environment variables with which NCCL connects ranks that share a GPU. NCCL refuses two ranks
    on one device of a host, so each gets its own host id; traffic then goes through sockets."""
    off = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
    loopback = {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"} if one_machine else {}
    return {"NCCL_HOSTID": f"titanlike-{rank}", "NCCL_NET": "Socket", **off, **loopback}


def lay_mesh(
    config: Config,
    device: torch.device,
    backend: str,
    reason: str,
    messages: str | None = None,
    is_callers: bool = False,
) -> Mesh:
    """Make the mesh over the initialized process group. Collective.

    messages: the backend for P2P between stages, where it differs from the default group's.
    is_callers: a program has made that group, with a timeout of its own.
    """
    all_ranks, seconds = [*range(dist.get_world_size())], config.launch.timeout
    everyone = new_group(all_ranks, seconds) if is_callers and len(all_ranks) > 1 else None
    axes = _axes(axis_sizes(config), device.type, seconds, messages, everyone or dist.group.WORLD)
    pp_rank, replica, shard, *_ = _coordinate(axes)
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
        everyone=everyone,
    )
    return mesh if config.ep == 1 else _with_experts(mesh, config)


def axis_sizes(config: Config) -> dict[str, int]:
    """The axes of the mesh, the last one varying fastest -> the ranks along each."""
    sizes = {"pp": config.pp, "replicate": config.replicate, "shard": config.shards}
    return sizes | {axis: size for axis in LAYER_AXES if (size := getattr(config, axis)) > 1}


def axes_along(config: Config, ranks: Sequence[int]) -> tuple[str, ...]:
    """The axes of the mesh along which these ranks differ, outermost first."""
    found, below = [], 1
    for name, size in reversed(axis_sizes(config).items()):
        if len({rank // below % size for rank in ranks}) > 1:
            found.append(name)
        below *= size
    return tuple(reversed(found))


def _axes(
    sizes: dict[str, int], device: str, seconds: float, messages: str | None, everyone: Any
) -> DeviceMesh:
    """Make the axes of the mesh, and of their groups only this rank's, with a timeout; those of one
    rank are one. torch's `init_device_mesh` makes all groups of an axis on each rank, which for
    16,384 ranks are as many of one rank each, with a timeout of its own. Collective."""
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    place = (ranks == dist.get_rank()).nonzero()[0].tolist()
    groups: dict[tuple[int, ...], Any] = {tuple(ranks.flatten().tolist()): everyone}
    every = []
    for dim, name in enumerate(sizes):
        members = ranks[(*place[:dim], slice(None), *place[dim + 1 :])].tolist()
        backend = messages if name == "pp" and len(members) > 1 else None
        if tuple(members) not in groups or backend is not None:
            groups[tuple(members)] = new_group(members, seconds, backend)
        every.append(groups[tuple(members)])
    names = tuple(sizes)
    return DeviceMesh.from_group(every, device, mesh=ranks, mesh_dim_names=names)


def new_group(ranks: list[int], seconds: float, backend: str | None = None) -> dist.ProcessGroup:
    """Make a group; only its ranks call this. seconds: its timeout; backend: None = that of all
    ranks. torch names a group by the number of groups that a rank has made, so ranks must make
    equally many."""
    timeout = timedelta(seconds=seconds)
    return dist.new_group(ranks, timeout, backend, use_local_synchronization=True)


def _coordinate(axes: DeviceMesh) -> tuple[Any, ...]:
    place = axes.get_coordinate()
    assert place is not None, "every rank is in the mesh"
    return tuple(place)


def _with_experts(mesh: Mesh, config: Config) -> Mesh:
    """Add the expert groups: the axis shard cut into blocks of adjacent ranks, which have different
    experts, as those of tp do where ep takes them, too. Collective."""
    pp_rank, replica, shard, *others = _coordinate(mesh.axes)
    size = config.ep_shards
    alike = mesh.axes.mesh[(pp_rank, slice(None), slice(shard % size, None, size), *others)]
    together = mesh.neighbours("shard", size)
    if config.ep > size:
        block = slice(shard // size * size, (shard // size + 1) * size)
        together = mesh.axes.mesh[pp_rank, replica, block].flatten().tolist()
    group = new_group(together, config.launch.timeout)
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
