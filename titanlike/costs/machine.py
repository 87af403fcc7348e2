"""The machine that layouts are searched for: its ranks, and the free memory of each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config
from titanlike.device.accelerator import count
from titanlike.device.memory import free_memory, resident_memory
from titanlike.launch.environment import available_cores

_USUAL_GPUS = 8  # of a machine
_LIBRARIES = 64 << 20  # bytes that libraries allocate in a CPU rank once it trains


@dataclass(frozen=True)
class Machine:
    ranks: int
    memory: int | None  # bytes that training may take on each; None = unknown
    together: int | None = None  # ranks of one machine; None = all


def find_machine(
    config: Config, ranks: int | None, memory: int | None, started: int | None
) -> Machine:
    """The given ranks and memory, or else what was started, or what this machine has.

    started: ranks that torchrun or srun started, or None. Raises ConfigError for more ranks than GPUs.
    """
    gpus = count() if config.device != "cpu" else 0
    ranks = ranks or started or gpus or available_cores()
    if gpus and ranks > gpus and started is None and config.sweep.submit is None:
        reason = f"there are {gpus} GPUs on this machine"
        fix = f"hydra.sweeper.ranks={gpus}, or device=cpu"
        raise ConfigError([Problem("hydra.sweeper.ranks", ranks, reason, fix)])
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if started else ranks
    together = here
    if config.sweep.submit is not None:  # to machines like this one, if it has GPUs
        together = min(ranks, gpus or _USUAL_GPUS)
    if memory is None:
        memory = free_memory() if gpus else _free_on_cpu(here)
    return Machine(ranks, memory, together)


def _free_on_cpu(ranks: int) -> int | None:
    """A rank's share of the free memory, less what a process takes before it trains."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:  # the container's limit
        group = Path("/sys/fs/cgroup")
        most, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        free = min(free, int(most) - int(used))
    except (OSError, ValueError):
        pass  # no limit
    return max(0, free // ranks - resident_memory(torch.device("cpu")) - _LIBRARIES)
