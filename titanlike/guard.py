"""Judges a step's numbers before they change the parameters: not finite, or a spike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlike.build import Run
from titanlike.config.schema import Config


class BadNumbers(ValueError):
    """The run was stopped for a loss or a gradient norm that is not finite, or a spike."""


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a step, and what the config says to do."""

    kind: Literal["nonfinite", "spike"]
    action: Literal["stop", "skip", "rollback"]
    text: str  # step, numbers, ranks and parameters


class Guard:
    """Looks at every step of a run; knows the numbers of the last good ones."""

    def __init__(self, config: Config, state: dict[str, Any]) -> None:
        self._config = config
        self.load(state)

    def judge(self, record: dict[str, Any], run: Run) -> Verdict | None:
        """None for a good step. All ranks come to the same verdict. Collective where it is bad."""
        if math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"]):
            return None
        found: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(found, _first_bad_gradient(run))
        where = [f"rank {rank}: gradient of {name}" for rank, name in enumerate(found) if name]
        text = (
            f"step {record['step']}: loss {record['loss']}, grad_norm {record['grad_norm']}; "
            f"not finite on {'; '.join(where) or 'no gradient, the loss alone'}"
        )
        return Verdict("nonfinite", self._config.on_nonfinite, text)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned, {} for a fresh start."""


def _first_bad_gradient(run: Run) -> str:
    for part in run.parts:
        for name, parameter in part.stage.named_parameters():
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            if local is not None and not torch.isfinite(local).all():
                return name
    return ""
