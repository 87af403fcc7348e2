"""Which links the ranks of an axis are joined by, and how long they take to exchange something.

The mesh is laid over the devices in the order of their ranks, so the last of its axes has neighbours.
To add an axis, name it in `axes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    bandwidth: float  # bytes/s that each rank sends
    latency: float  # seconds of a collective of nothing

    @property
    def inside(self) -> bool:
        return self.nodes == 1

    def gather(self, nbytes: float, count: float = 1) -> float:
        """Seconds of `count` all-gathers, or reduce-scatters, of so many bytes together, a rank's part
        and all others'."""
        if self.size == 1:
            return 0.0
        return nbytes * (self.size - 1) / self.size / self.bandwidth + count * self.latency

    def all_reduce(self, nbytes: float, count: float = 1) -> float:
        return 2 * self.gather(nbytes, count)


def link(config: Config, axis: str, hardware: Hardware) -> Link:
    """Of the ranks along an axis.

    A ring over several nodes leaves each by as many links as it has ranks there.
    """
    sizes = axes(config)
    names = list(sizes)
    stride = math.prod(sizes[name] for name in names[names.index(axis) + 1 :])
    size, node = sizes[axis], hardware.devices_per_node
    together = max(1, min(size, node // stride))  # ranks of the axis in one node
    nodes = -(-size // together)
    bandwidth, latency = hardware.node_bandwidth, 0.0
    if nodes > 1:
        bandwidth = min(bandwidth, hardware.network_bandwidth * together)
        latency = hardware.network_latency * math.log2(nodes)
    latency += hardware.node_latency * math.log2(together)
    return Link(size, nodes, bandwidth * hardware.link_efficiency, latency)


def message(config: Config, hardware: Hardware) -> tuple[float, float]:
    """(bytes/s, seconds besides) of a message from one pipeline rank to the next."""
    sizes = axes(config)
    apart = math.prod(size for name, size in sizes.items() if name != "pp")
    inside = apart * config.pp <= hardware.devices_per_node
    bandwidth = hardware.node_bandwidth if inside else hardware.network_bandwidth
    latency = hardware.node_latency if inside else hardware.network_latency
    return bandwidth * hardware.link_efficiency, latency
