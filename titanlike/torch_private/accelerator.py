"""The accelerator: whether this process has initialized it, settings of its allocator, and the
history of its memory, what was allocated where."""

from __future__ import annotations

from pathlib import Path

import torch


def started() -> torch.device | None:
    """The device that this process computes on, if it has initialized an accelerator.

    torch says it of each kind of device alone.
    """
    found = torch.accelerator.current_accelerator()
    if found is None or not torch.get_device_module(found).is_initialized():
        return None
    return torch.device(found.type, torch.accelerator.current_device_index())


def in_bad_fork() -> bool:
    """Whether this process was forked from one that had called its accelerator's driver.

    Symptom: "Cannot re-initialize CUDA in forked subprocess". A process need not have initialized
    CUDA for it: to ask whether CUDA is available is enough, as libraries do when they are imported.
    torch has no public function for it.
    Test: `test_fences.py::test_whether_a_fork_can_use_the_accelerator_has_no_public_name`.
    """
    found = torch.accelerator.current_accelerator()
    asked = found and getattr(torch.get_device_module(found), "_is_in_bad_fork", None)
    return bool(asked and asked())


def use_expandable_segments() -> None:
    """Do as PYTORCH_ALLOC_CONF=expandable_segments:True does; before or after the first allocation.

    Symptom without it (2.11 to 2.15): torch has no public function for it, and reads the variable
    when its library is loaded, so that a process which has imported torch sets it in vain.
    Test: `test_fences.py::test_the_allocator_has_no_public_settings`.
    """
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


MOST_EVENTS = 1_000_000  # the newest; a bound on the host's memory and on the time to write them


def has_memory_history(device: torch.device) -> bool:
    """Whether torch records for such a device what was allocated where in the program, and what was
    freed.

    torch has no public name for it, although its documentation describes these functions
    ("Understanding CUDA Memory Usage"). Test:
    test_fences.py::test_the_history_of_memory_has_no_public_name.
    """
    if device.type == "cpu":
        return False
    memory = getattr(torch.get_device_module(device), "memory", None)
    return hasattr(memory, "_record_memory_history") and hasattr(memory, "_dump_snapshot")


def start_memory_history(device: torch.device) -> None:
    """Record from now on. Stacks of Python alone: C++ frames take minutes to be written."""
    memory = torch.get_device_module(device).memory
    memory._record_memory_history(stacks="python", max_entries=MOST_EVENTS)


def write_memory_history(device: torch.device, path: Path) -> None:
    """Write what is allocated, and the history that led to it, for pytorch.org/memory_viz."""
    torch.get_device_module(device).memory._dump_snapshot(str(path))


def stop_memory_history(device: torch.device) -> None:
    """Record no more."""
    torch.get_device_module(device).memory._record_memory_history(enabled=None)
