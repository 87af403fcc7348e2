"""Memory of a device: what there is, what a process has taken, and how it is taken."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from titanlike.device.accelerator import (
    accelerator,
    count,
    empty_cache,
    is_accelerator,
    name,
)
from titanlike.torch_private.accelerator import started, use_expandable_segments

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class PeakMemory(NamedTuple):
    """Bytes at most, since `count_anew`."""

    allocated: int  # by tensors; on a CPU the resident size of the process
    reserved: int | None  # that the allocator took from the device: what runs out; None on a CPU


def peak_memory(device: torch.device) -> PeakMemory:
    if is_accelerator(device):
        allocated = torch.accelerator.max_memory_allocated(device)
        return PeakMemory(allocated, torch.accelerator.max_memory_reserved(device))
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
    return PeakMemory(kib * 1024, None)


def count_anew(device: torch.device) -> None:
    """Give back what an earlier job of this process (a sweep's) left, and forget its peaks."""
    if is_accelerator(device):
        if torch.accelerator.memory_reserved(device):
            gc.collect()  # modules and their optimizers refer to each other
            empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # not Linux: the peak of the process it remains
            Path("/proc/self/clear_refs").write_text("5")


def resident_memory(device: torch.device) -> int:
    """Bytes in use now, in the sense of `PeakMemory.allocated`: on a CPU that is torch itself, at
    first."""
    if is_accelerator(device):
        return torch.accelerator.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def total_memory(device: torch.device, local_ranks: int, shared: int = 1) -> int | None:
    """Bytes of an accelerator that so many ranks share, or a rank's share of the machine's (the
    container's) on the CPU.

    None = unknown: also of an accelerator that is not NVIDIA's, before this process has started it.
    """
    if is_accelerator(device):
        if started() is not None:
            return torch.accelerator.get_memory_info(device)[1] // shared
        from titanlike.device.nvml import visible_gpus

        return min((gpu.total // shared for gpu in visible_gpus()), default=None)
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = Path("/sys/fs/cgroup/memory.max")
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            total = min(total, int(text))
    except (OSError, ValueError):
        return None
    return total // local_ranks


def free_memory() -> int | None:
    """Bytes on the fullest visible accelerator, of whatever process; None = unknown.

    Where NVML does not tell it is asked in another process: a context keeps memory on the device.
    """
    from titanlike.device.nvml import visible_gpus

    if gpus := visible_gpus():
        return min(gpu.free for gpu in gpus)
    each = "(a.get_memory_info(i)[0] for i in range(a.device_count()))"
    command = [sys.executable, "-c", f"import torch; a = torch.accelerator; print(min({each}))"]
    try:
        return int(subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=120))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def prepare_allocator(device: torch.device) -> None:
    """Let CUDA's allocator grow its segments: fewer holes, so that more of the memory can be used.

    A user's own settings count instead. Not for ROCm and XPU, where not every version has it.
    """
    chosen = any(variable in os.environ for variable in _ALLOCATOR_VARIABLES)
    if device.type == "cuda" and torch.version.cuda and sys.platform == "linux" and not chosen:
        use_expandable_segments()


def print_machine() -> None:
    """Print as JSON what is installed: versions, names and bytes of memory of the accelerators,
    which this initializes."""
    versions = {"torch": torch.__version__, "CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    devices = [torch.device(accelerator() or "cpu", index) for index in range(count())]
    if devices and torch.distributed.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    memory = [total_memory(device, len(devices)) for device in devices]
    print(json.dumps({"versions": versions, "names": [*map(name, devices)], "memory": memory}))


def return_freed_memory() -> None:
    """Let glibc give large blocks back to the system as soon as they are freed.

    FSDP frees a block's gathered parameters after each use. By default malloc keeps them as holes
    between smaller blocks, and a rank that shards takes more memory than one that does not (8
    blocks of 3M parameters: 470 MiB alone, 550 to 650 MiB with dp=2, 318 MiB with this). The price
    is that each block faults in its pages again and again: 1.1 s of CPU a step there, 1.8 s with
    this. So it is for where memory is short. A lower limit would save more, and slow activations
    down.
    """
    mmap_threshold = -3  # M_MMAP_THRESHOLD in <malloc.h>; to set it also turns off its growth
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(mmap_threshold, 2 * 2**20)
