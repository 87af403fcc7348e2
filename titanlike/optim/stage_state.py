"""What a rank trains of one stage: its parameters, their optimizer, their names in the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class StageState:
    """One stage of this rank that has parameters or buffers, and its optimizer."""

    stage: nn.Module
    optimizer: torch.optim.Optimizer
    # parameter in the stage -> its name in the whole model, one for all copies of a tied one
    names: dict[str, str]
    owned: frozenset[str]  # names in the whole model; each parameter is owned by one stage

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All of the stage's, by the name in the whole model."""
        for name, parameter in self.stage.named_parameters():
            yield self.names[name], parameter

    def owns(self, name: str) -> bool:
        """Whether a parameter or buffer, by its name in the whole model, counts in this stage: in
        the gradient norm and in a checkpoint. A tied parameter counts in one stage alone."""
        return name in self.owned or name not in self.names.values()
