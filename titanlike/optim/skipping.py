"""Optimizer steps that the device may skip: the host launches them before it knows the step's numbers.

To read a number is to wait for the device until all that was launched is done: it then has nothing to
do while the host launches more. So the flag that skips a step stays on the device, as torch's
`found_inf` does: fused kernels read it, other updates are selected by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.torch_private.dtensor import local


class SkippingOptimizer(torch.optim.Optimizer):
    """Its `step` changes neither a parameter nor its state where a flag on the device says so."""

    # fp32 scalars, 0 or 1 = skip; None = 0
    skip: Tensor | None = None  # all parameters
    # some parameters alone: those that perhaps no rank's backward has reached
    unreached: Mapping[nn.Parameter, Tensor] = {}

    def skip_of(self, parameter: nn.Parameter) -> Tensor | None:
        """The flag of a parameter, on its device (with CPU offload the CPU, which waits for it)."""
        skip, unreached = self.skip, self.unreached.get(parameter)
        if unreached is not None:
            skip = unreached if skip is None else torch.maximum(skip, unreached)
        return None if skip is None else skip.to(parameter.device)

    def by_skip(
        self, parameters: Iterable[nn.Parameter]
    ) -> Iterator[tuple[list[nn.Parameter], Tensor | None]]:
        """Parameters that have a gradient, in lists that share a flag."""
        together: dict[torch.device, list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if parameter in self.unreached:
                yield [parameter], self.skip_of(parameter)
            else:
                together.setdefault(parameter.device, []).append(parameter)
        for alike in together.values():
            yield alike, self.skip_of(alike[0])


def step_unless(
    optimizer: torch.optim.Optimizer, skip: Tensor | None, unreached: Mapping[nn.Parameter, Tensor]
) -> None:
    """A step of an optimizer, skipped where the flags say so; see `SkippingOptimizer`.

    One of the user's own that cannot skip on the device, as torch's fused ones can, waits for it.
    """
    if isinstance(optimizer, SkippingOptimizer):
        optimizer.skip, optimizer.unreached = skip, unreached
        try:
            optimizer.step()
        finally:
            optimizer.skip, optimizer.unreached = None, {}
        return
    for parameter, flag in unreached.items():
        if flag.item():
            parameter.grad = None
    if skip is None or not skip.item():
        optimizer.step()


def select(skip: Tensor | None, old: Tensor, new: Tensor) -> None:
    """Give `old` the values of `new` unless a flag says skip; in place."""
    old.copy_(new if skip is None else torch.where(skip > 0, old, new))


def locals_of(tensors: Iterable[Any]) -> list[Tensor]:
    return [local(tensor) for tensor in tensors]
