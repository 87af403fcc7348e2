"""GPUs that are not there: stand-ins of what torch and the driver say of them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

_NVML = r"""
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
static int gpus(void) { const char *n = getenv("STAND_IN_GPUS"); return n ? atoi(n) : 0; }
int nvmlInit_v2(void) { return gpus() < 0 ? 9 : 0; } /* NVML_ERROR_DRIVER_NOT_LOADED */
int nvmlInit(void) { return nvmlInit_v2(); } /* as torch calls it */
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    strcpy(version, "580.65.06");
    return 0;
}
int nvmlDeviceGetCount_v2(unsigned *count) { *count = gpus(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(long)(0x10000000001 + index); /* a pointer is longer than an int */
    return 0;
}
static long number(void *device) { return (long)device - 0x10000000001; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (strcmp(uuid, "MIG-7")) return 6; /* NVML_ERROR_NOT_FOUND */
    *device = (void *)(0x10000000001 + 7);
    return 0;
}
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) {
    strcpy(uuid, "GPU-a0b1"); uuid[4] += number(device);
    return 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned size) {
    strcpy(name, "NVIDIA H200");
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    memory->total = 80ull << 30; memory->free = (70ull - number(device)) << 30; memory->used = 0;
    return 0;
}
int nvmlDeviceGetCpuAffinity(void *device, unsigned size, unsigned long *cores) {
    if (number(device) == 2) return 3; /* NVML_ERROR_NOT_SUPPORTED */
    memset(cores, 0, size * sizeof(long));
    cores[0] = number(device) ? 0xf0f : 0xf0; /* of 12 cores in two nodes */
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = 9; *minor = 0;
    return 0;
}
"""


def gpus(patch: pytest.MonkeyPatch, count: int, kind: str = "cuda", module: Any = None) -> None:
    """As torch sees a machine with so many GPUs. module: in place of torch.cuda, which may be asked
    for nothing else unless it has it."""
    patch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device(kind))
    patch.setattr(torch.accelerator, "device_count", lambda: count)
    module = module or SimpleNamespace(is_initialized=lambda: False)
    patch.setattr(torch, "get_device_module", lambda *_: module)


def driver(patch: pytest.MonkeyPatch, folder: Path, count: int) -> None:
    """A driver library with so many H100s; -1 = a library without a driver."""
    source, library = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    source.write_text(_NVML)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    patch.setattr("titanlike.core.device.nvml._LIBRARY", str(library))
    patch.setenv("STAND_IN_GPUS", str(count))
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
