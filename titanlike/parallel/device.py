"""Devices: which one, its peak FLOP/s, the memory that this process uses."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

# Dense bf16 FLOP/s by a part of the device's name, from the vendors' data sheets.
_BF16_PEAK = {
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
}


def choose_device(wanted: str, local_rank: int, local_ranks: int) -> tuple[torch.device, str]:
    """This rank's device and why, for `device=auto|cpu|cuda` and so many ranks on this machine.

    Raises ValueError where CUDA is asked for and there is not a device for each rank.
    """
    count = torch.cuda.device_count()
    if wanted == "cpu":
        return torch.device("cpu"), "asked for"
    if count >= local_ranks:
        name = torch.cuda.get_device_name(local_rank)
        reason = "asked for" if wanted == "cuda" else f"{count} x {name} found"
        return torch.device("cuda", local_rank), reason
    found = "no GPU" if count == 0 else f"{count} GPU for {local_ranks} ranks"
    if wanted == "cuda":
        raise ValueError(f"device=cuda: {found} on this machine; write device=auto")
    return torch.device("cpu"), f"{found} found"


def peak_flops(device: torch.device, precision: str) -> float | None:
    """FLOP/s of one device in matrix products, None where it is not known.

    Of float8 that of bf16, in which part of the model computes: so runs in both can be compared, and
    float8 may come to more than 1.
    """
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _BF16_PEAK.items() if part in name), None)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most the allocator gave on a GPU, the process's largest resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def total_memory(device: torch.device, local_ranks: int) -> int | None:
    """Bytes of a GPU, or a rank's share of the machine's (the container's) on the CPU; None = unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = Path("/sys/fs/cgroup/memory.max")
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            total = min(total, int(text))
    except (OSError, ValueError):
        return None
    return total // local_ranks


def resident_memory(device: torch.device) -> int:
    """Bytes in use now, in the sense of `peak_memory`: on a CPU that is torch itself, at first."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def return_freed_memory() -> None:
    """Let glibc give large blocks back to the system as soon as they are freed.

    FSDP frees a block's gathered parameters after each use. By default malloc keeps them as holes
    between smaller blocks, and a rank that shards takes more memory than one that does not
    (8 blocks of 3M parameters: 470 MiB alone, 550 MiB with dp=2, 318 MiB with this). A lower
    limit saves more and slows activations down, which then fault in their pages again and again.
    """
    mmap_threshold = -3  # M_MMAP_THRESHOLD in <malloc.h>; to set it also turns off its growth
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(mmap_threshold, 2 * 2**20)


@contextlib.contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Within it, products of fp32 matrices are computed as torch.set_float32_matmul_precision says."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Within it, torch uses deterministic kernels alone, and raises where an operation has none.

    Afterwards the settings are restored (a sweep's jobs share a process), except that cuBLAS keeps
    the workspace that it was initialized with.
    """
    if not on:
        yield
        return
    cudnn, filling = torch.backends.cudnn, torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.benchmark, cudnn.deterministic, filling.fill_uninitialized_memory
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    # cuBLAS needs a workspace of a fixed size; torch raises for a wrong one of the user's
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn.benchmark = False  # it would choose kernels by timings, which vary
    cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)
    # NaN in each new tensor would show reads of uninitialized memory, at the cost of writing to all
    # memory that is allocated
    filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        cudnn.benchmark, cudnn.deterministic, filling.fill_uninitialized_memory = before
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
