"""What a recorder of a forward must see and torch does not show: custom functions, recomputation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint


def in_backward() -> bool:
    """Whether this thread is inside a backward: where activation checkpointing runs a forward again."""
    return torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def intercept_custom_functions(tell: Callable[..., Any]) -> Iterator[None]:
    """Within it, `Function.apply(*args)` of torch.autograd is tell(the class, apply, args).

    Function modes see the calls inside of its forward, where there is no autograd, and not itself.
    """
    base = torch.autograd.Function
    before = vars(base)["apply"]

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        return tell(kind, functools.partial(before.__get__(None, kind), **kwargs), args)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        base.apply = before


@contextlib.contextmanager
def intercept_checkpoints(tell: Callable[[int], None]) -> Iterator[None]:
    """Within it, torch.utils.checkpoint only calls its function, between tell(1) and tell(-1).

    Both kinds: the reentrant one would run the function without autograd.
    """
    module = torch.utils.checkpoint

    def generator(*_: Any, **__: Any) -> Iterator[None]:
        tell(1)
        try:
            yield
        finally:
            tell(-1)

    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        tell(1)
        try:
            return function(*args)
        finally:
            tell(-1)

    name = "_checkpoint_without_reentrant_generator"
    names = (name, f"{name}_impl")  # the latter since 2.15
    before = {name: vars(module)[name] for name in names if name in vars(module)}
    own_apply = vars(module.CheckpointFunction).get("apply")
    assert before and own_apply is None
    try:
        for name in before:
            setattr(module, name, generator)
        module.CheckpointFunction.apply = staticmethod(apply)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
        del module.CheckpointFunction.apply
