"""A process that measures its part of a machine: `python -m titanlike.costs.measuring SPEC RANK`.

All processes do the same at the same time, as ranks of a run would.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from titanlike.config.parse import parse
from titanlike.costs.measuring_links import link_numbers
from titanlike.costs.node_times import Times, now
from titanlike.costs.unit_costs import UnitCosts
from titanlike.device import accelerator
from titanlike.device.choose import first_device
from titanlike.training.draft import draft

_ROUNDS, _SECONDS = 3, 4.0  # of measuring units, at the least
PROFILES = {"together": False, "deferred": True}  # whether weight gradients wait
_LARGE, _SMALL = 1024, 96  # sizes of matrices
_VECTOR = 1 << 24  # elements that no cache holds


def main(spec_path: str, rank: int) -> None:
    spec = json.loads(Path(spec_path).read_text())
    config, problems = parse(spec["config"])
    assert not problems, problems
    folder = Path(spec_path).parent
    device = first_device(config.device)
    if accelerator.is_accelerator(device):
        device = torch.device(device.type, rank)
        accelerator.set_device(device)
    torch.set_float32_matmul_precision(config.matmul_precision)
    store = dist.FileStore(str(folder / "store"), spec["ranks"])
    wait = timedelta(seconds=120)
    backend = accelerator.backends(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=spec["ranks"], timeout=wait)
    if spec["what"] == "units":
        costs = draft(config).memory().unit_costs
        assert costs is not None
        dist.barrier()
        found: dict[str, Any] = seconds_of_units(costs, device)
    else:
        dist.barrier()
        found = hardware_numbers(device, rank, spec["ranks"])
    dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _mean(unit: Iterable[Times]) -> Times:
    forward, inputs, weights = (statistics.fmean(part) for part in zip(*unit, strict=True))
    return forward, inputs, weights


def seconds_of_units(costs: UnitCosts, device: torch.device) -> dict[str, list[Times]]:
    """Of each unit, by profile: means over rounds, each of all units and profiles. A machine's speed
    changes from one second to the next, by a quarter where it is shared: what is measured in one go
    may be that of a fast moment, beside another unit's of a slow one."""
    rounds: dict[str, list[list[Times]]] = {name: [] for name in PROFILES}
    begin, count = time.perf_counter(), 0
    while count < _ROUNDS or time.perf_counter() - begin < _SECONDS:
        for name, deferred in PROFILES.items():
            rounds[name].append(costs.times(device, deferred, repeats=5))
        count += 1
    return {
        name: [_mean(unit) for unit in zip(*each, strict=True)] for name, each in rounds.items()
    }


def hardware_numbers(device: torch.device, rank: int, ranks: int) -> dict[str, float]:
    """Of `config.hardware.Hardware`; shares are 1, as these are what is reached."""

    def seconds(function: Callable[[], object], repeats: int = 9) -> float:
        times = []
        for _ in range(2 + repeats):
            begin = now(device)
            function()
            times.append(now(device) - begin)
        return statistics.median(times[2:])

    def product(size: int, dtype: torch.dtype) -> float:
        """FLOP/s."""
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        many = max(1, 512 // size) ** 2
        return many * 2 * size**3 / seconds(lambda: [a @ b for _ in range(many)])

    large, small = product(_LARGE, torch.float32), product(_SMALL, torch.float32)
    reached = min(0.999, small / large)
    half = max(0.0, _SMALL * (reached ** (-1 / 3) - 1))
    share = (_LARGE / (_LARGE + half)) ** 3
    bf16 = product(_LARGE, torch.bfloat16)
    x, y = (torch.randn(_VECTOR, device=device) for _ in range(2))
    bandwidth = 12 * _VECTOR / seconds(lambda: torch.add(x, y, out=y))
    few = torch.randn(16, device=device)
    kernel = seconds(lambda: [few + few for _ in range(200)]) / 200
    q, k, v = (torch.randn(1, 8, 512, 64, device=device) for _ in range(3))
    attended = (
        2
        * 8
        * 512
        * 512
        * 64
        / seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    )
    found = {
        "bf16_flops": bf16 / share,
        "fp8_flops": bf16 / share,
        "fp32_flops": large / share,
        "tf32_flops": large / share,
        "matmul_efficiency": 1.0,
        "matmul_half": half,
        "attention_efficiency": min(1.0, attended / (large / share)),
        "memory_bandwidth": bandwidth,
        "memory_efficiency": 1.0,
        "kernel_seconds": kernel,
    }
    if ranks > 1:
        found |= link_numbers(device, rank, ranks)
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
