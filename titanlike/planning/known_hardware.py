"""The hardware that a plan is made for: what the config names, what was measured, what is likely;
and the links between its ranks.

`hardware=measure` is this machine's own profile, and the times of a model's units on it: measured
by as many processes at once as a run would have here, each with its share of the cores, and kept as
YAML in a folder: a hardware choice that can be given to others, and times by what the units
compute.
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

Seconds = Sequence[float]  # forward, backward, weight gradients that wait of a unit

# Words of a device's name -> the choice that stands for it; the first that is in it
_CHOICES = {
    "H100 PCIe": "h100_pcie",
    "H100": "h100_sxm",
    "H200": "h200",
    "B200": "b200",
    "A100-SXM4-40GB": "a100_40g",
    "A100-PCIE-40GB": "a100_40g",
    "A100": "a100_80g",
    "MI300X": "mi300x",
}


def planned_hardware(config: Config, ranks: int | None = None) -> Hardware:
    """What a plan is made for; ranks: of the layouts, where not as many as of this config. Raises
    ConfigError where none is named."""
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
    """What a rank has of the config's, or of that of the shipped choices which is nearest to this
    machine's devices."""
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
    """A choice of conf/hardware."""
    text = (conf_dir() / "hardware" / f"{choice}.yaml").read_text(encoding="utf-8")
    hardware = parse({"hardware": yaml.safe_load(text)})[0].hardware
    assert isinstance(hardware, Hardware)
    return hardware


# --- the links that the ranks of an axis are joined by --------------------------------------------
#
# The mesh is laid over the devices in the order of their ranks, so the last of its axes has
# neighbours. To add an axis, name it in `axes`, or in `_place` if it is a part of one.


def axes(config: Config) -> dict[str, int]:
    """Sizes of the mesh's axes, the outermost first, as `parallel/mesh.py` lays them."""
    sizes = {"pp": config.pp, "replicate": config.replicate, "shard": config.shards}
    return {**sizes, "tp": config.tp}


@dataclass(frozen=True)
class Link:
    """A link between the ranks of one axis."""

    size: int  # ranks
    nodes: int  # over which they are spread
    bandwidth: float  # bytes/s that each rank sends in a collective
    latency: float  # seconds of a collective of nothing
    to_all: float  # bytes/s where each sends another message to each other one
    to_next: float  # bytes/s where each sends to the next one, and the slowest counts

    @property
    def inside(self) -> bool:
        return self.nodes == 1

    def gather(self, nbytes: float, count: float = 1) -> float:
        """Seconds of `count` all-gathers, or reduce-scatters, of so many bytes together, a rank's
        part and all others'."""
        if self.size == 1:
            return 0.0
        return self.sent(nbytes * (self.size - 1) / self.size, count, self.bandwidth)

    def sent(self, nbytes: float, count: float, bandwidth: float) -> float:
        """Seconds of `count` exchanges in which a rank sends so many bytes together."""
        return nbytes / bandwidth + count * self.latency

    def all_reduce(self, nbytes: float, count: float = 1) -> float:
        return 2 * self.gather(nbytes, count)


