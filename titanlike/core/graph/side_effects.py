"""Detect side effects of a model's forward that a stage's generated forward would not reproduce.

The model's forward runs once, for the recording; in training only its units and the recorded calls
run. State that the forward changes would stay as recorded, and random numbers of Python or numpy
would be the same in all steps: both raise RecordError. Leftovers of the recording on the model (a
mask created on first use) are removed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn

from titanlike.core.graph.recording import RecordError
from titanlike.core.torch_private.tensors import tree_leaves


@contextmanager
def restored(model: nn.Module, units: Sequence[str]) -> Iterator[None]:
    """A context that restores the model's attributes and buffers on exit.

    Raises RecordError if a buffer was changed, or a plain attribute outside of `units`.
    """
    saved = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    before = plain_attributes(model)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    versions = {name: buffer._version for name, buffer in buffers.items()}
    inside = tuple(f"{unit}." for unit in units)
    try:
        yield
        now = dict(model.named_buffers(remove_duplicate=False))
        for name, buffer in buffers.items():
            if now.get(name) is not buffer or buffer._version != versions[name]:
                raise RecordError(
                    f"its forward changes the buffer {name}, once a microbatch and on each dp rank "
                    "separately: its values would depend on the layout",
                    "a model that changes it outside of its forward, or torch's batch norm",
                )
        for name in changed_attributes(before, model):
            if not name.startswith(inside):  # units run in each step
                raise RecordError(
                    f"its forward changes self.{name}, which would stay as it was when the forward "
                    "was recorded",
                    "it without, or inside a block",
                )
    finally:
        for module, attributes, module_buffers in saved:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(module_buffers)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers and strings among the attributes of a module and its submodules, by dotted name."""
    return {
        f"{prefix}.{name}".lstrip("."): value
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, (bool, int, float, str))
    }


def changed_attributes(before: Mapping[str, Any], module: nn.Module) -> list[str]:
    """Names of the `plain_attributes` whose value differs from `before`."""
    now = plain_attributes(module)
    return [name for name, value in before.items() if name in now and now[name] != value]


def rng_state() -> tuple[Any, ...]:
    """The state of Python's and numpy's global generators."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2]


def argument_identities(args: Any, kwargs: Any) -> list[Any]:
    """Ids of a call's arguments and of their attributes: equal before and after a pure call."""
    identities = []
    for leaf in tree_leaves((args, kwargs)):
        opaque = isinstance(leaf, (Tensor, nn.Module, type)) or callable(leaf)
        attributes = {} if opaque else getattr(leaf, "__dict__", {})
        identities.append((id(leaf), {name: id(part) for name, part in attributes.items()}))
    return identities


def check_running_statistics(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise RecordError for F.batch_norm or F.instance_norm that updates running statistics."""
    if name not in ("batch_norm", "instance_norm"):
        return
    running = kwargs.get("running_mean", args[1] if len(args) > 1 else None)
    positional = args[5] if len(args) > 5 else False
    training = kwargs.get("training", kwargs.get("use_input_stats", positional))
    if isinstance(running, Tensor) and training:
        raise RecordError(
            f"its forward calls {name} with running statistics, which would depend on the layout",
            "nn.BatchNorm1d, 2d or 3d, whose statistics are those of the whole batch",
        )
