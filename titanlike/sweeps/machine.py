"""The machine that layouts are for: how many ranks it has, and how much memory is free on each."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config
from titanlike.job.run import JobRunner
from titanlike.parallel.device import resident_memory
from titanlike.sweeps.processes import cores

_PROBING = 120.0  # seconds that a look at the GPUs may take
_LIBRARIES = 64 << 20  # bytes of a CPU rank besides what it trains with, once it trains


@dataclass(frozen=True)
class Machine:
    """What layouts are for."""

    ranks: int
    memory: int | None  # bytes that training may take on each; None = nobody knows


def machine(config: Config, ranks: int | None, memory: int | None, runner: JobRunner) -> Machine:
    """The ranks that were started, or else what this machine has.

    Raises ConfigError where more ranks are asked for than there are GPUs to run them on.
    """
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    started = runner.ranks.world_size if runner.ranks else None
    ranks = ranks or started or gpus or cores()
    if gpus and ranks > gpus and started is None and config.sweep.submit is None:
        reason = f"there are {gpus} GPUs on this machine"
        fix = f"hydra.sweeper.ranks={gpus}, or device=cpu"
        raise ConfigError([Problem("hydra.sweeper.ranks", ranks, reason, fix)])
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if started else ranks
    if memory is None:
        memory = _free_on_gpus() if gpus else _free_on_cpu(here)
    return Machine(ranks, memory)


def _free_on_gpus() -> int | None:
    """Of the fullest GPU. Asked by another process, since asking takes memory there for good."""
    code = (
        "import torch; "
        "print(min(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_PROBING
        )
        return int(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def _free_on_cpu(ranks: int) -> int | None:
    """A rank's share of the free memory, less what a process takes before it trains."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:  # a container's own limit
        group = Path("/sys/fs/cgroup")
        most, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        free = min(free, int(most) - int(used))
    except (OSError, ValueError):
        pass  # there is none
    return max(0, free // ranks - resident_memory(torch.device("cpu")) - _LIBRARIES)
