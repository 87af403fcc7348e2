"""What a forward does besides computing: a stage would not do it, so it must not matter.

A recording runs the model's forward once; at run time its units run, and what is between them is
replayed. State that the forward changes would be frozen as it was in the recording, and random
numbers of Python and numpy would be drawn once for all steps. Both are refused; what a recording
leaves on the model (a mask that is made when it is first needed) is taken away again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_PLAIN = (bool, int, float, str)
OUTSIDE = "a model that changes it outside of its forward, or torch's batch norm"


class SideEffect(ValueError):
    """What a forward does that a stage would not: why it matters, and what to write."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix


def changed_buffer(name: str) -> SideEffect:
    return SideEffect(
        f"its forward changes the buffer {name}, once a microbatch and on each dp rank by itself: "
        "its values would depend on the layout",
        OUTSIDE,
    )


@contextmanager
def undone(model: nn.Module, units: Sequence[str]) -> Iterator[None]:
    """Afterwards the model is as it was. Raises SideEffect for what may not happen within."""
    before = {name: _State(module) for name, module in model.named_modules()}
    inside = tuple(f"{unit}." for unit in units)
    try:
        yield
        for name, state in before.items():
            for buffer in state.changed_buffers():
                raise changed_buffer(f"{name}.{buffer}".lstrip("."))
            if name in units or name.startswith(inside):
                continue  # runs in a stage as it is
            for attribute in state.changed_attributes():
                raise SideEffect(
                    f"its forward changes {f'self.{name}.'.replace('..', '.')}{attribute}, which "
                    "would stay as it was when the forward was recorded",
                    "it without, or inside of a block",
                )
    finally:
        for state in before.values():
            state.restore()


class _State:
    """A module's attributes and buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes, self._buffers = dict(vars(module)), dict(module._buffers)
        self._versions = {name: _version(buffer) for name, buffer in self._buffers.items()}

    def changed_buffers(self) -> Iterator[str]:
        for name, buffer in self._buffers.items():
            now = self._module._buffers.get(name)
            if buffer is not None and (now is not buffer or now._version != self._versions[name]):
                yield name

    def changed_attributes(self) -> Iterator[str]:
        for name, value in self._attributes.items():
            now = vars(self._module).get(name)
            plain = isinstance(value, _PLAIN) and isinstance(now, _PLAIN)
            if plain and now != value:
                yield name

    def restore(self) -> None:
        vars(self._module).clear()
        vars(self._module).update(self._attributes)
        self._module._buffers.clear()
        self._module._buffers.update(self._buffers)


def _version(buffer: Tensor | None) -> int:
    return -1 if buffer is None else buffer._version


class Dice:
    """Whether Python's or numpy's generator was used since `look` was called last."""

    def __init__(self) -> None:
        self.look()

    def look(self) -> bool:
        numbers = np.random.get_state()
        now = (random.getstate(), numbers[1].tobytes(), numbers[2])
        used = getattr(self, "_before", now) != now
        self._before = now
        return used


def states_of(args: Any, kwargs: Any) -> list[Any]:
    """What is in arguments, and what their objects hold, by identity: to be compared."""
    leaves = pytree.tree_leaves((args, kwargs))
    return [(id(leaf), _attributes(leaf)) for leaf in leaves]


def _attributes(leaf: Any) -> dict[str, int]:
    if isinstance(leaf, (Tensor, nn.Module, type)) or callable(leaf):
        return {}
    return {name: id(part) for name, part in getattr(leaf, "__dict__", {}).items()}


def refuse_running_statistics(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Of batch_norm and instance_norm, called by hand with buffers that they change."""
    if name not in ("batch_norm", "instance_norm"):
        return
    running = kwargs.get("running_mean", args[1] if len(args) > 1 else None)
    positional = args[5] if len(args) > 5 else False
    training = kwargs.get("training", kwargs.get("use_input_stats", positional))
    if isinstance(running, Tensor) and training:
        raise SideEffect(
            f"its forward calls {name} with running statistics, which would depend on the layout",
            "nn.BatchNorm1d, 2d or 3d, whose statistics are those of the whole batch",
        )
