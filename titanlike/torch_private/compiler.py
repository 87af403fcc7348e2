"""torch.compiler: what a forward asks to know whether it is being compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def as_if_compiling() -> Iterator[None]:
    """Within it, `torch.compiler.is_compiling()` is true.

    Libraries ask it to choose a forward that does not look at values (transformers: masks and
    mixtures of experts), which is what meta tensors need, too.
    Test: `test_fences.py::test_a_forward_can_be_told_that_it_is_compiled`.
    """
    before = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: True
    try:
        yield
    finally:
        torch.compiler.is_compiling = before
