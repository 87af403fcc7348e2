"""A custom optimizer and a custom learning-rate schedule."""

from collections.abc import Iterable

import torch


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675): the sign of a running mean of gradients, element by element."""

    def __init__(
        self, params: Iterable, lr: float, betas: tuple = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                update = mean.lerp(parameter.grad, 1 - first).sign()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"])
                mean.lerp_(parameter.grad, 1 - second)


def inverse_square_root(step: int, steps: int, warmup: int = 100) -> float:
    """The share of the peak: linear warm-up, then 1 / sqrt(step)."""
    return min(step / warmup, (warmup / step) ** 0.5)
