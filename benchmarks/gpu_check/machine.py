"""Print installed versions, and names and memory of the accelerators, as JSON. Initializes them."""

import json

import torch

from titanlike.core.device.accelerator import accelerator, count, name, nccl_version
from titanlike.core.device.memory import total_memory

versions = {"torch": torch.__version__, "CUDA": torch.version.cuda, "ROCm": torch.version.hip}
devices = [torch.device(accelerator() or "cpu", index) for index in range(count())]
if devices and nccl_version() != "none":
    versions["NCCL"] = nccl_version()
memory = [total_memory(device, len(devices)) for device in devices]
print(json.dumps({"versions": versions, "names": [*map(name, devices)], "memory": memory}))
