"""Settings of torch's kernels, which a job changes and its process gets back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Within it, products of fp32 matrices are computed as torch.set_float32_matmul_precision says."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Within it, torch uses deterministic kernels alone, and raises where an operation has none.

    Afterwards the settings are restored (a sweep's jobs share a process), except that cuBLAS keeps
    the workspace that it was initialized with.
    """
    if not on:
        yield
        return
    cudnn = torch.backends.cudnn
    filling: Any = torch.utils.deterministic  # a module with a property
    enabled = torch.are_deterministic_algorithms_enabled()
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
