"""The hardware that a plan assumes: named by the config, measured, or the most similar to this
machine; and the links between its ranks.

`hardware=measure` measures this machine and the times of a model's units on it, with as many
processes at once as a run would have here, each with its share of the cores. Results are stored as
YAML in a folder: a hardware choice that can be shared, and times by what the units compute.
"""

from __future__ import annotations

import functools
import math
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from titanlike.config import files
from titanlike.config.errors import ConfigError, Problem
from titanlike.config.parse import parse, to_plain
from titanlike.config.program import conf_dir
from titanlike.config.schema import Config, Hardware, MeasuredHardware, RunHardware
from titanlike.config.yaml_files import read_yaml
from titanlike.costs.auto_split import run_timeline
from titanlike.costs.node_costs import Times, attention_share, now
from titanlike.costs.unit_costs import CostError
from titanlike.device import accelerator
from titanlike.device.accelerator import count, synchronize
from titanlike.device.choose import first_device
from titanlike.device.memory import total_memory
from titanlike.device.nvml import visible_gpus
from titanlike.distributed.mesh import close_mesh, open_mesh
from titanlike.launch.environment import available_cores
from titanlike.launch.failures import JobFailed
from titanlike.launch.local import PrestartedWorkers, run_workers
from titanlike.launch.signals import StopRequest
from titanlike.launch.worker import Job, Worker
from titanlike.models.attention import attention
from titanlike.torch_private.accelerator import started
from titanlike.training.train_plan import TrainPlan, make_plan

_FOLDER = "~/.cache/titanlike/hardware"

Seconds = Sequence[float]  # a unit's forward, backward, deferred weight gradients

# words in a device's name -> hardware choice; the first match counts
_CHOICES = {
    "H100 PCIe": "h100_pcie",
    "H100": "h100_sxm",
    "H200": "h200",
    "GB200": "gb200",
    "B200": "b200",
    "A100-SXM4-40GB": "a100_40g",
    "A100-PCIE-40GB": "a100_40g",
    "A100": "a100_80g",
    "MI300X": "mi300x",
}


def planned_hardware(config: Config, ranks: int | None = None) -> Hardware:
    """The hardware to plan for; ranks: number of ranks if different from the config's. Raises
    ConfigError if none is named."""
    each = min(config.launch.ranks_per_device, ranks or config.world_size)
    if isinstance(config.hardware, Hardware):
        return config.hardware.of_each(each)
    if isinstance(config.hardware, RunHardware):
        try:
            timeline = run_timeline(config.hardware.path)
        except CostError as error:
            problem = Problem("hardware", config.hardware.path, str(error), "hardware=measure")
            raise ConfigError([problem]) from None
        return _likely(parse(timeline.config)[0]).of_each(each)
    if isinstance(config.hardware, MeasuredHardware):
        return measured_hardware(config, ranks or config.world_size).of_each(each)
    reason = "a plan is made for a device"
    fix = "hardware=h100_sxm, or hardware=measure for this machine"
    raise ConfigError([Problem("hardware", config.hardware.name, reason, fix)])


def likely_hardware(config: Config) -> Hardware:
    """The config's hardware, or the shipped choice most similar to this machine's devices; divided
    among ranks that share a device."""
    return _likely(config).of_each(min(config.launch.ranks_per_device, config.world_size))


def _likely(config: Config) -> Hardware:
    if isinstance(config.hardware, Hardware):
        return config.hardware
    device = first_device(config.device)
    if not accelerator.is_accelerator(device):
        return shipped("cpu")
    name = accelerator.name(device) if started() else next((g.name for g in visible_gpus()), "")
    return shipped(next((c for words, c in _CHOICES.items() if words in name), "h100_sxm"))


@functools.cache
def shipped(choice: str) -> Hardware:
    """Load a choice of conf/hardware."""
    text = (conf_dir() / "hardware" / f"{choice}.yaml").read_text(encoding="utf-8")
    hardware = parse({"hardware": yaml.safe_load(text)})[0].hardware
    assert isinstance(hardware, Hardware)
    return hardware


# --- links between the ranks of an axis -----------------------------------------------------------
#
# The mesh is laid out in rank order, so ranks of its last axis are neighbours. To add an axis, name
# it in `axes`, or in `_place` if it is part of another axis.


def axes(config: Config) -> dict[str, int]:
    """Sizes of the mesh's axes, outermost first, as `distributed/mesh.py` lays them out."""
    sizes = {"pp": config.pp, "replicate": config.replicate, "shard": config.shards}
    return {**sizes, "tp": config.tp}


