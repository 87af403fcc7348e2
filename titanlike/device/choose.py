"""Which device a rank computes on. A GPU is never silently left unused, nor used by two ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from titanlike.config.errors import ConfigError, Problem
from titanlike.device import accelerator

if TYPE_CHECKING:
    from torch.distributed import Store

_CPU = "device=cpu to train on the CPU"
_OPENMP = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def choose_device(
    wanted: str, local_rank: int, local_ranks: int, one_each: bool = True
) -> tuple[torch.device, str]:
    """This rank's device and why, for `device=` and so many ranks on this machine.

    one_each: whoever started the ranks may show each of them a GPU of its own and no other (srun
    --gpus-per-task=1); `claim_device` finds out whether it did. Does not initialize CUDA. Raises
    ConfigError where there are GPUs and not one for each rank, or none and they are asked for.
    """
    if wanted == "cpu":
        return torch.device("cpu"), "asked for"
    kind, count = accelerator.accelerator(), accelerator.count()
    if wanted not in ("auto", kind):
        instead = f"is built for {kind}" if kind else "is built for no accelerator"
        raise _problem(wanted, f"torch {torch.__version__} {instead}", "device=auto")
    if count == 0:
        from titanlike.device.nvml import visible_gpus

        if unused := len(visible_gpus()):
            reason = f"{_gpus(unused)} on this machine cannot be used by torch {torch.__version__}"
            why = "whose CUDA needs another driver" if kind else "which is built without CUDA"
            fix = f"{_CPU}, or install the torch that fits the driver"
            raise _problem(wanted, f"{reason}, {why}", fix)
        if wanted != "auto":
            raise _problem(wanted, "no GPU is visible on this machine", "device=auto")
        return torch.device("cpu"), "no GPU found"
    assert kind is not None
    if count >= local_ranks:
        reason = "asked for" if wanted != "auto" else f"{_gpus(count)} found"
        return torch.device(kind, local_rank), reason
    if count == 1 and one_each:
        return torch.device(kind, 0), "the one GPU that this rank sees"
    ranks = "1 rank" if count == 1 else f"{count} ranks"
    fix = f"{_CPU}, or start at most {ranks} on this machine"
    raise _problem(wanted, f"{_gpus(count)} for {local_ranks} ranks on this machine", fix)


def first_device(wanted: str) -> torch.device:
    """The device of a machine's first rank, also where its GPUs are too few."""
    kind = accelerator.accelerator()
    if kind is None or wanted == "cpu" or accelerator.count() == 0:
        return torch.device("cpu")
    return torch.device(kind, 0)


def start_device(wanted: str, device: torch.device) -> None:
    """Initialize this rank's device. Raises ConfigError with the driver's reason why it cannot."""
    try:
        accelerator.set_device(device)
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        raise _problem(wanted, f"{device} cannot be started: {said}", _CPU) from error


@contextlib.contextmanager
def near_device(device: torch.device) -> Iterator[None]:
    """A context in which this thread, and those that it starts, use the cores of the GPU's NUMA
    node alone: the others have half the bandwidth to it. Not where they are bound already, by srun,
    numactl or torchrun --numa-binding, or placed by OpenMP."""
    before: set[int] = getattr(os, "sched_getaffinity", lambda _: set())(0)
    bound = len(before) != os.cpu_count() or any(name in os.environ for name in _OPENMP)
    cores: set[int] = set()
    if device.type == "cuda" and not bound:
        from titanlike.device.nvml import nearest_cores

        cores = nearest_cores(device.index or 0) & before
    if not cores:
        yield
        return
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def claim_device(wanted: str, device: torch.device, rank: int, store: Store | None) -> None:
    """Raises ConfigError where another rank of the job has the same physical GPU.

    store: of the job alone; None for one rank. It takes one request a rank, whatever their number.
    """
    uuid = None if store is None else accelerator.uuid(device)
    if store is None or uuid is None:
        return
    owner = store.compare_set(f"device/{uuid}", "", str(rank)).decode()
    if owner == str(rank):
        return
    ranks = " and ".join(map(str, sorted((int(owner), rank))))
    raise _problem(
        wanted,
        f"ranks {ranks} have the same GPU, {accelerator.name(device)} {uuid}",
        "start no more ranks on a machine than it has GPUs, and let each see all of them or one of "
        f"its own (srun --gpus-per-task=1); or {_CPU}",
    )


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _problem(wanted: str, reason: str, fix: str) -> ConfigError:
    return ConfigError([Problem("device", wanted, reason, fix)])
