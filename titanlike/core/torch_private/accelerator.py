"""The accelerator: whether it is initialized, its allocator's settings, and its memory history."""

from __future__ import annotations

from pathlib import Path

import torch


def started() -> torch.device | None:
    """The device that this process computes on, if it has initialized an accelerator."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.get_device_module(kind).is_initialized():
        return None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def in_bad_fork() -> bool:
    """Whether this process was forked from one that had called its accelerator's driver.

    Symptom: "Cannot re-initialize CUDA in forked subprocess", also if the parent only asked whether
    CUDA is available, as libraries do on import. torch has no public function for it. Test:
    `test_fences.py::test_whether_a_fork_can_use_the_accelerator_has_no_public_name`.
    """
    kind = torch.accelerator.current_accelerator()
    asked = kind and getattr(torch.get_device_module(kind), "_is_in_bad_fork", None)
    return bool(asked and asked())


def use_expandable_segments() -> None:
    """Set PYTORCH_ALLOC_CONF=expandable_segments:True, before or after the first allocation.

    Symptom without it (2.11 to 2.15): torch reads the variable when its library is loaded, too
    early for a process that has imported torch, and has no public setter. Test:
    `test_fences.py::test_the_allocator_has_no_public_settings`.
    """
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


MOST_EVENTS = 1_000_000  # bounds host memory, and the time to write them


def has_memory_history(device: torch.device) -> bool:
    """Whether torch can record the allocations of such a device, with their stacks.

    The functions are documented ("Understanding CUDA Memory Usage") but private. Test:
    test_fences.py::test_the_history_of_memory_has_no_public_name.
    """
    if device.type == "cpu":
        return False
    memory = getattr(torch.get_device_module(device), "memory", None)
    return hasattr(memory, "_record_memory_history") and hasattr(memory, "_dump_snapshot")


def record_memory_history(device: torch.device, begin: bool) -> None:
    """Begin or end to record allocations, with Python stacks only: C++ frames take minutes to
    write."""
    options = {"stacks": "python", "max_entries": MOST_EVENTS} if begin else {"enabled": None}
    torch.get_device_module(device).memory._record_memory_history(**options)


def write_memory_history(device: torch.device, path: Path) -> None:
    """Write a snapshot of the memory and its history, for pytorch.org/memory_viz."""
    torch.get_device_module(device).memory._dump_snapshot(str(path))
