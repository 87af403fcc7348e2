"""Which links the ranks of an axis are joined by, and how long they take to exchange something.

The mesh is laid over the devices in the order of their ranks, so the last of its axes has neighbours.
To add an axis, name it in `axes`, or in `_place` if it is a part of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from titanlike.config.hardware import Hardware
from titanlike.config.schema import Config


def axes(config: Config) -> dict[str, int]:
    """Sizes of the mesh's axes, the outermost first, as `parallel/mesh.py` lays them."""
    sizes = {"pp": config.pp, "replicate": config.replicate, "shard": config.shards}
    return {**sizes, "tp": config.tp}


@dataclass(frozen=True)
class Link:
    """Between the ranks of one axis."""

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
        """Seconds of `count` all-gathers, or reduce-scatters, of so many bytes together, a rank's part
        and all others'."""
        if self.size == 1:
            return 0.0
        return self.sent(nbytes * (self.size - 1) / self.size, count, self.bandwidth)

    def sent(self, nbytes: float, count: float, bandwidth: float) -> float:
        """Seconds of `count` exchanges in which a rank sends so many bytes together."""
        return nbytes / bandwidth + count * self.latency

    def all_reduce(self, nbytes: float, count: float = 1) -> float:
        return 2 * self.gather(nbytes, count)


def _place(config: Config, axis: str) -> tuple[int, int]:
    """(ranks along an axis, how far apart they are). Those of cp and ep are neighbours in shard; what
    has the same experts is ep apart."""
    inside = {"cp": config.cp, "ep": config.ep}
    if axis in inside:
        return inside[axis], config.tp
    if axis == "expert_shard":
        return config.shards // config.ep, config.ep * config.tp
    sizes = axes(config)
    names = list(sizes)
    return sizes[axis], math.prod(sizes[name] for name in names[names.index(axis) + 1 :])


def link(config: Config, axis: str, hardware: Hardware) -> Link:
    """Of the ranks along an axis.

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
    """The link for what FSDP exchanges, with its copies; bandwidth: in a node, where it is known."""
    if bandwidth is None or not link.inside:
        return link
    return replace(link, bandwidth=bandwidth, latency=0.0)


def message(config: Config, hardware: Hardware) -> tuple[float, float]:
    """(bytes/s, seconds besides) of a message from one pipeline rank to the next."""
    sizes = axes(config)
    apart = math.prod(size for name, size in sizes.items() if name != "pp")
    inside = apart * config.pp <= hardware.devices_per_node
    bandwidth = hardware.node_bandwidth if inside else hardware.network_bandwidth
    latency = hardware.node_latency if inside else hardware.network_latency
    return bandwidth * hardware.link_efficiency, latency


# --- how long a stage's forward or backward takes where FSDP gathers and reduces its units meanwhile ---


def forward_seconds(units: Sequence[float], gathers: Sequence[float]) -> float:
    """units, gathers: seconds of each unit, in the order in which they run; no gathers = none."""
    if not any(gathers):
        return sum(units)
    end, link, ready = 0.0, gathers[0], 0.0
    for at, seconds in enumerate(units):
        start = max(end, ready)
        if at + 1 < len(units):
            link = max(link, start) + gathers[at + 1]
            ready = link
        end = start + seconds
    return max(end, link)


def backward_seconds(
    units: Sequence[float], gathers: Sequence[float], reductions: Sequence[float]
) -> float:
    """As `forward_seconds`, in the order of the backward. It ends when all is reduced."""
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