@dataclass(frozen=True)
class Link:
    """The link between the ranks of one axis."""

    size: int  # ranks
    nodes: int  # number of nodes they are on
    bandwidth: float  # bytes/s that each rank sends in an all-gather or reduce-scatter
    latency: float  # seconds of an empty collective
    to_all: float  # bytes/s per rank in an all-to-all
    to_next: float  # bytes/s per rank if each sends to the next one (ring); the slowest counts

    @property
    def inside(self) -> bool:
        return self.nodes == 1

    def gather(self, nbytes: float, count: float = 1) -> float:
        """Seconds of `count` all-gathers or reduce-scatters whose unsharded tensors total `nbytes`."""
        if self.size == 1:
            return 0.0
        return self.sent(nbytes * (self.size - 1) / self.size, count, self.bandwidth)

    def sent(self, nbytes: float, count: float, bandwidth: float) -> float:
        """Seconds of `count` collectives in which a rank sends `nbytes` in total."""
        return nbytes / bandwidth + count * self.latency

    def all_reduce(self, nbytes: float, count: float = 1) -> float:
        return 2 * self.gather(nbytes, count)


def _place(config: Config, axis: str) -> tuple[int, int]:
    """(number of ranks along an axis, their distance in ranks). Ranks of cp and ep are neighbours
    in shard."""
    if axis == "cp":
        return config.cp, config.tp
    if axis == "ep":
        return config.ep, config.tp * config.ep_shards // config.ep
    if axis == "expert_shard":
        return config.shards // config.ep_shards, config.ep_shards * config.tp
    sizes = axes(config)
    names = list(sizes)
    return sizes[axis], math.prod(sizes[name] for name in names[names.index(axis) + 1 :])


