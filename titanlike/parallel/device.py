"""Facts of a device: peak FLOP/s, peak memory of this process."""

from __future__ import annotations

import resource
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


def peak_flops(device: torch.device, precision: str) -> float | None:
    """FLOP/s of one device in matrix products, None where it is not known."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _BF16_PEAK.items() if part in name), None)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most the allocator gave on a GPU, the process's largest resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def resident_memory(device: torch.device) -> int:
    """Bytes in use now, in the sense of `peak_memory`: on a CPU that is torch itself, at first."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
