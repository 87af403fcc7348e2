"""The device, links and node that a run is planned for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from titanlike.core.config.keys import Bytes, key, required

# Peaks and bandwidths are the vendor's, for one device and dense matrices. The achievable share
# of these is a separate constant, the same for all GPUs: `tests/planning/test_published.py`
# compares the result with published runs.


@dataclass
class NoHardware:
    """The device that a run finds: its memory is queried, its speed unknown."""

    name: str = key("none", "choice")


@dataclass(kw_only=True)
class Hardware(NoHardware):
    """A device with its links."""

    name: str = key("profile", "choice")
    title: str = required("name of the device")
    bf16_flops: float = required("FLOP/s of dense bf16 matmuls, from the data sheet", gt=0)
    fp8_flops: float = required("FLOP/s of dense float8 matmuls; without float8, of bf16", gt=0)
    mxfp8_flops: float | None = key(
        None, "FLOP/s of dense MXFP8 matmuls; null = none, emulated", gt=0
    )
    tf32_flops: float = required("FLOP/s of fp32 matmuls with matmul_precision=high", gt=0)
    fp32_flops: float = required("FLOP/s of fp32 matmuls", gt=0)
    memory: Bytes = required("device memory visible to programs")
    memory_bandwidth: float = required("bytes/s of device memory", gt=0)
    devices_per_node: int = required("devices of a node, joined by its fast links", gt=0, example=8)
    node_bandwidth: float = required("bytes/s that a device sends within its node", gt=0)
    network_bandwidth: float = required("bytes/s that a device sends to other nodes", gt=0)
    collective_bandwidth: float | None = key(
        None,
        "bytes/s that a device sends in a collective within its node; null = node_bandwidth",
        gt=0,
    )
    gather_bandwidth: float | None = key(
        None,
        "bytes/s of FSDP's all-gathers within a node, copies included; null = collective_bandwidth",
        gt=0,
    )
    reduce_bandwidth: float | None = key(
        None,
        "bytes/s of FSDP's reduce-scatters within a node, copies included; null = collective_bandwidth",
        gt=0,
    )
    host_bandwidth: float = key(25e9, "bytes/s between device and host memory", gt=0)
    node_latency: float = key(5e-6, "seconds of a P2P send or collective step in a node", ge=0)
    network_latency: float = key(15e-6, "seconds of a collective's step between nodes", ge=0)
    matmul_efficiency: float = key(0.74, "share of the peak that large matmuls reach", gt=0, le=1)
    matmul_half: float = key(60.0, "rows, columns or sum at which a matmul has half of it", ge=0)
    expert_efficiency: float | None = key(
        None, "share that matmuls of experts reach; null = matmul_efficiency", gt=0, le=1
    )
    attention_efficiency: float = required(
        "share of the peak that attention reaches (GPU: 8192 keys, heads of 128)",
        gt=0,
        le=1,
        example=0.4,
    )
    memory_efficiency: float = key(0.8, "share of the bandwidth that operators reach", gt=0, le=1)
    link_efficiency: float = key(0.8, "share of bandwidth that large messages reach", gt=0, le=1)
    kernel_seconds: float = key(3e-6, "fixed time of a kernel, in seconds", ge=0)
    host_seconds: float = key(6e-6, "host time to launch an operator, in seconds", ge=0)
    action_seconds: float = key(2e-4, "host time of a schedule action, in seconds", ge=0)
    runs_ahead: bool = key(True, "the host queues work on the device without waiting")
    allocator_loss: float = key(0.08, "memory share of allocator and libraries", ge=0, lt=1)

    @property
    def usable(self) -> int:
        """Bytes of a device's memory that training may use."""
        return int((1 - self.allocator_loss) * self.memory)

    def of_each(self, ranks: int) -> Hardware:
        """Return the profile of one of `ranks` ranks that share a device: its memory is divided."""
        title = f"1/{ranks} of {self.title}"
        return replace(self, memory=self.memory // ranks, title=title) if ranks > 1 else self


@dataclass(kw_only=True)
class CpuHardware(Hardware):
    """A CPU core, which cannot overlap compute with communication, and uses gloo."""

    def of_each(self, ranks: int) -> Hardware:
        return self

    node_latency: float = key(1e-4, "seconds of a P2P send or collective step in a node", ge=0)
    network_latency: float = key(2e-4, "seconds of a collective's step between nodes", ge=0)
    matmul_half: float = key(20.0, "rows, columns or sum at which a matmul has half of it", ge=0)
    attention_efficiency: float = key(0.3, "share of the peak that attention reaches", gt=0, le=1)
    memory_efficiency: float = key(0.6, "share of the bandwidth that operators reach", gt=0, le=1)
    kernel_seconds: float = key(1e-5, "fixed time of a kernel, in seconds", ge=0)
    host_seconds: float = key(0.0, "host time to launch an operator, in seconds", ge=0)
    action_seconds: float = key(5e-4, "host time of a schedule action, in seconds", ge=0)
    runs_ahead: bool = key(False, "the host queues work on the device without waiting")
