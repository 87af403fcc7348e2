"""torch.autograd: what runs now, and interception of custom functions, checkpoints and autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor


def in_backward() -> bool:
    """Whether this thread is inside a backward, as a recomputed (checkpointed) forward is."""
    return torch._C._current_graph_task_id() != -1


class Node(NamedTuple):
    """What a backward runs."""

    name: str
    number: int  # that `sequence_number` had in its forward
    python: bool  # a custom function


def running_node() -> Node | None:
    node: Any = torch._C._current_autograd_node() if in_backward() else None
    if node is None:
        return None
    python = isinstance(node, torch.autograd.function.BackwardCFunction)
    return Node(node.name(), node._sequence_nr(), python)


def sequence_number() -> int:
    """Of the graph's node that was made last, such as that of an operation that is dispatched."""
    return torch._C._autograd._get_sequence_nr() - 1


def in_functorch() -> bool:
    """Whether a torch.func transform runs, such as vmap, in which few custom functions work."""
    return torch._C._are_functorch_transforms_active()


def shaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor in another shape, not as a view; for tensors without other users."""
    return torch.ops.aten._unsafe_view(tensor, shape)


def accumulates(node: Any, index: int) -> bool:
    """Whether the running backward adds to `.grad` of the custom function's input at `index`, a
    parameter. Called in that function's backward; False in torch.autograd.grad."""
    try:
        return torch._C._will_engine_execute_node(node.next_functions[index][0])
    except RuntimeError as error:
        if "autograd.grad()" not in str(error):
            raise
        return False


_TOTAL, _ADDED = "gradients_go_to", "gradient_added"  # attributes of a parameter


def accumulate_into(total: Tensor, copy: Tensor) -> None:
    """Redirect the gradients of a copy of a parameter to the parameter."""

    def add(copy: Tensor) -> None:
        gradient, copy.grad = copy.grad, None
        if gradient is not None:  # else a custom function returned none
            add_gradient(copy, gradient)

    setattr(copy, _TOTAL, total)
    copy.register_post_accumulate_grad_hook(add)


@torch.no_grad()
def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient as a backward does, but without a copy in another dtype."""
    total: Any = getattr(parameter, _TOTAL, parameter)
    if total.grad is not None:
        total.grad.add_(gradient)
    else:
        dtype = getattr(total, "grad_dtype", None)  # 2.15: fp32 for FSDP's bf16 parameters
        total.grad = gradient if dtype is None else gradient.to(dtype)
    if (added := vars(total).get(_ADDED)) is not None:
        added()


def call_when_added(parameter: Tensor, callback: Callable[[], object]) -> None:
    """Let `add_gradient` call a function after it has added to this parameter's gradient."""
    vars(parameter)[_ADDED] = callback


@contextmanager
def intercept_custom_functions(callback: Callable[..., Any]) -> Iterator[None]:
    """A context in which `apply(*args)` of a torch.autograd.Function calls callback(class, apply,
    args).

    Symptom without it: a TorchFunctionMode sees the operators in the function's forward, not the
    function. Test: `test_fences.py::test_a_function_mode_does_not_see_a_custom_function`.
    """
    before = vars(torch.autograd.Function)["apply"]

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        return callback(kind, functools.partial(before.__get__(None, kind), **kwargs), args)

    with patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


@contextmanager
def intercept_checkpoints(callback: Callable[[int], None]) -> Iterator[None]:
    """A context in which torch.utils.checkpoint just calls its function, between callback(1) and
    callback(-1).

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
    """Exclude profiler ranges from the operators that selective checkpointing saves or recomputes.

    Symptom without it: if FSDP shards a module inside a block (experts with ep=2), its ranges
    differ in the recomputation; torch 2.13 compares them, and the backward fails with
    "_record_function_enter_new ... encountered during backward but not found in storage". Test:
    `test_compile_fences.py::test_ranges_may_differ_in_a_selective_recomputation`.
    """
    ignored: set[Any] = getattr(torch.utils.checkpoint, "SAC_IGNORED_OPS", set())
    operators = torch.ops.profiler
    ignored.add(operators._record_function_enter_new.default)
    ignored.add(operators._record_function_exit._RecordFunction)


@contextmanager
def watch_autocast(off: bool = False) -> Iterator[list[Any]]:
    """A context that lists the autocasts that a model enables; with `off` they stay disabled."""
    used: list[Any] = []
    enter: Any = torch.autocast.__enter__

    def watched(self: torch.autocast) -> Any:
        if self._enabled:
            used.append(self)
            self._enabled = not off
        return enter(self)

    with patch.object(torch.autocast, "__enter__", watched):
        yield used