def link_of(config: Config, axis: str, hardware: Hardware) -> Link:
    """The link between the ranks along an axis. A ring over several nodes leaves each node by as
    many links as it has ranks there."""
    size, stride = _place(config, axis)
    node = hardware.devices_per_node
    ranks_in_node = max(1, min(size, node // stride))  # ranks of the axis in one node
    nodes = -(-size // ranks_in_node)
    inside, outside = hardware.node_bandwidth, hardware.network_bandwidth
    if nodes == 1:
        inside = hardware.collective_bandwidth or inside
    bandwidth = to_all = to_next = inside
    latency = 0.0
    if nodes > 1:
        bandwidth = min(inside, outside * ranks_in_node)
        to_next = min(inside, outside)
        leaving = (size - ranks_in_node) / (size - 1)  # fraction of peers on other nodes
        to_all = min(outside / leaving, inside / (1 - leaving) if leaving < 1 else inside)
        latency = hardware.network_latency * math.log2(nodes)
    latency += hardware.node_latency * math.log2(ranks_in_node)
    reached = (hardware.link_efficiency * rate for rate in (bandwidth, to_all, to_next))
    bandwidth, to_all, to_next = reached
    return Link(size, nodes, bandwidth, latency, to_all, to_next)


def sharded(link: Link, bandwidth: float | None) -> Link:
    """The link of FSDP's collectives, including their copies; bandwidth: measured within a node, or
    None."""
    if bandwidth is None or not link.inside:
        return link
    return replace(link, bandwidth=bandwidth, latency=0.0)


def message_link(config: Config, hardware: Hardware) -> tuple[float, float]:
    """(bytes/s, latency in seconds) of a P2P send from one pipeline rank to the next."""
    sizes = axes(config)
    distance = math.prod(size for name, size in sizes.items() if name != "pp")
    inside = distance * config.pp <= hardware.devices_per_node
    bandwidth = hardware.node_bandwidth if inside else hardware.network_bandwidth
    latency = hardware.node_latency if inside else hardware.network_latency
    return bandwidth * hardware.link_efficiency, latency


# --- the time of a stage's forward or backward with overlapping FSDP collectives -----------------


def overlapped_seconds(
    units: Sequence[float], gathers: Sequence[float], reductions: Sequence[float] = ()
) -> float:
    """Seconds until all units have run and all gradients are reduced, if collectives overlap with
    compute. units, gathers, reductions: seconds of each unit in execution order; empty = none."""
    if not any(gathers) and not any(reductions):
        return sum(units)
    end, ready = 0.0, 0.0
    link = gathers[0] if gathers else 0.0
    for index, seconds in enumerate(units):
        start = max(end, ready)
        if gathers and index + 1 < len(units):
            link = max(link, start) + gathers[index + 1]
            ready = link
        end = start + seconds
        if reductions:
            link = max(link, end) + reductions[index]
    return max(end, link)


# --- measuring this machine -----------------------------------------------------------------------


def measured_hardware(config: Config, ranks: int) -> Hardware:
    """The stored profile of this machine with `ranks` ranks, or a new one. Raises ConfigError."""
    ranks = _at_once(ranks)
    base = _likely(replace(config, hardware=config.hardware if count() else shipped("cpu")))

    def choice(numbers: dict[str, Any]) -> dict[str, Any]:
        return to_plain(replace(base, title=f"{platform.node()} ({ranks} ranks)", **numbers))

    what = f"this machine with {ranks} processes"
    profile = _kept(config, "", ranks, what, "measure_hardware", choice)
    known = {name: value for name, value in profile.items() if name in vars(base)}
    parsed, problems = parse({"hardware": to_plain(base) | known})
    if problems or not isinstance(parsed.hardware, Hardware):
        raise ConfigError([*problems, damaged("its keys are not those of a profile")][:1])
    return parsed.hardware


def measured_times(config: Config, plan: TrainPlan, deferred: Collection[int]) -> list[Seconds]:
    """Seconds of each unit of a plan in its microbatches on this machine, stored or measured now.
    Raises ConfigError.

    deferred: stages with deferred weight gradients.
    """
    costs, ranks = plan.memory().unit_costs, _at_once(config.world_size)
    assert costs is not None
    name = f"units/{costs.signature}-"
    profiles = _kept(config, name, ranks, "the model's units", "measure_units")
    seconds: list[Seconds] = []
    try:
        for stage, names in enumerate(plan.stages):
            profile = profiles["deferred" if stage in deferred else "together"]
            profile = profile[len(seconds) : len(seconds) + len(names)]
            seconds += [(float(f), float(i), float(w)) for f, i, w in profile]
    except (TypeError, ValueError, KeyError):
        raise ConfigError([damaged("its times are not three a unit")]) from None
    return seconds


def _at_once(ranks: int) -> int:
    """Number of this machine's processes in a run of `ranks` ranks."""
    return max(1, min(ranks, count() or available_cores()))


def _processes(config: Config, ranks: int) -> str:
    """The settings of a measurement, as part of its file name."""
    alone = config.exact and available_cores() // ranks > 1
    return f"{ranks}-ranks{'-1-thread' if alone else ''}"


def _kept(
    config: Config,
    name: str,
    ranks: int,
    what: str,
    function: str,
    finish: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """Read a stored measurement of this machine with so many ranks; else measure, and store what
    `finish` makes of the medians over ranks. Raises ConfigError."""
    settings = config.hardware
    assert isinstance(settings, MeasuredHardware)
    folder = Path(settings.folder or _FOLDER).expanduser()
    path = folder / f"{name}{platform.node() or 'machine'}-{_processes(config, ranks)}.yaml"
    if not path.is_file() or settings.again:
        print(f"measuring {what} ...", file=sys.stderr, flush=True)
        measured = _measure(config, function, ranks)
        medians = {
            key: np.median([rank_values[key] for rank_values in measured], axis=0).tolist()
            for key in measured[0]
        }
        text = yaml.safe_dump(finish(medians), sort_keys=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.atomic_write_text(path, f"# Measured of {what}.\n{text}")
        print(f"kept in {path}", file=sys.stderr, flush=True)
    try:
        profile = read_yaml(path)
        if not isinstance(profile, dict):
            raise ValueError("is no measurement")
        return profile
    except (OSError, ValueError) as error:
        raise ConfigError([damaged(f"{path}: {error}")]) from None


def damaged(reason: str) -> Problem:
    """Return the error for a stored measurement that no run has written."""
    return Problem("hardware", "measure", reason, "hardware.again=true measures anew")


def _measure(config: Config, function: str, ranks: int) -> list[dict[str, Any]]:
    """Run a function of this module on each of so many ranks; returns its results. Raises
    ConfigError if one fails."""
    with tempfile.TemporaryDirectory() as folder, PrestartedWorkers() as workers:
        job = Job(f"{__name__}:{function}", config, Path(folder), [])
        try:
            started = workers.adopt(ranks, job.function)
            return run_workers(job, StopRequest(), started)["ranks"]
        except JobFailed as failed:
            reason = f"measuring failed: {failed.error}"
            fix = "hardware=cpu, or another profile"
            raise ConfigError([Problem("hardware", "measure", reason, fix)]) from None


# --- measurements on one rank ---------------------------------------------------------------------


_ROUNDS, _SECONDS = 3, 4.0  # minimum when measuring units
# (sizes of a large and a small matrix), (batch, heads, tokens, head dimension) of attention
_CPU_SIZES = (1024, 96), (1, 8, 512, 64)
_ACCELERATOR_SIZES = (8192, 2048), (1, 16, 4096, 128)
_VECTOR = 1 << 24  # elements; exceeds all caches


def measure_hardware(config: Config, worker: Worker) -> dict[str, Any]:
    """Measure values of `config.schema.Hardware`; {"ranks": values of each rank}. Collective."""
    return _on_each_rank(config, worker, hardware_numbers)


def measure_units(config: Config, worker: Worker) -> dict[str, Any]:
    """Measure times of each unit, with and without deferred weight gradients; {"ranks": times of
    each rank}. Collective.

    Times are means over rounds, each over all units: a machine's speed varies from second to
    second, by a quarter if it is shared. Measuring unit after unit would compare one in a fast
    moment with one in a slow moment.
    """
    costs = make_plan(config).memory().unit_costs
    assert costs is not None

    def seconds(device: torch.device, *_: int) -> dict[str, Any]:
        rounds: dict[str, list[list[Times]]] = {"together": [], "deferred": []}
        begin, count = time.perf_counter(), 0
        while count < _ROUNDS or time.perf_counter() - begin < _SECONDS:
            for name, times in rounds.items():
                times.append(costs.times(device, name == "deferred", repeats=5))
            count += 1
        return {name: np.mean(times, axis=0).tolist() for name, times in rounds.items()}

    return _on_each_rank(config, worker, seconds)


def _on_each_rank(
    config: Config, worker: Worker, measure: Callable[[torch.device, int, int], dict[str, Any]]
) -> dict[str, Any]:
    """Call measure(device, rank, number of ranks) on all ranks at the same time."""
    config = replace(config, pp=1, dp=worker.world_size, replicate=1, tp=1, cp=1, ep=1)
    config = replace(config, launch=replace(config.launch, ranks_per_device=1))
    torch.set_float32_matmul_precision(config.matmul_precision)
    if config.exact:  # as in a run
        torch.set_num_threads(1)
    device = open_mesh(config, worker).device
    gathered: list[Any] = [None] * worker.world_size
    dist.barrier()
    with warnings.catch_warnings():  # torch warns of newer names of its collectives
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_gather_object(gathered, measure(device, worker.rank, worker.world_size))
    close_mesh()
    return {"ranks": gathered}


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


# --- communication between local ranks ------------------------------------------------------------


_MESSAGE, _LARGE = 1 << 22, 1 << 26  # bytes of a transfer on a CPU; on devices with their own links
_WIDTH, _LAYERS, _ROWS = 1024, 4, 32  # a model that communicates longer than it computes
_REPEATS = 15
_TIMES = 8  # consecutive round trips


def link_numbers(device: torch.device, rank: int, ranks: int) -> dict[str, float]:
    """Measure bandwidth and latency of P2P transfers and collectives. Collective over the default
    group.

    CPU ranks use these links for the network as well, and do not overlap FSDP's collectives with
    compute. On devices the network's values are unchanged, and FSDP's collectives run on their own
    stream at the speed of other collectives.
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
    if on_cpu:
        numbers |= _sharded(device, ranks)
    agreed = torch.tensor([*numbers.values()], dtype=torch.float64)
    dist.broadcast(agreed, 0)
    numbers = dict(zip(numbers, agreed.tolist(), strict=True))
    if on_cpu:
        numbers["network_bandwidth"] = numbers["node_bandwidth"]
        numbers["network_latency"] = numbers["node_latency"]
    return {**numbers, "link_efficiency": 1.0}


def _sharded(device: torch.device, ranks: int) -> dict[str, float]:
    """Measure bytes/s that a rank sends while FSDP gathers parameters and reduces gradients,
    including its copies and hooks."""
    plain, sharded = (
        nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS))).to(device)
        for _ in range(2)
    )
    mesh = init_device_mesh(device.type, (ranks,))
    for layer in sharded:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(sharded, mesh=mesh)
    x = torch.ones(_ROWS, _WIDTH, device=device)

    def forward_and_backward(model: nn.Module) -> None:
        model(x).sum().backward()

    (forward, both), (gathers, sharded_both) = (
        (_median(device, partial(model, x)), _median(device, partial(forward_and_backward, model)))
        for model in (plain, sharded)
    )
    gathered = max(1e-6, gathers - forward)
    reduced = max(1e-6, sharded_both - both - 2 * gathered)
    sent = 4 * _LAYERS * _WIDTH**2 * (ranks - 1) / ranks
    return {"gather_bandwidth": sent / gathered, "reduce_bandwidth": sent / reduced}


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
