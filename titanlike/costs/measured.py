"""`hardware=measure`: this machine's own profile, and the times of a model's units on it.

Both are measured by as many processes at once as a run would have here, each with its share of the
cores, and kept as YAML in a folder: a hardware choice that can be given to others, and times by what
the units compute.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from titanlike.config import files
from titanlike.config.errors import ConfigError, Problem
from titanlike.config.hardware import Hardware, MeasuredHardware
from titanlike.config.parse import parse, to_plain
from titanlike.config.schema import Config
from titanlike.costs.known_hardware import likely_hardware, shipped
from titanlike.costs.node_costs import Times, now
from titanlike.costs.unit_costs import UnitCosts
from titanlike.device import accelerator
from titanlike.device.accelerator import count, synchronize
from titanlike.device.choose import first_device
from titanlike.launch.environment import available_cores
from titanlike.training.draft import Draft, draft

_FOLDER = "~/.cache/titanlike/hardware"
_TIMEOUT = 300  # seconds

Seconds = Sequence[float]  # forward, backward, weight gradients that wait of a unit


def measured_hardware(config: Config, ranks: int) -> Hardware:
    """The kept profile of this machine with so many ranks, or a new one. Raises ConfigError."""
    settings = config.hardware
    assert isinstance(settings, MeasuredHardware)
    ranks = _at_once(ranks)
    path = _folder(settings) / f"{platform.node() or 'machine'}-{ranks}-ranks.yaml"
    base = likely_hardware(replace(config, hardware=shipped("cpu") if not count() else settings))
    if path.is_file() and not settings.again:
        kept = yaml.safe_load(path.read_text(encoding="utf-8"))
        return replace(base, **{k: v for k, v in kept.items() if k in vars(base)})
    print(f"measuring this machine with {ranks} processes ...", file=sys.stderr, flush=True)
    numbers: dict[str, Any] = {**_median(_measure(config, "hardware", ranks))}
    hardware = replace(base, title=f"{platform.node()} ({ranks} ranks)", **numbers)
    _write(path, "This machine, measured.", to_plain(hardware))
    print(f"kept in {path}", file=sys.stderr, flush=True)
    return hardware


def measured_times(config: Config, draft: Draft, deferred: Collection[int]) -> list[Seconds]:
    """Of each unit of a draft in its microbatches, on this machine; kept, too. Raises ConfigError.

    deferred: stages whose weight gradients wait.
    """
    settings, costs = config.hardware, draft.memory().unit_costs
    assert isinstance(settings, MeasuredHardware) and costs is not None
    ranks = _at_once(config.world_size)
    path = _folder(settings) / "units" / f"{costs.signature}-{platform.node()}-{ranks}-ranks.yaml"
    if path.is_file() and not settings.again:
        kept = yaml.safe_load(path.read_text(encoding="utf-8"))
        return _of_stages(kept, draft.stages, deferred)
    print("measuring the model's units ...", file=sys.stderr, flush=True)
    found = _measure(config, "units", ranks)
    units: dict[str, list[Sequence[float]]] = {
        name: [
            [statistics.median(part) for part in zip(*unit, strict=True)]
            for unit in zip(*(one[name] for one in found), strict=True)
        ]
        for name in found[0]
    }
    _write(path, "Seconds of a model's units: forward, backward, weight gradients.", units)
    return _of_stages(units, draft.stages, deferred)


def _of_stages(
    profiles: dict[str, list[Seconds]], stages: Sequence[Sequence[str]], deferred: Collection[int]
) -> list[Seconds]:
    found: list[Seconds] = []
    for stage, names in enumerate(stages):
        profile = profiles["deferred" if stage in deferred else "together"]
        found += profile[len(found) : len(found) + len(names)]
    return found


def _folder(settings: MeasuredHardware) -> Path:
    return Path(settings.folder or _FOLDER).expanduser()


def _at_once(ranks: int) -> int:
    """Processes of a run of so many ranks that would be here at once."""
    return max(1, min(ranks, count() or available_cores()))


def _write(path: Path, comment: str, plain: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(plain, sort_keys=False)
    files.atomic_write_text(path, f"# {comment}\n{text}")


def _median(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def _measure(config: Config, what: str, ranks: int) -> list[Any]:
    """What each of so many processes finds. Raises ConfigError where one fails."""
    threads = max(1, available_cores() // ranks)
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.json"
        plain = to_plain(config)
        spec.write_text(json.dumps({"what": what, "ranks": ranks, "config": plain}))
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
        command = [sys.executable, "-m", "titanlike.costs.measured", str(spec)]
        started = [
            subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE)
            for rank in range(ranks)
        ]
        try:
            errors = [process.communicate(timeout=_TIMEOUT)[1] for process in started]
        except subprocess.TimeoutExpired:
            errors = [b"it took more than 5 minutes"]
        finally:
            for process in started:
                process.kill()
        results = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        if not all(result.is_file() for result in results):
            lines = b"".join(errors).decode(errors="replace").strip().splitlines() or ["it ended"]
            reason = f"measuring failed: {lines[-1]}"
            fix = "hardware=cpu, or another profile"
            raise ConfigError([Problem("hardware", "measure", reason, fix)])
        return [json.loads(result.read_text()) for result in results]


# --- a process that measures its part of a machine ------------------------------------------------


_ROUNDS, _SECONDS = 3, 4.0  # of measuring units, at the least
PROFILES = {"together": False, "deferred": True}  # whether weight gradients wait
_PRODUCT, _SMALL_PRODUCT = 1024, 96  # sizes of matrices
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

    large, small = product(_PRODUCT, torch.float32), product(_SMALL_PRODUCT, torch.float32)
    reached = min(0.999, small / large)
    half = max(0.0, _SMALL_PRODUCT * (reached ** (-1 / 3) - 1))
    share = (_PRODUCT / (_PRODUCT + half)) ** 3
    bf16 = product(_PRODUCT, torch.bfloat16)
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


# --- what local ranks exchange with each other ----------------------------------------------------


_MESSAGE, _LARGE = 1 << 22, 1 << 26  # bytes, of a CPU and of devices with links of their own
_WIDTH, _LAYERS, _ROWS = 1024, 4, 32  # of a model whose products take less than its parameters' way
_REPEATS = 15
_TIMES = 8  # there and back in a row


def link_numbers(device: torch.device, rank: int, ranks: int) -> dict[str, float]:
    """Bytes/s and seconds of messages and collectives. Collective over the default group.

    A CPU's ranks have no other links than these, and send what FSDP exchanges in between. Of devices the
    network's numbers stay as they are known, and what FSDP exchanges is as other collectives, on a stream of
    its own.
    """
    wall, on_cpu = Clock(device), not accelerator.is_accelerator(device)
    size = (_MESSAGE if on_cpu else _LARGE) // 4 // ranks * ranks
    large, one = (torch.ones(n, device=device) for n in (size, 1))

    def there_and_back(tensor: Tensor) -> Callable[[], None]:
        def run() -> None:
            for sender in (0, 1) * _TIMES if rank < 2 else ():
                (dist.send if rank == sender else dist.recv)(tensor, 1 - rank)

        return run

    latency = wall.median(there_and_back(one)) / (2 * _TIMES)
    seconds = wall.median(there_and_back(large)) / (2 * _TIMES) - latency
    bandwidth = 4 * size / max(1e-9, seconds)
    part = large[: size // ranks].clone()
    both = (
        wall.median(lambda: dist.all_gather_into_tensor(large, part)),
        wall.median(lambda: dist.reduce_scatter_tensor(part, large)),
    )
    sent = 4 * size * (ranks - 1) / ranks
    found = {
        "node_bandwidth": bandwidth,
        "node_latency": latency,
        "collective_bandwidth": sent / (sum(both) / 2),
    }
    if on_cpu:
        gathered, reduced = _sharded(wall, device, ranks)
        found |= {"gather_bandwidth": gathered, "reduce_bandwidth": reduced}
    agreed = torch.tensor([*found.values()], dtype=torch.float64)
    dist.broadcast(agreed, 0)
    found = dict(zip(found, agreed.tolist(), strict=True))
    if on_cpu:
        found["network_bandwidth"] = found["node_bandwidth"]
        found["network_latency"] = found["node_latency"]
    return {**found, "link_efficiency": 1.0}


def _forward_and_backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def _sharded(wall: Clock, device: torch.device, ranks: int) -> tuple[float, float]:
    """Bytes/s that a rank sends while FSDP gathers parameters, and reduces gradients, with its copies
    and hooks."""
    plain, sharded = (
        nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS))).to(device)
        for _ in range(2)
    )
    mesh = init_device_mesh(device.type, (ranks,))
    for layer in sharded:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(sharded, mesh=mesh)
    x = torch.ones(_ROWS, _WIDTH, device=device)
    seconds = []
    for model in (plain, sharded):
        forward = wall.median(partial(model, x))
        both = wall.median(partial(_forward_and_backward, model, x))
        seconds.append((forward, both))
    (forward, both), (gathers, all_of_it) = seconds
    gathered = max(1e-6, gathers - forward)
    reduced = max(1e-6, all_of_it - both - 2 * gathered)
    sent = 4 * _LAYERS * _WIDTH**2 * (ranks - 1) / ranks
    return sent / gathered, sent / reduced


class Clock:
    """Of the wall: others' work and what a rank waits for are a part of an exchange."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def median(self, function: Callable[[], object]) -> float:
        """Seconds, all ranks begin together."""
        times = []
        for _ in range(2 + _REPEATS):
            dist.barrier()
            synchronize(self._device)
            begin = time.perf_counter()
            function()
            synchronize(self._device)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[2:])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
