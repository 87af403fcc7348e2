"""torch.utils.checkpoint: calls of checkpointed functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint


@contextlib.contextmanager
def intercept_checkpoints(callback: Callable[[int], None]) -> Iterator[None]:
    """Within it, torch.utils.checkpoint only calls its function, between callback(1) and
    callback(-1), in the reentrant and the non-reentrant form.

    Symptom without it: the reentrant form runs the function without autograd, inside a custom
    function. Test: `test_fences.py::test_a_reentrant_checkpoint_runs_without_autograd`.
    """
    module = torch.utils.checkpoint

    def generator(*_: Any, **__: Any) -> Iterator[None]:
        callback(1)
        try:
            yield
        finally:
            callback(-1)

    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        callback(1)
        try:
            return function(*args)
        finally:
            callback(-1)

    name = "_checkpoint_without_reentrant_generator"
    names = (name, f"{name}_impl")  # the latter since 2.15
    before = {name: vars(module)[name] for name in names if name in vars(module)}
    inherited_apply = vars(module.CheckpointFunction).get("apply")
    assert before and inherited_apply is None
    try:
        for name in before:
            setattr(module, name, generator)
        module.CheckpointFunction.apply = staticmethod(apply)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
        del module.CheckpointFunction.apply
