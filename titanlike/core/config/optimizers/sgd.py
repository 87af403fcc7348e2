"""Stochastic gradient descent, with momentum if asked for."""

from __future__ import annotations

from dataclasses import dataclass

from titanlike.core.config.keys import key
from titanlike.core.config.optimizer import Optimizer


@dataclass
class Sgd(Optimizer):
    """torch.optim.SGD."""

    name: str = key("sgd", "choice")
    lr: float = key(0.1, "peak learning rate", ge=0)
    weight_decay: float = key(0.0, "L2 decay of matrices; vectors (norms, biases) have none", ge=0)
    momentum: float = key(0.0, "momentum factor", ge=0, lt=1)

    group_keys = ("momentum",)
    implementation = "titanlike.core.optim.fused.Sgd"

    @property
    def state_bytes(self) -> int:
        return 4 if self.momentum else 0
