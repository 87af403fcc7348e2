"""NVIDIA GPUs as listed by the driver's management library (NVML), without initializing CUDA.

A CUDA context would take GPU memory and break forks of this process. Works with a torch built
without CUDA.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")
_LIBRARY = "libnvidia-ml.so.1"
_NAME, _UUID = 96, 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE, NVML_DEVICE_UUID_V2_BUFFER_SIZE
_WORDS = 256  # of a CPU mask, 64 cores each
_VERSION = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE


class Gpu(NamedTuple):
    name: str  # "NVIDIA H200"
    total: int  # bytes
    free: int
    capability: tuple[int, int]  # compute capability: (9, 0) is Hopper


class _Memory(ctypes.Structure):
    """nvmlMemory_t"""

    _fields_ = [(field, ctypes.c_ulonglong) for field in ("total", "free", "used")]


class _Failed(Exception):
    pass


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA would show to this process; empty without NVML or without a GPU."""
    return _asked(lambda library: [_describe(library, handle) for handle in _visible(library)], [])


def nearest_cores(index: int) -> set[int]:
    """The CPU cores on the NUMA node of visible GPU `index`; empty = unknown."""

    def ask(library: ctypes.CDLL) -> set[int]:
        words = (ctypes.c_ulong * _WORDS)()
        _call(library.nvmlDeviceGetCpuAffinity, _visible(library)[index], _WORDS, words)
        bits = 8 * ctypes.sizeof(ctypes.c_ulong)
        return {core for core in range(bits * _WORDS) if words[core // bits] >> core % bits & 1}

    return _asked(ask, set[int]())


def driver_version() -> str:
    """The driver's version, e.g. "580.65.06"; "" = unknown."""

    return _asked(lambda library: _text(_VERSION, library.nvmlSystemGetDriverVersion), "")


def _asked(ask: Callable[[ctypes.CDLL], _T], unknown: _T) -> _T:
    """Return `ask(library)`, or `unknown` if NVML is missing or the query fails."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        _call(library.nvmlInit_v2)
    except (OSError, _Failed, AttributeError):
        return unknown
    try:
        return ask(library)
    except (_Failed, AttributeError, IndexError):
        return unknown
    finally:
        library.nvmlShutdown()


def _visible(library: ctypes.CDLL) -> list[ctypes.c_void_p]:
    """Handles of the GPUs in CUDA_VISIBLE_DEVICES: indices, UUIDs or prefixes of them, MIG UUIDs.
    As in CUDA, the first entry that does not exist ends the list."""
    number = ctypes.c_uint()
    _call(library.nvmlDeviceGetCount_v2, ctypes.byref(number))
    get = library.nvmlDeviceGetHandleByIndex_v2
    handles = [_filled(ctypes.c_void_p(), get, index) for index in range(number.value)]
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return handles
    visible = []
    for entry in map(str.strip, variable.split(",")):
        if entry.isdecimal():
            matches = handles[int(entry) : int(entry) + 1]
        elif entry.startswith("MIG-"):
            get = library.nvmlDeviceGetHandleByUUID
            matches = [_filled(ctypes.c_void_p(), get, entry.encode())]
        else:
            uuids = [_text(_UUID, library.nvmlDeviceGetUUID, handle) for handle in handles]
            pairs = zip(handles, uuids, strict=True)
            matches = [handle for handle, uuid in pairs if entry and uuid.startswith(entry)]
        if len(matches) != 1:
            break
        visible += matches
    return visible


def _describe(library: ctypes.CDLL, handle: ctypes.c_void_p) -> Gpu:
    memory = _filled(_Memory(), library.nvmlDeviceGetMemoryInfo, handle)
    major, minor = ctypes.c_int(), ctypes.c_int()
    capability = ctypes.byref(major), ctypes.byref(minor)
    _call(library.nvmlDeviceGetCudaComputeCapability, handle, *capability)
    name = _text(_NAME, library.nvmlDeviceGetName, handle)
    return Gpu(name, memory.total, memory.free, (major.value, minor.value))


def _text(size: int, function: Callable[..., int], *arguments: object) -> str:
    """A text of at most `size` bytes that an NVML function writes."""
    text = ctypes.create_string_buffer(size)
    _call(function, *arguments, text, size)
    return text.value.decode()


def _filled(value: Any, function: Callable[..., int], *arguments: object) -> Any:
    """Pass `value` by reference to an NVML function, which fills it, and return it."""
    _call(function, *arguments, ctypes.byref(value))
    return value


def _call(function: Callable[..., int], *arguments: object) -> None:
    if function(*arguments) != 0:  # NVML_SUCCESS
        raise _Failed
