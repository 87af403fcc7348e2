"""torch's fused AdamW and SGD, which skip a step where a flag on the device says so.

The arithmetic, the state and its names are torch's. What differs: the update is computed on plain
tensors, this rank's parts (for 291 parameters AdamW's takes the host 1.5 ms, on DTensors 9.9), and state
begins as zeros before its first update, not within it: that one may be skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from titanlike.optim.skipping import SkippingOptimizer, locals_of


def fused_adamw(
    weights: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    group: dict[str, Any],
    skip: Tensor | None,
) -> None:
    """AdamW's update of plain tensors. Steps are counted up, and down again where it is skipped."""
    beta1, beta2 = group["betas"]
    adamw(
        *(weights, gradients, means, squares, [], steps),
        fused=True,
        found_inf=skip,
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )


class _Fused(SkippingOptimizer):
    """Updates parameters that share a flag together."""

    def __init__(self, groups: Any, **options: Any) -> None:
        settings: dict[str, Any] = {**options, "fused": True}
        super().__init__(groups, **settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for parameters, skip in self.by_skip(group["params"]):
                gradients = locals_of(parameter.grad for parameter in parameters)
                self._update(parameters, gradients, group, skip)

    def _update(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: list[Tensor],
        group: dict[str, Any],
        skip: Tensor | None,
    ) -> None:
        raise NotImplementedError


class AdamW(_Fused, torch.optim.AdamW):
    """torch.optim.AdamW(fused=True)."""

    def _update(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: list[Tensor],
        group: dict[str, Any],
        skip: Tensor | None,
    ) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        means, squares = (
            locals_of(state[key] for state in states) for key in ("exp_avg", "exp_avg_sq")
        )
        steps = [state["step"] for state in states]
        fused_adamw(locals_of(parameters), gradients, means, squares, steps, group, skip)

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


class Sgd(_Fused, torch.optim.SGD):
    """torch.optim.SGD(fused=True).

    torch's own leaves its momentum uninitialized where the first step is skipped.
    Test: test_skipping.py::test_torchs_sgd_leaves_its_momentum_uninitialized_if_it_skips_the_first_step
    """

    def _update(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: list[Tensor],
        group: dict[str, Any],
        skip: Tensor | None,
    ) -> None:
        momenta: list[Any] = [None] * len(parameters)
        if group["momentum"]:
            momenta = locals_of(map(self._momentum_of, parameters))
        sgd(
            *(locals_of(parameters), gradients, momenta),
            fused=True,
            found_inf=skip,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0,
            nesterov=False,
            maximize=False,
        )

    def _momentum_of(self, parameter: nn.Parameter) -> torch.Tensor:
        state = self.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]
