"""What torch's accelerator can do, in functions that do nothing on the CPU.

The accelerator is the one kind of device that this torch is built for (`torch.accelerator`), as far
as torch.distributed has a backend for its tensors: cuda with nccl (ROCm's is named so, too), xpu
with xccl, or what a plugin registers. Below: settings of torch's kernels, which a job changes and
gets back, and the most FLOP/s of a device by its name.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.config.schema import Config
from titanlike.torch_private.accelerator import started

KINDS = ("cpu", "cuda", "xpu", "mtia")  # by which a forward may ask: x.is_cuda, autocast("cuda")
# the variable by which a driver shows a process some of the devices
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


def accelerator() -> str | None:
    """The kind of accelerator that this torch is built for, whether or not there is one."""
    device = torch.accelerator.current_accelerator()
    # None of MPS, whose tensors gloo does not reach
    return device.type if device is not None and own_backend(device) is not None else None


def own_backend(device: torch.device) -> str | None:
    """torch.distributed's backend for the tensors of a device; None = it has none but gloo."""
    try:
        backend = dist.get_default_backend_for_device(device.type)
    except ValueError:
        return None
    return None if backend == "gloo" else backend


def backends(device: torch.device) -> str:
    """Backends for `init_process_group`: objects, which are not on the device, are sent by gloo."""
    own = own_backend(device)
    return f"cpu:gloo,{device.type}:{own}" if own else "gloo"


def nccl_version() -> str:
    """As "2.27.5"; "none" where torch is built without it. ROCm's is RCCL."""
    if not dist.is_available() or not dist.is_nccl_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def count() -> int:
    """Devices that this process sees. Does not initialize CUDA."""
    return 0 if accelerator() is None else torch.accelerator.device_count()


def is_accelerator(device: torch.device) -> bool:
    """Whether a device works on its own: with a queue, an allocator and a random state."""
    return device.type not in ("cpu", "meta")


def name(device: torch.device) -> str:
    """ "NVIDIA H100 80GB HBM3"; "cpu" for any CPU. Initializes the accelerator."""
    if not is_accelerator(device):
        return device.type
    return str(torch.get_device_module(device).get_device_name(device))


def kind_of(device: torch.device) -> str:
    """The hardware and the libraries on which the bits of results depend. Initializes the
    accelerator."""
    if not is_accelerator(device):
        return f"cpu with {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
    properties = torch.get_device_module(device).get_device_properties(device)
    cores = getattr(properties, "multi_processor_count", 0)
    parts = [f"{name(device)} with {cores} processors", f"torch {torch.__version__}"]
    if device.type == "cuda":
        from titanlike.device.nvml import driver_version

        parts += [f"driver {driver_version() or 'unknown'}", f"NCCL {nccl_version()}"]
        parts.append(f"cuDNN {torch.backends.cudnn.version()}")
    return ", ".join(parts)


def uuid(device: torch.device) -> str | None:
    """The UUID of the physical device, None where the driver says none. Initializes the
    accelerator."""
    if not is_accelerator(device):
        return None
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(properties.uuid) if getattr(properties, "uuid", None) is not None else None


def set_device(device: torch.device) -> None:
    """Make it the current one of this thread: a new thread begins with device 0."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def limit_memory(device: torch.device, share: float) -> None:
    """Let this process' allocator take so much of the device's memory at the most."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device)


