"""Stops a run whose numbers are no numbers any more, and says where they came from."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlike.build import Run


class NonFinite(ValueError):
    """The loss or the gradient norm is NaN or infinite."""


def check_finite(record: dict[str, Any], run: Run) -> None:
    """Raise NonFinite, before the update, if a step's loss or gradient norm is not finite.

    Both numbers are the same on every rank, so all ranks stop at the same step, with parameters
    that are still good.
    """
    if math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"]):
        return
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, _first_bad_gradient(run))
    where = [f"rank {rank}: gradient of {name}" for rank, name in enumerate(found) if name]
    raise NonFinite(
        f"step {record['step']}: loss {record['loss']}, grad_norm {record['grad_norm']}; "
        f"not finite on {'; '.join(where) or 'no gradient, the loss alone'}"
    )


def _first_bad_gradient(run: Run) -> str:
    for part in run.parts:
        for name, parameter in part.stage.named_parameters():
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            if local is not None and not torch.isfinite(local).all():
                return name
    return ""
