"""Exponential moving average (EMA) of the weights: torch.optim.swa_utils.AveragedModel with
get_ema_multi_avg_fn, on the shards that a rank updates.

It is the entry `ema` of a parameter's optimizer state, so checkpoints save and load it in any
layout, and `verify` compares it. It starts as the weights after their first update. Skipped steps,
and steps in which no rank has a gradient for a parameter, leave it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from titanlike.core.distributed.placement import StageState, optimizer_state
from titanlike.core.optim.fused import SkippingOptimizer, around_step
from titanlike.core.torch_private.dtensor import local
from titanlike.core.torch_private.tensors import lerp

KEY = "ema"


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Make an optimizer update the EMA of its parameters after each step."""

    @torch.no_grad()
    def step_and_average(step: Callable[[], object]) -> None:
        with torch.enable_grad():
            step()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        lists: Iterable[tuple[list[Any], Tensor | None]]
        if isinstance(optimizer, SkippingOptimizer):
            lists = optimizer.by_skip(parameters)
        else:
            lists = [([p for p in parameters if p.grad is not None], None)]
        for alike, skip in lists:
            begun = [p for p in alike if KEY in optimizer.state[p]]
            averages = [local(optimizer.state[p][KEY]) for p in begun]
            if begun:  # few foreach calls: kernels launched one by one would be bound by the host
                share = (1 - decay) * (1 - (averages[0].new_zeros(()) if skip is None else skip))
                lerp(averages, [local(p) for p in begun], share)
            for parameter in alike:
                if KEY not in optimizer.state[parameter]:
                    optimizer.state[parameter][KEY] = parameter.detach().clone()

    around_step(optimizer, step_and_average)


@contextmanager
def averaged(states: Iterable[StageState]) -> Iterator[None]:
    """A context in which the weights are replaced by their EMA, where they have one."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for state in states:
        for _, parameter in state.parameters():
            if (ema := optimizer_state(state.optimizers, parameter).get(KEY)) is not None:
                pairs.append((local(parameter.detach()), local(ema)))
    _swap(pairs)
    try:
        yield
    finally:
        _swap(pairs)


@torch.no_grad()
def _swap(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for one, other in pairs:
        saved = one.clone()
        one.copy_(other)
        other.copy_(saved)
