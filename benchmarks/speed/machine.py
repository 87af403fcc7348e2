"""What a hardware profile of a plan needs, measured on this machine by all ranks at once: `bench`
prints it as overrides, to be typed behind the profile that is most like it."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.core.config.errors import as_override
from titanlike.core.device import accelerator
from titanlike.core.device.accelerator import is_accelerator, synchronize
from titanlike.core.device.memory import total_memory
from titanlike.core.models.attention import attention
from titanlike.planning.costs.node_costs import attention_share, now

# (sizes of a large and a small matrix), (batch, heads, tokens, head dimension) of attention
_CPU_SIZES = (1024, 96), (1, 8, 512, 64)
_ACCELERATOR_SIZES = (8192, 2048), (1, 16, 4096, 128)
_VECTOR = 1 << 24  # elements; exceeds all caches


def profile_words(device: torch.device) -> list[str]:
    """Measure this machine on all ranks; return the overrides of a plan. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, hardware_numbers(device, rank, ranks))
    medians = {key: float(np.median([each[key] for each in gathered])) for key in gathered[0]}
    return [as_override(f"hardware.{key}", float(f"{value:.4g}")) for key, value in medians.items()]


def hardware_numbers(device: torch.device, rank: int, ranks: int) -> dict[str, float]:
    """Measure values of `config.schema.Hardware`. Peaks are the data sheet's if known, and
    efficiencies relative to them; otherwise peaks are the measured rates."""

    def seconds(function: Callable[[], object], repeats: int = 9) -> float:
        times = []
        for _ in range(2 + repeats):
            begin = now(device)
            function()
            times.append(now(device) - begin)
        return statistics.median(times[2:])

    def product(size: int, dtype: torch.dtype) -> float:
        """Matmul FLOP/s."""
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        many = max(1, 512 // size) ** 2
        return many * 2 * size**3 / seconds(lambda: [a @ b for _ in range(many)])

    on_cpu = not accelerator.is_accelerator(device)
    (size, less), heads = _CPU_SIZES if on_cpu else _ACCELERATOR_SIZES
    usual = torch.float32 if on_cpu else torch.bfloat16
    large = {dtype: product(size, dtype) for dtype in (torch.float32, torch.bfloat16)}
    half = max(0.0, less * (min(0.999, product(less, usual) / large[usual]) ** (-1 / 3) - 1))
    share = (size / (size + half)) ** 3
    fp32, bf16 = (flops / share for flops in large.values())
    sheet = accelerator.peak_flops(device, "bf16")
    peak = sheet or bf16
    numbers = {"bf16_flops": peak, "matmul_efficiency": min(1.0, bf16 / peak), "matmul_half": half}
    if sheet is None:
        numbers["fp8_flops"] = bf16
    numbers |= dict.fromkeys(("fp32_flops", "tf32_flops"), fp32 / numbers["matmul_efficiency"])
    x, y = (torch.randn(_VECTOR, device=device) for _ in range(2))
    numbers["memory_bandwidth"] = 12 * _VECTOR / seconds(lambda: torch.add(x, y, out=y))
    numbers["memory_efficiency"] = 1.0
    few = torch.randn(16, device=device)
    numbers["kernel_seconds"] = seconds(lambda: [few + few for _ in range(200)]) / 200
    q, k, v = (torch.randn(heads, device=device).to(usual) for _ in range(3))
    attended = 2 * math.prod(heads) * heads[2] / seconds(lambda: attention(q, k, v))
    attended /= 1.0 if on_cpu else attention_share(*heads[2:])
    numbers["attention_efficiency"] = min(1.0, attended / (fp32 if on_cpu else peak))
    if not on_cpu and (memory := total_memory(device, ranks)) is not None:
        numbers["memory"] = memory
    return numbers | (link_numbers(device, rank, ranks) if ranks > 1 else {})


_MESSAGE, _LARGE = 1 << 22, 1 << 26  # bytes of a transfer on a CPU; on devices with their own links
_REPEATS = 15
_TIMES = 8  # consecutive round trips


def link_numbers(device: torch.device, rank: int, ranks: int) -> dict[str, float]:
    """Measure bandwidth and latency of P2P transfers and collectives. Collective over the default
    group.

    CPU ranks use these links for the network as well. On devices the network's values are those of
    the profile that it is typed with.
    """
    on_cpu = not accelerator.is_accelerator(device)
    size = (_MESSAGE if on_cpu else _LARGE) // 4 // ranks * ranks
    large, small = (torch.ones(n, device=device) for n in (size, 1))

    def there_and_back(tensor: Tensor) -> None:
        for sender in (0, 1) * _TIMES if rank < 2 else ():
            (dist.send if rank == sender else dist.recv)(tensor, 1 - rank)

    latency = _median(device, partial(there_and_back, small)) / (2 * _TIMES)
    seconds = _median(device, partial(there_and_back, large)) / (2 * _TIMES) - latency
    part = large[: size // ranks].clone()
    gather = _median(device, lambda: dist.all_gather_into_tensor(large, part))
    reduce = _median(device, lambda: dist.reduce_scatter_tensor(part, large))
    numbers = {
        "node_bandwidth": 4 * size / max(1e-9, seconds),
        "node_latency": latency,
        "collective_bandwidth": 4 * size * (ranks - 1) / ranks / ((gather + reduce) / 2),
    }
    agreed = torch.tensor([*numbers.values()], dtype=torch.float64)
    dist.broadcast(agreed, 0)
    numbers = dict(zip(numbers, agreed.tolist(), strict=True))
    if on_cpu:
        numbers["network_bandwidth"] = numbers["node_bandwidth"]
        numbers["network_latency"] = numbers["node_latency"]
    return {**numbers, "link_efficiency": 1.0}


def _median(device: torch.device, function: Callable[[], object]) -> float:
    """Median wall-clock seconds of a call that all ranks begin together: waiting for peers is part
    of a collective."""
    times = []
    for _ in range(2 + _REPEATS):
        dist.barrier()
        synchronize(device)
        begin = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def resident_memory(device: torch.device) -> int:
    """Bytes in use now, counted as `PeakMemory.allocated`; on a CPU this includes torch itself."""
    if is_accelerator(device):
        return torch.accelerator.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
