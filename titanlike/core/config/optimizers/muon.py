"""Muon (https://kellerjordan.github.io/posts/muon, arXiv 2502.16982)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titanlike.core.config.keys import key
from titanlike.core.config.optimizer import Optimizer
from titanlike.core.config.optimizers.adamw import AdamW


@dataclass
class Muon(Optimizer):
    """Muon (arXiv 2502.16982) for the matrices of the blocks, AdamW for everything else."""

    name: str = key("muon", "choice")
    lr: float = key(3e-3, "peak learning rate of the matrices that Muon updates", ge=0)
    momentum: float = key(0.95, "decay of the running mean of gradients", ge=0, lt=1)
    nesterov: bool = key(True, "use Nesterov momentum")
    ns_steps: int = key(5, "iterations that orthogonalize a matrix", ge=1, le=20, example=5)
    adjust_lr: Literal["match_rms_adamw", "original"] = key(
        "match_rms_adamw",
        "scale of a matrix's lr: match_rms_adamw = 0.2 sqrt(longer side), so that AdamW's lr fits;"
        " original = sqrt(rows / columns), at least 1",
    )
    adamw_lr: float | None = key(None, "peak learning rate of AdamW's parameters; null = lr", ge=0)
    betas: list[float] = key(
        [0.9, 0.95], "AdamW's decay of the two running means", ge=0, lt=1, items=2
    )
    eps: float = key(1e-8, "AdamW's, added to the denominator", gt=0)
    adamw: list[str] = key(
        [], "matrices of blocks that AdamW updates, too, by name patterns: ['*.router.weight']"
    )

    group_keys = ("momentum",)
    implementation = "titanlike.techniques.muon.Muon"
    whole_matrices = True
    other_kind = "adamw"
    state_bytes = 4

    def matrix_flops(self, rows: int, columns: int) -> float:
        """Newton-Schulz iterations: x x^T, its square, and their product with x."""
        small, large = sorted((rows, columns))
        return float(self.ns_steps * (4 * small * small * large + 2 * small**3))

    def of_kind(self, kind: str) -> Optimizer:
        other = super().of_kind(kind)
        if other is not self and self.adamw_lr is not None:
            other.lr = self.adamw_lr
        if isinstance(other, AdamW):
            other.betas, other.eps = self.betas, self.eps
        return other
