"""Device memory: how much there is, how much a process has used, and allocator settings."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from titanlike.core.device.accelerator import empty_cache, is_accelerator
from titanlike.core.torch_private.accelerator import started, use_expandable_segments

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class PeakMemory(NamedTuple):
    """Peak bytes since `count_anew`."""

    allocated: int  # by tensors; on a CPU the process' resident set size
    reserved: int | None  # by the allocator, which is what runs out; None on a CPU


def peak_memory(device: torch.device) -> PeakMemory:
    if is_accelerator(device):
        allocated = torch.accelerator.max_memory_allocated(device)
        return PeakMemory(allocated, torch.accelerator.max_memory_reserved(device))
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
    return PeakMemory(kib * 1024, None)


def count_anew(device: torch.device) -> None:
    """Reset peak memory, and free what an earlier job of this process (in a sweep) has left."""
    if is_accelerator(device):
        if torch.accelerator.memory_reserved(device):
            gc.collect()  # modules and optimizers form reference cycles
            empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # not Linux: the peak cannot be reset
            Path("/proc/self/clear_refs").write_text("5")


def total_memory(device: torch.device, local_ranks: int, shared: int = 1) -> int | None:
    """Bytes of an accelerator divided by the `shared` ranks on it; on the CPU, of the machine or
    container divided by `local_ranks`.

    None if unknown, e.g. a non-NVIDIA accelerator that this process has not initialized yet.
    """
    if is_accelerator(device):
        if started() is not None:
            return torch.accelerator.get_memory_info(device)[1] // shared
        from titanlike.core.device.nvml import visible_gpus

        return min((gpu.total // shared for gpu in visible_gpus()), default=None)
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = Path("/sys/fs/cgroup/memory.max")
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            total = min(total, int(text))
    except (OSError, ValueError):
        return None
    return total // local_ranks


def prepare_allocator(device: torch.device) -> None:
    """Enable expandable segments of the CUDA allocator, which reduce fragmentation.

    Not if the user has set the allocator's variable, nor on ROCm and XPU, where some versions lack
    it.
    """
    chosen = any(variable in os.environ for variable in _ALLOCATOR_VARIABLES)
    if device.type == "cuda" and torch.version.cuda and sys.platform == "linux" and not chosen:
        use_expandable_segments()


def return_freed_memory() -> None:
    """Make glibc return large freed blocks to the system at once.

    FSDP frees a block's gathered parameters after each use. By default malloc keeps them as holes
    between smaller blocks, and a rank that shards takes more memory than one that does not (8
    blocks of 3M parameters: 470 MiB unsharded, 550 to 650 MiB with dp=2, 318 MiB with dp=2 and
    this). The price is repeated page faults: 1.8 s of CPU per step instead of 1.1 s. So use it only
    if memory is short. A lower threshold would save more, but slow activations down.
    """
    mmap_threshold = -3  # M_MMAP_THRESHOLD in <malloc.h>; setting it also disables its growth
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(mmap_threshold, 2 * 2**20)
