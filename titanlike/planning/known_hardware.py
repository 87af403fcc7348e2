"""The hardware that a plan assumes: named by the config, or the most similar to this machine; and
the links between its ranks. `python tools/bench.py` measures what a profile needs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import yaml

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.groups.hardware import Hardware
from titanlike.core.config.parse import parse
from titanlike.core.config.program import conf_dir
from titanlike.core.config.schema import Config
from titanlike.core.device import accelerator
from titanlike.core.device.choose import first_device
from titanlike.core.device.nvml import visible_gpus
from titanlike.core.torch_private.accelerator import started

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
    reason = "a plan is made for a device"
    fix = "hardware=h100_sxm, or hardware=cpu"
    raise ConfigError([Problem("hardware", config.hardware.name, reason, fix)])


def likely_hardware(config: Config) -> Hardware:
    """The config's hardware, or the shipped choice most similar to this machine's devices; divided
    among ranks that share a device."""
    if isinstance(config.hardware, Hardware):
        found = config.hardware
    elif not accelerator.is_accelerator(device := first_device(config.device)):
        found = shipped("cpu")
    else:
        name = accelerator.name(device) if started() else next((g.name for g in visible_gpus()), "")
        found = shipped(next((c for words, c in _CHOICES.items() if words in name), "h100_sxm"))
    return found.of_each(min(config.launch.ranks_per_device, config.world_size))


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
    """Sizes of the mesh's axes, outermost first, as `core/distributed/mesh.py` lays them out."""
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
        """Seconds of `count` all-gathers or reduce-scatters of unsharded tensors of `nbytes`."""
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