def _place(config: Config, axis: str) -> tuple[int, int]:
    """(ranks along an axis, how far apart they are). Those of cp and ep are neighbours in shard,
    or with ep over tp's ranks in both; what has the same experts is beyond these."""
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
    """The link between the ranks along an axis.

    A ring over several nodes leaves each by as many links as it has ranks there.
    """
    size, stride = _place(config, axis)
    node = hardware.devices_per_node
    together = max(1, min(size, node // stride))  # ranks of the axis in one node
    nodes = -(-size // together)
    inside, outside = hardware.node_bandwidth, hardware.network_bandwidth
    if nodes == 1:
        inside = hardware.collective_bandwidth or inside
    bandwidth = to_all = to_next = inside
    latency = 0.0
    if nodes > 1:
        bandwidth = min(inside, outside * together)
        to_next = min(inside, outside)
        leaving = (size - together) / (size - 1)  # share of the others that are elsewhere
        to_all = min(outside / leaving, inside / (1 - leaving) if leaving < 1 else inside)
        latency = hardware.network_latency * math.log2(nodes)
    latency += hardware.node_latency * math.log2(together)
    reached = (hardware.link_efficiency * rate for rate in (bandwidth, to_all, to_next))
    bandwidth, to_all, to_next = reached
    return Link(size, nodes, bandwidth, latency, to_all, to_next)


def sharded(link: Link, bandwidth: float | None) -> Link:
    """The link for what FSDP exchanges, with its copies; bandwidth: in a node, where it is
    known."""
    if bandwidth is None or not link.inside:
        return link
    return replace(link, bandwidth=bandwidth, latency=0.0)


def message_link(config: Config, hardware: Hardware) -> tuple[float, float]:
    """(bytes/s, seconds besides) of a message from one pipeline rank to the next."""
    sizes = axes(config)
    apart = math.prod(size for name, size in sizes.items() if name != "pp")
    inside = apart * config.pp <= hardware.devices_per_node
    bandwidth = hardware.node_bandwidth if inside else hardware.network_bandwidth
    latency = hardware.node_latency if inside else hardware.network_latency
    return bandwidth * hardware.link_efficiency, latency


# --- how long a stage's forward or backward takes where FSDP gathers and reduces its units
# meanwhile ---


def overlapped_seconds(
    units: Sequence[float], gathers: Sequence[float], reductions: Sequence[float] = ()
) -> float:
    """units, gathers, reductions: seconds of each unit, in the order in which they run; none = they
    are not. It ends when all is reduced."""
    if not any(gathers) and not any(reductions):
        return sum(units)
    end, ready = 0.0, 0.0
    link = gathers[0] if gathers else 0.0
    for at, seconds in enumerate(units):
        start = max(end, ready)
        if gathers and at + 1 < len(units):
            link = max(link, start) + gathers[at + 1]
            ready = link
        end = start + seconds
        if reductions:
            link = max(link, end) + reductions[at]
    return max(end, link)


# --- this machine, measured -----------------------------------------------------------------------


def measured_hardware(config: Config, ranks: int) -> Hardware:
    """The kept profile of this machine with so many ranks, or a new one. Raises ConfigError."""
    ranks = _at_once(ranks)
    base = _likely(replace(config, hardware=config.hardware if count() else shipped("cpu")))

    def choice(numbers: dict[str, Any]) -> dict[str, Any]:
        return to_plain(replace(base, title=f"{platform.node()} ({ranks} ranks)", **numbers))

    what = f"this machine with {ranks} processes"
    kept = _kept(config, "", ranks, what, "measure_hardware", choice)
    return replace(base, **{name: value for name, value in kept.items() if name in vars(base)})


def measured_times(config: Config, plan: TrainPlan, deferred: Collection[int]) -> list[Seconds]:
    """Seconds of each unit of a plan in its microbatches, on this machine; kept, too. Raises
    ConfigError.

    deferred: stages whose weight gradients wait.
    """
    costs, ranks = plan.memory().unit_costs, _at_once(config.world_size)
    assert costs is not None
    name = f"units/{costs.signature}-"
    profiles = _kept(config, name, ranks, "the model's units", "measure_units")
    seconds: list[Seconds] = []
    for stage, names in enumerate(plan.stages):
        profile = profiles["deferred" if stage in deferred else "together"]
        seconds += profile[len(seconds) : len(seconds) + len(names)]
    return seconds


def _at_once(ranks: int) -> int:
    """Processes of a run of so many ranks that would be here at once."""
    return max(1, min(ranks, count() or available_cores()))


def _processes(config: Config, ranks: int) -> str:
    """What was measured with, in a file's name."""
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
    """What is kept under a name of so many ranks of this machine; else it is measured, and what
    `finish` makes of the medians over ranks is kept. Raises ConfigError."""
    settings = config.hardware
    assert isinstance(settings, MeasuredHardware)
    folder = Path(settings.folder or _FOLDER).expanduser()
    path = folder / f"{name}{platform.node() or 'machine'}-{_processes(config, ranks)}.yaml"
    if not path.is_file() or settings.again:
        print(f"measuring {what} ...", file=sys.stderr, flush=True)
        measured = _measure(config, function, ranks)
        medians = {
            key: np.median([of_rank[key] for of_rank in measured], axis=0).tolist()
            for key in measured[0]
        }
        text = yaml.safe_dump(finish(medians), sort_keys=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.atomic_write_text(path, f"# Measured of {what}.\n{text}")
        print(f"kept in {path}", file=sys.stderr, flush=True)
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _measure(config: Config, function: str, ranks: int) -> list[dict[str, Any]]:
    """What a function of this module returns on each of so many ranks. Raises ConfigError where one
    fails."""
    with tempfile.TemporaryDirectory() as folder, PrestartedWorkers() as workers:
        job = Job(f"{__name__}:{function}", config, Path(folder), [])
        try:
            started = workers.adopt(ranks, job.function)
            return run_workers(job, StopRequest(), started)["ranks"]
        except JobFailed as failed:
            reason = f"measuring failed: {failed.error}"
            fix = "hardware=cpu, or another profile"
            raise ConfigError([Problem("hardware", "measure", reason, fix)]) from None


# --- a rank that measures its part of a machine ---------------------------------------------------


_ROUNDS, _SECONDS = 3, 4.0  # of measuring units, at the least
# sizes of matrices, large and small; batch, heads, tokens and width of attention
_CPU_SIZES = (1024, 96), (1, 8, 512, 64)
_ACCELERATOR_SIZES = (8192, 2048), (1, 16, 4096, 128)
_VECTOR = 1 << 24  # elements that no cache holds


def measure_hardware(config: Config, worker: Worker) -> dict[str, Any]:
    """ "ranks": of each, values of `config.schema.Hardware`. Collective."""
    return _on_each_rank(config, worker, hardware_numbers)


def measure_units(config: Config, worker: Worker) -> dict[str, Any]:
    """ "ranks": of each, times of each unit of its model, where weight gradients wait and where not.
    Collective.

    Means over rounds, each of all units: a machine's speed changes from one second to the next, by
    a quarter where it is shared. What is measured in one go may be that of a fast moment, beside
    another unit's of a slow one.
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
    """measure: of a device, rank and number of ranks, which begin together."""
    config = replace(config, pp=1, dp=worker.world_size, replicate=1, tp=1, cp=1, ep=1)
    config = replace(config, launch=replace(config.launch, ranks_per_device=1))
    torch.set_float32_matmul_precision(config.matmul_precision)
    if config.exact:  # as a run computes
        torch.set_num_threads(1)
    device = open_mesh(config, worker).device
    found: list[Any] = [None] * worker.world_size
    dist.barrier()
    with warnings.catch_warnings():  # of newer names of torch's collectives
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_gather_object(found, measure(device, worker.rank, worker.world_size))
    close_mesh()
    return {"ranks": found}


def hardware_numbers(device: torch.device, rank: int, ranks: int) -> dict[str, float]:
    """Values of `config.schema.Hardware`. Peaks are those of the data sheet where the device's is
    known, and shares of them what is reached; else peaks are what is reached."""

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


# --- what local ranks exchange with each other ----------------------------------------------------


_MESSAGE, _LARGE = 1 << 22, 1 << 26  # bytes, of a CPU and of devices with links of their own
_WIDTH, _LAYERS, _ROWS = 1024, 4, 32  # of a model whose products take less than its parameters' way
_REPEATS = 15
_TIMES = 8  # there and back in a row


def link_numbers(device: torch.device, rank: int, ranks: int) -> dict[str, float]:
    """Bytes/s and seconds of messages and collectives. Collective over the default group.

    A CPU's ranks have no other links than these, and send what FSDP exchanges in between. Of
    devices the network's numbers stay as they are known, and what FSDP exchanges is as other
    collectives, on a stream of its own.
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
    """Bytes/s that a rank sends while FSDP gathers parameters, and reduces gradients, with its
    copies and hooks."""
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

    (forward, both), (gathers, all_of_it) = (
        (_median(device, partial(model, x)), _median(device, partial(forward_and_backward, model)))
        for model in (plain, sharded)
    )
    gathered = max(1e-6, gathers - forward)
    reduced = max(1e-6, all_of_it - both - 2 * gathered)
    sent = 4 * _LAYERS * _WIDTH**2 * (ranks - 1) / ranks
    return {"gather_bandwidth": sent / gathered, "reduce_bandwidth": sent / reduced}


def _median(device: torch.device, function: Callable[[], object]) -> float:
    """Seconds of the wall, all ranks begin together: others' work and what a rank waits for are a
    part of an exchange."""
    times = []
    for _ in range(2 + _REPEATS):
        dist.barrier()
        synchronize(device)
        begin = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])
