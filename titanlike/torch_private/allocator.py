"""The settings of the accelerator's allocator, at run time."""

from __future__ import annotations

import torch


def use_expandable_segments() -> None:
    """As PYTORCH_ALLOC_CONF=expandable_segments:True does; before or after the first allocation.

    Symptom without it (2.11 to 2.15): torch has no public function for it, and reads the variable
    when its library is loaded, so that a process which has imported torch sets it in vain.
    Test: `test_fences.py::test_the_allocator_has_no_public_settings`.
    """
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
