"""NUMA nodes: of cores, and of GPUs, as Linux describes the machine.

A rank whose threads and pinned memory are on another socket than its GPU has half the bandwidth to
it. So a rank is bound to the cores of its GPU's node before it starts its device, unless somebody
has bound it: srun, torchrun --numa-binding, numactl, or a variable of OpenMP.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

SYS = Path("/sys")
_CPUS, _NODES = "devices/system/cpu/online", "devices/system/node"
_OPENMP = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def nodes_of_cores(sys: Path = SYS) -> list[int]:
    """The nodes with a core that this process may use."""
    allowed: set[int] = getattr(os, "sched_getaffinity", lambda _: set())(0)
    paths = sys.glob(f"{_NODES}/node*/cpulist")
    return sorted(
        int(path.parent.name.removeprefix("node"))
        for path in paths
        if not allowed.isdisjoint(_cores(path))
    )


def node_of_gpu(bus: str, sys: Path = SYS) -> str:
    """The node of a GPU by its PCI bus: "0000:3b:00.0"; "" = the machine has one node, or does not
    say."""
    path = sys / "bus/pci/devices" / bus / "numa_node"
    node = path.read_text().strip() if bus and path.is_file() else "-1"
    return "" if node == "-1" else node


@contextlib.contextmanager
def bound_to_gpu(device: torch.device, sys: Path = SYS) -> Iterator[None]:
    """A context in which this thread, and those that it starts, use the cores of its GPU's node
    alone."""
    cores: set[int] = set()
    before: set[int] = getattr(os, "sched_getaffinity", lambda _: set())(0)
    free = before == _cores(sys / _CPUS) and not any(name in os.environ for name in _OPENMP)
    if device.type == "cuda" and free:
        from titanlike.device.nvml import pci_bus

        if node := node_of_gpu(pci_bus(device.index or 0), sys):
            cores = _cores(sys / _NODES / f"node{node}" / "cpulist")
    if not cores:
        yield
        return
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cores(path: Path) -> set[int]:
    """{0, 1, 2, 3, 8} of "0-3,8"."""
    text = path.read_text() if path.is_file() else ""
    ranges = [part.split("-") for part in text.split(",") if part.strip()]
    return {core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1)}
