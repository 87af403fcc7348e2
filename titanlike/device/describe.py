"""What is installed here: `python -m titanlike.device.describe` prints it as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch

from titanlike.device.accelerator import accelerator, count, name
from titanlike.device.memory import total_memory


def describe() -> dict[str, Any]:
    """Versions, names and bytes of memory of the accelerators. Initializes them."""
    versions = {"torch": torch.__version__, "CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    devices = [torch.device(accelerator() or "cpu", index) for index in range(count())]
    if devices and torch.distributed.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    memory = [total_memory(device, len(devices)) for device in devices]
    return {"versions": versions, "names": [name(device) for device in devices], "memory": memory}


if __name__ == "__main__":
    print(json.dumps(describe()))
