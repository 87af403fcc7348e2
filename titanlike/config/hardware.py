"""The group `hardware`: the device, its links and its node that a run is planned for.

Peaks and bandwidths are the vendor's, of one device and dense matrices. What a program reaches of
them is a share of its own, the same for all GPUs: `tests/costs/test_published.py` says how near
to published runs it comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titanlike.config.errors import Problem
from titanlike.config.keys import Bytes, key, required
from titanlike.config.profile import TIMELINE


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
    bf16_flops: float = required("FLOP/s of dense bf16 matrix products, of the data sheet")
    fp8_flops: float = required("FLOP/s of dense float8 matrix products; that of bf16 if none")
    tf32_flops: float = required("FLOP/s of fp32 matrix products by matmul_precision=high")
    fp32_flops: float = required("FLOP/s of fp32 matrix products")
    memory: Bytes = required("memory of a device that programs see")
    memory_bandwidth: float = required("bytes/s that a device reads or writes")
    devices_per_node: int = required("devices that the fast links join")
    node_bandwidth: float = required("bytes/s that a device sends to others of its node")
    network_bandwidth: float = required("bytes/s that a device sends to other nodes")
    collective_bandwidth: float | None = key(
        None, "bytes/s that a device sends in a collective of its node; null = node_bandwidth"
    )
    gather_bandwidth: float | None = key(
        None, "bytes/s of parameters that FSDP gathers in a node, with its copies; null = as others"
    )
    reduce_bandwidth: float | None = key(
        None, "bytes/s of gradients that FSDP reduces in a node, with its copies; null = as others"
    )
    host_bandwidth: float = key(25e9, "bytes/s between a device and the host's memory")
    node_latency: float = key(5e-6, "seconds of a step of a collective, or a message, in a node")
    network_latency: float = key(15e-6, "seconds of a step of a collective between nodes")
    matmul_efficiency: float = key(0.74, "share of the peak that large matrix products reach")
    matmul_half: float = key(60.0, "rows, columns or sum at which a product reaches half of that")
    attention_efficiency: float = key(0.25, "share of the peak that fused attention reaches")
    memory_efficiency: float = key(0.6, "share of the bandwidth that operators reach")
    link_efficiency: float = key(0.8, "share of a link's bandwidth that large messages reach")
    kernel_seconds: float = key(3e-6, "seconds that an operator takes besides")
    host_seconds: float = key(6e-6, "seconds of the host to launch an operator")
    action_seconds: float = key(2e-4, "seconds of the host for an action of the schedule")
    runs_ahead: bool = key(True, "the host queues work on the device, and does not wait for it")
    allocator_loss: float = key(0.08, "share of the memory that allocator and libraries take")

    @property
    def usable(self) -> int:
        """Bytes that training may take on a device."""
        return int((1 - self.allocator_loss) * self.memory)


@dataclass(kw_only=True)
class CpuHardware(Hardware):
    """A core of a CPU, which computes by itself and exchanges messages by gloo."""

    node_latency: float = key(1e-4, "seconds of a step of a collective, or a message, in a node")
    network_latency: float = key(2e-4, "seconds of a step of a collective between nodes")
    matmul_half: float = key(20.0, "rows, columns or sum at which a product reaches half of that")
    attention_efficiency: float = key(0.3, "share of the peak that fused attention reaches")
    kernel_seconds: float = key(1e-5, "seconds that an operator takes besides")
    host_seconds: float = key(0.0, "seconds of the host to launch an operator")
    action_seconds: float = key(5e-4, "seconds of the host for an action of the schedule")
    runs_ahead: bool = key(False, "the host queues work on the device, and does not wait for it")


_SHARES = {"matmul_efficiency", "attention_efficiency", "memory_efficiency", "link_efficiency"}
_ZERO = {"node_latency", "network_latency", "matmul_half", "allocator_loss"}
_ZERO |= {"kernel_seconds", "host_seconds", "action_seconds"}


def hardware_problems(hardware: NoHardware) -> Iterator[Problem]:
    """Numbers that no device has."""
    if isinstance(hardware, RunHardware) and not (Path(hardware.path) / TIMELINE).is_file():
        reason = f"cannot be read: there is no {TIMELINE} in it, which timeline=true writes"
        yield Problem("hardware.path", hardware.path, reason, "hardware=measure")
    if not isinstance(hardware, Hardware):
        return
    for name, value in vars(hardware).items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        named = f"hardware.{name}"
        if name in _SHARES and not 0 < value <= 1:
            yield Problem(named, value, "is a share: above 0, at most 1", f"{named}=0.8")
        elif name == "allocator_loss" and not 0 <= value < 1:
            yield Problem(named, value, "is a share: at least 0, below 1", f"{named}=0.08")
        elif value < 0 or (value == 0 and name not in _ZERO):
            yield Problem(named, value, "must be above 0", f"{named}={_EXAMPLES.get(name, 1e9):g}")


_EXAMPLES = {"devices_per_node": 8, "memory": 80 << 30}
