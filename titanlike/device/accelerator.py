"""What torch's accelerator can do, in functions that do nothing on the CPU.

The accelerator is the one kind of device that this torch is built for (`torch.accelerator`), as far
as torch.distributed has a backend for its tensors: cuda with nccl (ROCm's is named so, too), xpu with
xccl, or what a plugin registers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.device import nvml

KINDS = ("cpu", "cuda", "xpu", "mtia")  # by which a forward may ask: x.is_cuda, autocast("cuda")
# the variable by which a driver shows a process some of the devices
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


def accelerator() -> str | None:
    """The kind of accelerator that this torch is built for, whether or not there is one."""
    found = torch.accelerator.current_accelerator()
    if found is None or own_backend(found) is None:
        return None  # MPS: gloo does not reach its tensors
    return found.type


def own_backend(device: torch.device) -> str | None:
    """torch.distributed's backend for the tensors of a device; None = it has none but gloo."""
    try:
        backend = dist.get_default_backend_for_device(device.type)
    except ValueError:
        return None
    return None if backend == "gloo" else backend


def backends(device: torch.device) -> str:
    """For `init_process_group`: objects, which are not on the device, are sent by gloo."""
    own = own_backend(device)
    return f"cpu:gloo,{device.type}:{own}" if own else "gloo"


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
    return str(_module(device).get_device_name(device))


def uuid(device: torch.device) -> str | None:
    """Of the physical device, None where the driver says none. Initializes the accelerator."""
    if not is_accelerator(device):
        return None
    found = getattr(_module(device).get_device_properties(device), "uuid", None)
    return None if found is None else str(found)


def started() -> torch.device | None:
    """The device that this process computes on, if it has initialized an accelerator."""
    found = torch.accelerator.current_accelerator()
    if found is None or not _module(found).is_initialized():
        return None
    return torch.device(found.type, torch.accelerator.current_device_index())


def set_device(device: torch.device) -> None:
    """Make it the current one of this thread: a new thread begins with device 0."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def synchronize(device: torch.device) -> None:
    """Wait until all that was queued on the device is done."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def empty_cache() -> None:
    """Give memory that the allocator holds and no tensor uses back to the device."""
    if started() is not None:
        torch.accelerator.empty_cache()


def can_pin() -> bool:
    """Whether memory of the host can be pinned, for copies that do not wait."""
    return count() > 0


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
    """Of memory that `pin` has pinned."""
    torch.cuda.cudart().cudaHostUnregister(address)


@contextlib.contextmanager
def kept_rng(device: torch.device) -> Iterator[None]:
    """Afterwards random numbers go on, on the CPU and on the device, as if nothing had been drawn."""
    kind = {"device_type": device.type} if is_accelerator(device) else {}
    with torch.random.fork_rng([device] if kind else [], **kind):
        yield


def rng_states() -> dict[str, Tensor]:
    """Random states of this process by kind: "cpu", and that of a started accelerator."""
    states = {"cpu": torch.get_rng_state()}
    if (device := started()) is not None:
        states[device.type] = _module(device).get_rng_state(device)
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
        return all(gpu.capability >= (8, 9) for gpu in nvml.visible_gpus())
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


def _module(device: torch.device) -> ModuleType:
    return torch.get_device_module(device)
