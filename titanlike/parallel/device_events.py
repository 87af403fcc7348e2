"""Events in a device's queue, by which the watchdog knows what the device has done."""

from __future__ import annotations

from functools import partial

import torch

from titanlike.launch.device_queue import DeviceQueue


def device_queue(device: torch.device) -> DeviceQueue | None:
    """The queue of an accelerator's current stream; None for the CPU, which has none."""
    if device.type == "cpu":
        return None
    return DeviceQueue(partial(torch.Event, device), partial(_select, device))


def _select(device: torch.device) -> None:
    torch.accelerator.set_device_index(device.index)  # each thread has a current device of its own
