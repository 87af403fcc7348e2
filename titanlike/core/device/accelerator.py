"""Functions of torch's accelerator, which do nothing on the CPU.

The accelerator is the one kind of device that this torch is built for (`torch.accelerator`), if
torch.distributed has a backend for it: cuda with nccl (also on ROCm), xpu with xccl, or what a
plugin registers. Also: contexts that change torch's kernel settings during a job, and peak FLOP/s
by a device's name.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion

from titanlike.core.config.schema import Config
from titanlike.core.torch_private.accelerator import started

KINDS = ("cpu", "cuda", "xpu", "mtia")  # a forward may test them: x.is_cuda, autocast("cuda")
# environment variables that restrict the devices visible to a process
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


def accelerator() -> str | None:
    """The kind of accelerator (cuda, xpu, ...) that this torch is built for, with or without a
    device."""
    device = torch.accelerator.current_accelerator()
    # None for MPS: gloo cannot access its tensors
    return device.type if device is not None and own_backend(device) is not None else None


def own_backend(device: torch.device) -> str | None:
    """torch.distributed's backend for the tensors of a device; None = none but gloo."""
    try:
        backend = dist.get_default_backend_for_device(device.type)
    except ValueError:
        return None
    return None if backend == "gloo" else backend


def backends(device: torch.device) -> str:
    """Backends for `init_process_group`; gloo is for CPU tensors, such as pickled objects."""
    backend = own_backend(device)
    return f"cpu:gloo,{device.type}:{backend}" if backend else "gloo"


def nccl_version() -> str:
    """NCCL's version, e.g. "2.27.5"; RCCL's on ROCm; "none" if torch is built without it."""
    if not dist.is_available() or not dist.is_nccl_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def count() -> int:
    """The number of devices visible to this process. Does not initialize CUDA."""
    return 0 if accelerator() is None else torch.accelerator.device_count()


def is_accelerator(device: torch.device) -> bool:
    """Whether a device is an accelerator, with its own queue, allocator and random state."""
    return device.type not in ("cpu", "meta")


def name(device: torch.device) -> str:
    """The device's name, e.g. "NVIDIA H100 80GB HBM3" or "cpu". Initializes the accelerator."""
    if not is_accelerator(device):
        return device.type
    return str(torch.get_device_module(device).get_device_name(device))


def kind_of(device: torch.device) -> str:
    """Describe the hardware and libraries on which the bits of results depend. Initializes the
    accelerator."""
    if not is_accelerator(device):
        return f"cpu with {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
    properties = torch.get_device_module(device).get_device_properties(device)
    cores = getattr(properties, "multi_processor_count", 0)
    parts = [f"{name(device)} with {cores} processors", f"torch {torch.__version__}"]
    if device.type == "cuda":
        from titanlike.core.device.nvml import driver_version

        parts += [f"driver {driver_version() or 'unknown'}", f"NCCL {nccl_version()}"]
        parts.append(f"cuDNN {torch.backends.cudnn.version()}")
    return ", ".join(parts)


def uuid(device: torch.device) -> str | None:
    """The UUID of the physical device, None if the driver has none. Initializes the accelerator."""
    if not is_accelerator(device):
        return None
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(properties.uuid) if getattr(properties, "uuid", None) is not None else None


def set_device(device: torch.device) -> None:
    """Make `device` current in this thread; a new thread starts with device 0."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def limit_memory(device: torch.device, share: float) -> None:
    """Limit this process' allocator to a share of the device's memory. Only on CUDA."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device)


def synchronize(device: torch.device) -> None:
    """Wait until all queued work on the device is done."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def empty_cache() -> None:
    """Return the allocator's cached memory to the device."""
    if started() is not None:
        torch.accelerator.empty_cache()


def pin(address: int, size: int) -> bool:
    """Page-lock existing host memory; False if that fails.

    torch's own pinned memory is rounded up to a power of two.
    """
    if not torch.cuda.is_available():
        return False
    if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:
        return True
    # clear CUDA's last error: torch would raise it after the next kernel
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def unpin(address: int) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(address)


@contextlib.contextmanager
def kept_rng(device: torch.device) -> Iterator[None]:
    """A context after which the random states of the CPU and the device are restored."""
    kind = {"device_type": device.type} if is_accelerator(device) else {}
    with torch.random.fork_rng([device] if kind else [], **kind):
        yield


def rng_states() -> dict[str, Tensor]:
    """Random states of this process by kind: "cpu", and the accelerator's if it is initialized."""
    states = {"cpu": torch.get_rng_state()}
    if (device := started()) is not None:
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_rng_state(kind: str, state: Tensor) -> None:
    """Set a random state; kind: as in `rng_states`."""
    if kind == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(kind).set_rng_state(state)


def multiplies_float8(device: torch.device, grouped: bool = False, in_blocks: bool = False) -> bool:
    """Whether the device has float8 matmuls: NVIDIA Ada and Hopper, AMD MI300, and later; grouped
    ones on Hopper, MI300, and where a later torch has them; with scales of blocks (MXFP8) on
    NVIDIA's B200, B300, GB200.

    Before CUDA is initialized this asks NVML; without NVML it returns True, and the ranks check
    later.
    """
    if device.type != "cuda" or (in_blocks and torch.version.hip):
        return False
    if started() is not None:
        capabilities = [torch.cuda.get_device_capability(device)]
    else:
        from titanlike.core.device.nvml import visible_gpus

        capabilities = [gpu.capability for gpu in visible_gpus()]
    if torch.version.hip:
        return all(capability >= (9, 4) for capability in capabilities)
    if grouped:
        return all(_multiplies_groups(each, device.index or 0) for each in capabilities)
    least = (10, 0) if in_blocks else (8, 9)
    return all(capability >= least for capability in capabilities)


