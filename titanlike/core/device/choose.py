"""Choose the device of each rank. A GPU is never silently left unused, nor silently shared."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.groups.jobs import Launch
from titanlike.core.config.schema import Config
from titanlike.core.device import accelerator

if TYPE_CHECKING:
    from torch.distributed import Store

_CPU = "device=cpu to train on the CPU"
_SHARE = "launch.ranks_per_device"
SYS = Path("/sys")
_OPENMP = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def choose_device(
    config: Config, local_rank: int, local_ranks: int, one_each: bool = True
) -> tuple[torch.device, str]:
    """Return this rank's device and the reason. Neighbouring ranks share a device if
    ranks_per_device > 1.

    one_each: the launcher may show each rank only a GPU of its own (srun --gpus-per-task=1);
    `claim_device` verifies that. Does not initialize CUDA. Raises ConfigError if there are fewer
    GPUs than the ranks need, or none although the config requires one.
    """
    requested = config.device
    if requested == "cpu":
        return torch.device("cpu"), "asked for"
    kind, count = accelerator.accelerator(), accelerator.count()
    if requested not in ("auto", kind):
        instead = f"is built for {kind}" if kind else "is built for no accelerator"
        raise _problem(requested, f"torch {torch.__version__} {instead}", "device=auto")
    if count == 0:
        from titanlike.core.device.nvml import visible_gpus

        if unused := len(visible_gpus()):
            reason = f"{_gpus(unused)} on this machine cannot be used by torch {torch.__version__}"
            why = "whose CUDA needs another driver" if kind else "which is built without CUDA"
            fix = f"{_CPU}, or install the torch that fits the driver"
            raise _problem(requested, f"{reason}, {why}", fix)
        if requested != "auto":
            raise _problem(requested, "no GPU is visible on this machine", "device=auto")
        return torch.device("cpu"), "no GPU found"
    assert kind is not None
    per_device = config.launch.ranks_per_device
    if per_device > 1 and kind != "cuda":
        reason = f"only NCCL connects ranks that share a device, and these are {kind}"
        raise ConfigError([Problem(_SHARE, per_device, reason, f"{_SHARE}=1")])
    if count * per_device >= local_ranks:
        shared = ranks_of(torch.device(kind), config.launch, local_ranks)
        used = -(-local_ranks // shared)
        reason = "asked for" if requested != "auto" else f"{_gpus(count)} found"
        if shared > 1:
            on = f"{kind}:0" if used == 1 else f"{used} GPUs ({shared} each)"
            reason = f"{local_ranks} ranks share {on}: for correctness, not for speed"
        return torch.device(kind, local_rank // per_device), reason
    if count == 1 and one_each:
        return torch.device(kind, 0), "the one GPU that this rank sees"
    ranks = "1 rank" if count == 1 else f"{count} ranks"
    fix = f"{_sharing(local_ranks)}, {_CPU}, or start at most {ranks} on this machine"
    raise _problem(requested, f"{_gpus(count)} for {local_ranks} ranks on this machine", fix)


def ranks_of(device: torch.device, launch: Launch, local_ranks: int) -> int:
    """The number of this machine's `local_ranks` that share one accelerator; 1 on a CPU."""
    shared = accelerator.is_accelerator(device)
    return min(launch.ranks_per_device, local_ranks) if shared else 1


def first_device(requested: str) -> torch.device:
    """The device of a machine's first rank, without checking the number of GPUs."""
    kind = accelerator.accelerator()
    if kind is None or requested == "cpu" or accelerator.count() == 0:
        return torch.device("cpu")
    return torch.device(kind, 0)


def start_device(requested: str, device: torch.device) -> None:
    """Initialize this rank's device. Raises ConfigError with the driver's reason if that fails."""
    try:
        accelerator.set_device(device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise _problem(requested, f"{device} cannot be started: {reason}", _CPU) from error


def allowed_cores() -> set[int]:
    """The cores that this process may use; none where that is not known."""
    cores: set[int] = getattr(os, "sched_getaffinity", lambda _: set())(0)
    return cores


def numa_nodes(sys: Path, cores: set[int] | None = None) -> list[int]:
    """The machine's NUMA nodes; cores: only those with one of these. sys: Linux' folder that
    describes the machine."""
    nodes = []
    for path in sys.glob("devices/system/node/node*/cpulist"):
        ranges = [part.split("-") for part in path.read_text().split(",") if part.strip()]
        here = {core for r in ranges for core in range(int(r[0]), int(r[-1]) + 1)}
        if here and (cores is None or here & cores):
            nodes.append(int(path.parent.name.removeprefix("node")))
    return sorted(nodes)


@contextlib.contextmanager
def near_device(device: torch.device, sys: Path = SYS) -> Iterator[None]:
    """A context in which this thread and threads started in it run on the NUMA node of the GPU, as
    other cores have half the bandwidth to it. Does nothing if srun, numactl, torchrun
    --numa-binding or OpenMP has already bound the process: to some of the machine's nodes, as a
    container may have some cores of each."""
    before = allowed_cores()
    bound = len(numa_nodes(sys, before)) < len(numa_nodes(sys))
    bound = bound or any(name in os.environ for name in _OPENMP)
    cores: set[int] = set()
    if device.type == "cuda" and not bound:
        from titanlike.core.device.nvml import nearest_cores

        cores = nearest_cores(device.index or 0) & before
    if not cores:
        yield
        return
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def claim_device(
    config: Config, device: torch.device, rank: int, local_ranks: int, store: Store | None
) -> None:
    """Raise ConfigError if more ranks of the job have the same physical GPU than may share one.

    store: the job's, None for a single rank. Costs one request per rank if ranks sharing a GPU are
    neighbours.
    """
    uuid = None if store is None else accelerator.uuid(device)
    if store is None or uuid is None:
        return
    per_device, owners = config.launch.ranks_per_device, [rank]
    for place in range(per_device):
        name = f"device/{uuid}/{(rank + place) % per_device}"
        owner = int(store.compare_set(name, "", str(rank)))
        if owner == rank:
            return
        owners.append(owner)
    *others, last = map(str, sorted(owners))
    raise _problem(
        config.device,
        f"ranks {', '.join(others)} and {last} have the same GPU, {accelerator.name(device)} "
        f"{uuid}",
        "start no more ranks on a machine than it has GPUs, and let each see all of them or one of "
        f"its own (srun --gpus-per-task=1); or {_sharing(local_ranks)}, or {_CPU}",
    )


def _sharing(local_ranks: int) -> str:
    return f"{_SHARE}={-(-local_ranks // max(1, accelerator.count()))} to check a layout, slowly"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _problem(requested: str, reason: str, fix: str) -> ConfigError:
    return ConfigError([Problem("device", requested, reason, fix)])