def synchronize(device: torch.device) -> None:
    """Wait until all that was queued on the device is done."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def empty_cache() -> None:
    """Give memory that the allocator holds and no tensor uses back to the device."""
    if started() is not None:
        torch.accelerator.empty_cache()


def pin(address: int, size: int) -> bool:
    """Pin memory of the host that is there already; False where it cannot be.

    torch's own pinned memory is rounded up to a power of two.
    """
    if not torch.cuda.is_available():
        return False
    if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:
        return True
    # CUDA keeps its last error, and torch raises it after the next kernel, which is not to blame
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def unpin(address: int) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(address)


@contextlib.contextmanager
def kept_rng(device: torch.device) -> Iterator[None]:
    """Afterwards random numbers go on, on the CPU and on the device, as if nothing had been
    drawn."""
    kind = {"device_type": device.type} if is_accelerator(device) else {}
    with torch.random.fork_rng([device] if kind else [], **kind):
        yield


def rng_states() -> dict[str, Tensor]:
    """Random states of this process by kind: "cpu", and that of a started accelerator."""
    states = {"cpu": torch.get_rng_state()}
    if (device := started()) is not None:
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_rng_state(kind: str, state: Tensor) -> None:
    """kind: as in `rng_states`."""
    if kind == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(kind).set_rng_state(state)


def multiplies_float8(device: torch.device) -> bool:
    """Whether it multiplies float8 matrices: NVIDIA's Ada and Hopper, AMD's MI300, and later.

    Before CUDA is initialized NVML answers; without it the answer is True, and a rank that has
    started finds out.
    """
    if device.type != "cuda":
        return False
    if started() is None:
        from titanlike.device.nvml import visible_gpus

        return all(gpu.capability >= (8, 9) for gpu in visible_gpus())
    return torch.cuda.get_device_capability(device) >= ((9, 4) if torch.version.hip else (8, 9))


def visible_variable() -> str:
    """The environment variable by which a process sees some of the accelerators; "" = not known."""
    kind = accelerator()
    if kind == "cuda" and torch.version.hip and "HIP_VISIBLE_DEVICES" in os.environ:
        return "HIP_VISIBLE_DEVICES"
    return _VISIBLE.get(kind or "", "")


def visible_names() -> list[str]:
    """The accelerators that this process sees, by the names for that variable."""
    if not (variable := visible_variable()) or not (number := count()):
        return []
    named = [name for name in os.environ.get(variable, "").split(",") if name]
    return named or [str(index) for index in range(number)]


@contextlib.contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """A context in which products of fp32 matrices are computed as
    torch.set_float32_matmul_precision says."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """A context in which torch uses deterministic kernels alone, and raises where an operation has
    none.

    Afterwards the settings are restored (a sweep's jobs share a process), except that cuBLAS keeps
    the workspace that it was initialized with.
    """
    if not on:
        yield
        return
    cudnn, enabled = torch.backends.cudnn, torch.are_deterministic_algorithms_enabled()
    filling: Any = torch.utils.deterministic  # a module with a property
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.benchmark, cudnn.deterministic, filling.fill_uninitialized_memory
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    # cuBLAS needs a workspace of a fixed size; torch raises for a wrong one of the user's
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn.benchmark = False  # it would choose kernels by timings, which vary
    cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)
    # NaN in each new tensor would show reads of uninitialized memory, at the cost of writing to all
    # memory that is allocated
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
    """A context in which a rank computes on one core of the CPU: kernels add in another order for
    another number of threads."""
    before = torch.get_num_threads()
    if on:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def kernels(config: Config, device: torch.device) -> Iterator[None]:
    """A context in which a rank computes with the kernels that a run's config asks for."""
    with (
        deterministic(config.deterministic or (config.exact and is_accelerator(device))),
        one_thread(config.exact),
        matmul_precision(config.matmul_precision),
    ):
        yield


# Dense bf16 matrix products with fp32 sums, FLOP/s, by words of the device's name. Vendors' data
# sheets often print twice as much, for matrices of which half is zero.
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
# of a slice of a GPU, or of another one that has the same words in its name
_OTHER = re.compile(r"\b(MIG|Laptop|Max-Q|Mobile|RTX 4090 D|RTX 5090 D|RTX 3090 Ti)\b")


def bf16_peak(name: str) -> float | None:
    """The peak of a device by its name, of the entry with the longest words in it; None = not
    known."""
    if _OTHER.search(name):
        return None
    matches = ((re.search(rf"\b({words})\b", name), peak) for words, peak in _BF16_PEAK.items())
    peaks = {len(match[0]): peak for match, peak in matches if match}
    return peaks[max(peaks)] if peaks else None


def peak_flops(device: torch.device, precision: str) -> float | None:
    """FLOP/s of one device in matrix products, None where it is not known.

    Of float8 that of bf16, in which part of the model computes: so runs in both can be compared,
    and float8 may come to more than 1.
    """
    if not is_accelerator(device) or precision == "fp32":
        return None
    return bf16_peak(name(device))