_UNKNOWN = "2.14"  # from this torch on it is not known which GPUs have a grouped float8 kernel
_TRIAL = (
    "from titanlike.core.torch_private.operators import try_scaled_grouped_mm as f; f({device!r})"
)
_TRIAL_SECONDS = 120


@functools.cache
def _multiplies_groups(capability: tuple[int, int], index: int) -> bool:
    """Whether torch has a grouped float8 matmul with a scale per row for an NVIDIA GPU.

    Hopper's kernel traps on 10.x, and the CUDA context is lost (pytorch issue 187095). What a later
    torch does there is tried in another process.
    """
    if capability[0] <= 9:
        return capability[0] == 9
    if TorchVersion(torch.__version__) < _UNKNOWN:
        return False
    command = [sys.executable, "-c", _TRIAL.format(device=f"cuda:{index}")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=_TRIAL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def visible_variable() -> str:
    """The environment variable that restricts this process' accelerators; "" = unknown."""
    kind = accelerator()
    if kind == "cuda" and torch.version.hip and "HIP_VISIBLE_DEVICES" in os.environ:
        return "HIP_VISIBLE_DEVICES"
    return _VISIBLE.get(kind or "", "")


def visible_names() -> list[str]:
    """The visible accelerators, as entries of `visible_variable()`."""
    if not (variable := visible_variable()) or not (number := count()):
        return []
    named = [name for name in os.environ.get(variable, "").split(",") if name]
    return named or [str(index) for index in range(number)]


@contextlib.contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """A context with torch.set_float32_matmul_precision(name)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """A context with torch.use_deterministic_algorithms: operations without a deterministic kernel
    raise.

    Settings are restored on exit (a sweep's jobs share a process), except the workspace that cuBLAS
    was initialized with.
    """
    if not on:
        yield
        return
    cudnn, enabled = torch.backends.cudnn, torch.are_deterministic_algorithms_enabled()
    filling: Any = torch.utils.deterministic  # a module with a property
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.benchmark, cudnn.deterministic, filling.fill_uninitialized_memory
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    # cuBLAS needs a fixed workspace size; torch raises if the user has set a wrong one
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn.benchmark = False  # it would choose kernels by timings
    cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)
    # filling each new tensor with NaN costs a write of all allocated memory
    filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        cudnn.benchmark, cudnn.deterministic, filling.fill_uninitialized_memory = before
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@contextlib.contextmanager
def one_thread(on: bool) -> Iterator[None]:
    """A context with one CPU thread: kernels sum in a different order with other numbers of
    threads."""
    before = torch.get_num_threads()
    if on:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def kernels(config: Config, device: torch.device) -> Iterator[None]:
    """A context with the kernel settings of a run's config."""
    with (
        deterministic(config.deterministic or (config.exact and is_accelerator(device))),
        one_thread(config.exact),
        matmul_precision(config.matmul_precision),
    ):
        yield


# Peak of dense bf16 matmuls with fp32 accumulation, FLOP/s, by words of the device's name. Vendors'
# data sheets often print twice as much, for structured sparsity.
_BF16_PEAK = {
    # NVIDIA data sheets: HGX B200, HGX B300 (36 PFLOP/s sparse for 8 GPUs), GB200 NVL72, GB300
    # NVL72 (360 PFLOP/s sparse for 72)
    "B200|B300": 2.25e15,
    "GB200|GB300": 2.5e15,
    # H100 (sparse: SXM 1,979, PCIe 1,513, NVL 1,671), H200 (1,979; NVL 1,671), GH200 (1,979); H800
    # has the H100's cores; H20 has 148 dense
    "H100|H200|GH200|H800": 989e12,
    "H100 PCIe|H800 PCIe": 756e12,
    "H100 NVL|H200 NVL": 835e12,
    "H20": 148e12,
    # RTX A6000 (309.7 sparse); A800 has the A100's cores
    "A100|A800": 312e12,
    "A10": 125e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "RTX A6000": 154.8e12,
    # L4 (242 sparse), L40 (362 sparse), L40S (733 sparse)
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    # architecture whitepapers: Ada (728.5 sparse for RTX 6000, 330.3 for RTX 4090), RTX Blackwell
    # (419), GA102 (142)
    "RTX 6000 Ada": 364.2e12,
    "RTX 4090": 165.2e12,
    "RTX 5090": 209.5e12,
    "RTX 3090": 71e12,
    # AMD Instinct product pages: MI250X is two devices of 191.5
    "MI250X": 191.5e12,
    "MI300X|MI325X": 1307.4e12,
    "MI355X": 2.5e15,
}
# a slice of a GPU, or a different GPU whose name contains the same words
_OTHER = re.compile(r"\b(MIG|Laptop|Max-Q|Mobile|RTX 4090 D|RTX 5090 D|RTX 3090 Ti)\b")


def bf16_peak(name: str) -> float | None:
    """The bf16 FLOP/s of a device by its name, from the entry with the longest match; None =
    unknown."""
    if _OTHER.search(name):
        return None
    matches = ((re.search(rf"\b({words})\b", name), peak) for words, peak in _BF16_PEAK.items())
    peaks = {len(match[0]): peak for match, peak in matches if match}
    return peaks[max(peaks)] if peaks else None


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of matmuls on one device, the base of MFU; None = unknown.

    For float8 it is bf16's, as part of the model computes in bf16: runs in both are then
    comparable, and MFU may exceed 1.
    """
    if not is_accelerator(device) or precision == "fp32":
        return None
    return bf16_peak(name(device))
