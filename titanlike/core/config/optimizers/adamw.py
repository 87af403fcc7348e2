"""AdamW (arXiv 1711.05101)."""

from __future__ import annotations

from dataclasses import dataclass

from titanlike.core.config.keys import key
from titanlike.core.config.optimizer import Optimizer


@dataclass
class AdamW(Optimizer):
    """torch.optim.AdamW, fused."""

    name: str = key("adamw", "choice")
    betas: list[float] = key([0.9, 0.95], "decay of the two running means", ge=0, lt=1, items=2)
    eps: float = key(1e-8, "added to the denominator", gt=0)

    group_keys = ("betas",)
    implementation = "titanlike.core.optim.fused.AdamW"
    state_bytes = 8
