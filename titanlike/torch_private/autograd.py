"""torch.autograd: what runs now; calls of custom and of checkpointed functions; who turns autocast
on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor


def in_backward() -> bool:
    """Whether this thread is inside a backward: where activation checkpointing runs a forward
    again."""
    return torch._C._current_graph_task_id() != -1


def in_functorch() -> bool:
    """Whether a transform of torch.func runs, such as vmap, in which few custom functions work."""
    return torch._C._are_functorch_transforms_active()


def shaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor that nobody else uses in another shape, not as a view of it."""
    return torch.ops.aten._unsafe_view(tensor, shape)


def accumulates(node: Any, index: int) -> bool:
    """Whether the backward that runs adds to `.grad` of a parameter: the tensor at `index` among
    those that a custom function is given, whose backward calls it. False in torch.autograd.grad."""
    try:
        return torch._C._will_engine_execute_node(node.next_functions[index][0])
    except RuntimeError as error:
        if "autograd.grad()" not in str(error):
            raise
        return False


_TOTAL = "gradients_go_to"  # attribute of a parameter


def accumulate_into(total: Tensor, copy: Tensor) -> None:
    """Let backwards add the gradients of a copy of a parameter to the parameter's own."""

    def add(copy: Tensor) -> None:
        gradient, copy.grad = copy.grad, None
        if gradient is not None:  # else a custom function returned none
            add_gradient(copy, gradient)

    setattr(copy, _TOTAL, total)
    copy.register_post_accumulate_grad_hook(add)


@torch.no_grad()
def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient as a backward does, but without a copy of another dtype."""
    total: Any = getattr(parameter, _TOTAL, parameter)
    if total.grad is not None:
        total.grad.add_(gradient)
        return
    dtype = getattr(total, "grad_dtype", None)  # in 2.15 FSDP's bf16 parameters have fp32 ones
    total.grad = gradient if dtype is None else gradient.to(dtype)


@contextmanager
def intercept_custom_functions(callback: Callable[..., Any]) -> Iterator[None]:
    """A context in which `apply(*args)` of a torch.autograd.Function is callback(the class, apply,
    args).

    Symptom without it: a TorchFunctionMode sees the calls in the function's forward, where autograd
    is off, and not the function.
    Test: `test_fences.py::test_a_function_mode_does_not_see_a_custom_function`.
    """
    before = vars(torch.autograd.Function)["apply"]

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        return callback(kind, functools.partial(before.__get__(None, kind), **kwargs), args)

    with patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


@contextmanager
def intercept_checkpoints(callback: Callable[[int], None]) -> Iterator[None]:
    """A context in which torch.utils.checkpoint, reentrant or not, only calls its function, between
    callback(1) and callback(-1).

    Symptom without it: the reentrant form runs the function without autograd, inside a custom
    function. Test: `test_fences.py::test_a_reentrant_checkpoint_runs_without_autograd`.
    """
    module: Any = torch.utils.checkpoint

    def generator(*_: Any, **__: Any) -> Iterator[None]:
        callback(1)
        try:
            yield
        finally:
            callback(-1)

    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        with contextmanager(generator)():
            return function(*args)

    name = "_checkpoint_without_reentrant_generator"
    names = [n for n in (name, f"{name}_impl") if hasattr(module, n)]  # the latter since 2.15
    assert names
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(module, name, generator))
        function = module.CheckpointFunction
        stack.enter_context(patch.object(function, "apply", staticmethod(apply)))
        yield


def ignore_ranges_in_selective_checkpoints() -> None:
    """A profiler's ranges are no operators whose results are kept or computed again.

    Symptom without it: FSDP names other ranges in a recomputation than in the forward where it
    shards a module inside of the block, as experts with ep=2; torch 2.13 compares them, and the
    backward fails with "_record_function_enter_new ... encountered during backward but not found in
    storage". Test: `test_compile_fences.py::test_ranges_may_differ_in_a_selective_recomputation`.
    """
    ignored: set[Any] = getattr(torch.utils.checkpoint, "SAC_IGNORED_OPS", set())
    operators = torch.ops.profiler
    ignored.add(operators._record_function_enter_new.default)
    ignored.add(operators._record_function_exit._RecordFunction)


@contextmanager
def watch_autocast(off: bool = False) -> Iterator[list[Any]]:
    """A context in which the autocasts that a model turns on are listed; with `off` they stay
    off."""
    used: list[Any] = []
    enter: Any = torch.autocast.__enter__

    def watched(self: torch.autocast) -> Any:
        if self._enabled:
            used.append(self)
            self._enabled = not off
        return enter(self)

    with patch.object(torch.autocast, "__enter__", watched):
        yield used
