"""AdamW (arXiv 1711.05101)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titanlike.config.keys import key
from titanlike.config.optimizer import Optimizer

STATE_DTYPE = "dtype of the two running means; bf16 = half the memory, rounded stochastically"


@dataclass
class AdamW(Optimizer):
    """torch.optim.AdamW, fused."""

    name: str = key("adamw", "choice")
    betas: list[float] = key([0.9, 0.95], "decay of the two running means", ge=0, lt=1, items=2)
    eps: float = key(1e-8, "added to the denominator", gt=0)
    state_dtype: Literal["fp32", "bf16"] = key("fp32", STATE_DTYPE)

    group_keys = ("betas",)

    @property
    def implementation(self) -> str:
        if self.state_dtype == "bf16":
            return "titanlike.optim.bf16_state.Bf16StateAdamW"
        return "titanlike.optim.fused.AdamW"

    @property
    def state_bytes(self) -> int:
        return 4 if self.state_dtype == "bf16" else 8
