"""The group `hardware`: the device, its links and its node that a run is planned for.

Peaks and bandwidths are the vendor's, of one device and dense matrices. What a program reaches of
them is a share of its own, the same for all GPUs: `tests/costs/test_published.py` says how near
to published runs it comes.
"""

from __future__ import annotations

from dataclasses import dataclass

from titanlike.config.keys import Bytes, key, required


@dataclass
class NoHardware:
    """The device that a run finds: its memory is asked for, its speed is not known."""

    name: str = key("none", "choice")


@dataclass
class MeasuredHardware(NoHardware):
    """This machine, measured in under a minute; the profile is kept."""

    name: str = key("measure", "choice")
    folder: str | None = key(None, "where profiles are kept; null = ~/.cache/titanlike/hardware")
    again: bool = key(False, "measure although there is a profile of this machine")


@dataclass(kw_only=True)
class RunHardware(NoHardware):
    """The devices of a run that has recorded a timeline: its stages' times, for any layout of it."""

    name: str = key("run", "choice")
    path: str = required("directory of that run; hardware=RUN is short for both")


@dataclass(kw_only=True)
class Hardware(NoHardware):
    """A device with its links."""

    name: str = key("profile", "choice")
    title: str = required("what the device is called")
    bf16_flops: float = required("FLOP/s of dense bf16 matrix products, of the data sheet", gt=0)
    fp8_flops: float = required(
        "FLOP/s of dense float8 matrix products; that of bf16 if none", gt=0
    )
    tf32_flops: float = required("FLOP/s of fp32 matrix products by matmul_precision=high", gt=0)
    fp32_flops: float = required("FLOP/s of fp32 matrix products", gt=0)
    memory: Bytes = required("memory of a device that programs see")
    memory_bandwidth: float = required("bytes/s that a device reads or writes", gt=0)
    devices_per_node: int = required("devices that the fast links join", gt=0, example=8)
    node_bandwidth: float = required("bytes/s that a device sends to others of its node", gt=0)
    network_bandwidth: float = required("bytes/s that a device sends to other nodes", gt=0)
    collective_bandwidth: float | None = key(
        None, "bytes/s that a device sends in a collective of its node; null = node_bandwidth", gt=0
    )
    gather_bandwidth: float | None = key(
        None,
        "bytes/s of parameters that FSDP gathers in a node, with its copies; null = as others",
        gt=0,
    )
    reduce_bandwidth: float | None = key(
        None,
        "bytes/s of gradients that FSDP reduces in a node, with its copies; null = as others",
        gt=0,
    )
    host_bandwidth: float = key(25e9, "bytes/s between a device and the host's memory", gt=0)
    node_latency: float = key(
        5e-6, "seconds of a step of a collective, or a message, in a node", ge=0
    )
    network_latency: float = key(15e-6, "seconds of a step of a collective between nodes", ge=0)
    matmul_efficiency: float = key(
        0.74, "share of the peak that large matrix products reach", gt=0, le=1
    )
    matmul_half: float = key(
        60.0, "rows, columns or sum at which a product reaches half of that", ge=0
    )
    attention_efficiency: float = key(
        0.25, "share of the peak that fused attention reaches", gt=0, le=1
    )
    memory_efficiency: float = key(0.6, "share of the bandwidth that operators reach", gt=0, le=1)
    link_efficiency: float = key(
        0.8, "share of a link's bandwidth that large messages reach", gt=0, le=1
    )
    kernel_seconds: float = key(3e-6, "seconds that an operator takes besides", ge=0)
    host_seconds: float = key(6e-6, "seconds of the host to launch an operator", ge=0)
    action_seconds: float = key(2e-4, "seconds of the host for an action of the schedule", ge=0)
    runs_ahead: bool = key(True, "the host queues work on the device, and does not wait for it")
    allocator_loss: float = key(
        0.08, "share of the memory that allocator and libraries take", ge=0, lt=1
    )

    @property
    def usable(self) -> int:
        """Bytes that training may take on a device."""
        return int((1 - self.allocator_loss) * self.memory)


@dataclass(kw_only=True)
class CpuHardware(Hardware):
    """A core of a CPU, which computes by itself and exchanges messages by gloo."""

    node_latency: float = key(
        1e-4, "seconds of a step of a collective, or a message, in a node", ge=0
    )
    network_latency: float = key(2e-4, "seconds of a step of a collective between nodes", ge=0)
    matmul_half: float = key(
        20.0, "rows, columns or sum at which a product reaches half of that", ge=0
    )
    attention_efficiency: float = key(
        0.3, "share of the peak that fused attention reaches", gt=0, le=1
    )
    kernel_seconds: float = key(1e-5, "seconds that an operator takes besides", ge=0)
    host_seconds: float = key(0.0, "seconds of the host to launch an operator", ge=0)
    action_seconds: float = key(5e-4, "seconds of the host for an action of the schedule", ge=0)
    runs_ahead: bool = key(False, "the host queues work on the device, and does not wait for it")
