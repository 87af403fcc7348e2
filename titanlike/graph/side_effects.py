"""Side effects of a model's forward that the generated forward of a stage would not reproduce.

The model's forward runs once, for the recording; in training only its units and the recorded calls
run. State that the forward changes would stay as it was recorded, and random numbers of Python or
numpy would be the same in all steps: both raise RecordError. What the recording leaves on the model
(a mask that is created on first use) is removed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn

from titanlike.graph.recording import RecordError
from titanlike.torch_private.tensors import tree_leaves

_PLAIN = (bool, int, float, str)


@contextmanager
def restored(model: nn.Module, units: Sequence[str]) -> Iterator[None]:
    """Restore the model's attributes and buffers on exit.

    Raises RecordError where a buffer was changed, or a plain attribute outside of `units`.
    """
    before = {name: _State(module) for name, module in model.named_modules()}
    inside = tuple(f"{unit}." for unit in units)
    try:
        yield
        for name, state in before.items():
            for buffer in state.changed_buffers():
                raise RecordError(
                    f"its forward changes the buffer {f'{name}.{buffer}'.lstrip('.')}, once a "
                    "microbatch and on each dp rank separately: its values would depend on the "
                    "layout",
                    "a model that changes it outside of its forward, or torch's batch norm",
                )
            if name in units or name.startswith(inside):
                continue  # runs in each step
            for attribute in state.changed_attributes():
                raise RecordError(
                    f"its forward changes {f'self.{name}.'.replace('..', '.')}{attribute}, which "
                    "would stay as it was when the forward was recorded",
                    "it without, or inside a block",
                )
    finally:
        for state in before.values():
            state.restore()


class _State:
    """A module's attributes and buffers at one time."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes, self._buffers = dict(vars(module)), dict(module._buffers)
        self._versions = {name: b._version for name, b in self._buffers.items() if b is not None}

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


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers and texts among the attributes of a module and of those inside."""
    return {
        f"{prefix}.{name}".lstrip("."): value
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, _PLAIN)
    }


class RngMonitor:
    """Detects use of Python's or numpy's global generator."""

    def __init__(self) -> None:
        self._state = _rng_state()

    def used_since_last_check(self) -> bool:
        before, self._state = self._state, _rng_state()
        return before != self._state


def _rng_state() -> tuple[Any, ...]:
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2]


def argument_identities(args: Any, kwargs: Any) -> list[Any]:
    """Ids of a call's arguments and of their attributes: equal before and after a pure call."""
    found = []
    for leaf in tree_leaves((args, kwargs)):
        opaque = isinstance(leaf, (Tensor, nn.Module, type)) or callable(leaf)
        attributes = {} if opaque else getattr(leaf, "__dict__", {})
        found.append((id(leaf), {name: id(part) for name, part in attributes.items()}))
    return found


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
