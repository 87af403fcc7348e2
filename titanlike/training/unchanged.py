"""Forwards for another purpose than training: what they change in modules is restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from titanlike.device.accelerator import kept_rng
from titanlike.parallel.initialize import seeded
from titanlike.training.build import Run

_PLAIN = (bool, int, float, str, type(None))


@contextmanager
def unchanged(run: Run, seed: int) -> Iterator[None]:
    """Within it random numbers follow from `seed`. Afterwards buffers, plain attributes of modules and
    random states are what they were."""
    modules = [module for stage in run.stages for module in stage.modules()]
    plain = [
        {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}
        for module in modules
    ]
    buffers = [
        {name: (b, None if b is None else b.clone()) for name, b in module._buffers.items()}
        for module in modules
    ]
    try:
        with kept_rng(run.mesh.device), seeded(seed):
            yield
    finally:
        for module, values in zip(modules, plain, strict=True):
            vars(module).update(values)
        with torch.no_grad():
            for module, own in zip(modules, buffers, strict=True):
                for name, (buffer, value) in own.items():
                    if buffer is not None and value is not None:
                        buffer.copy_(value)
                    module._buffers[name] = buffer  # one may have been put in its place
