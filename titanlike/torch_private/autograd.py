"""torch.autograd: whether a backward runs, and calls of custom functions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch


def in_backward() -> bool:
    """Whether this thread is inside a backward: where activation checkpointing runs a forward again."""
    return torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def intercept_custom_functions(callback: Callable[..., Any]) -> Iterator[None]:
    """Within it, `apply(*args)` of a torch.autograd.Function is callback(the class, apply, args).

    Symptom without it: a TorchFunctionMode sees the calls in the function's forward, where autograd
    is off, and not the function.
    Test: `test_fences.py::test_a_function_mode_does_not_see_a_custom_function`.
    """
    base = torch.autograd.Function
    before = vars(base)["apply"]

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        return callback(kind, functools.partial(before.__get__(None, kind), **kwargs), args)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        base.apply = before
