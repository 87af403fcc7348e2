"""Warn of parameters whose gradients are all zero for many steps: the loss does not depend on them,
or a ReLU before them is dead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titanlike.distributed.placement import StageState
from titanlike.training.train_plan import TrainPlan

_NAME = "largest_gradients"  # among a step's metrics
_NONE = -1.0  # instead of the norm of a parameter on a different rank


class ZeroGradients:
    """Keeps the largest norm of each gradient, and checks them once in so many steps. Costs one
    operation a step on the device; the norms go with the step's all-reduce of metrics."""

    def __init__(
        self, steps: int, plan: TrainPlan, states: Sequence[StageState], device: torch.device
    ) -> None:
        """steps: consecutive steps without a gradient before a warning; states: those of this rank."""
        self._steps, self._count = steps, 0
        self._model = plan.model_graph.model
        self._names = [*dict.fromkeys(name for stage in plan.stage_parameters for name in stage)]
        positions = {name: place for place, name in enumerate(self._names)}
        owned = [
            (name, p) for state in states for name, p in state.parameters() if state.owns(name)
        ]
        self._places = torch.tensor([positions[name] for name, _ in owned], dtype=torch.int64).to(
            device
        )
        self._largest = torch.zeros(len(owned), device=device)
        # reported at launch, or frozen
        self._left_out = {*plan.unused, *(name for name, p in owned if not p.requires_grad)}

    def measured(self, norms: Tensor) -> dict[str, Tensor]:
        """The metric to send in this step, or {}; called by all ranks in the same steps. norms: of
        this rank's shard of each gradient, fp32, in the order of `Run.owned`."""
        norms = norms.to(self._largest.device)  # with fsdp.cpu_offload they are on the CPU
        torch.maximum(self._largest, norms, out=self._largest)
        self._count += 1
        if self._count < self._steps:
            return {}
        sent = torch.full((len(self._names),), _NONE, device=norms.device)
        sent[self._places] = self._largest
        self._largest, self._count = torch.zeros_like(self._largest), 0
        return {_NAME: sent}

    def found(self, numbers: Mapping[str, Any]) -> list[str]:
        """The parameters to warn of, each once. numbers: a step's metrics, the max over all ranks."""
        pairs = zip(self._names, numbers.get(_NAME, []), strict=False)
        new = [name for name, norm in pairs if norm == 0 and name not in self._left_out]
        self._left_out.update(new)
        return new

    def text(self, names: Sequence[str]) -> str:
        """The warning for these parameters."""
        shown = []
        for name in names[:_MOST]:
            module = name.rpartition(".")[0]
            shown.append(f"{name} ({type(self._model.get_submodule(module)).__name__})")
        more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        return (
            f"WARNING: in the last {self._steps} steps all gradients were zero of "
            f"{', '.join(shown)}{more}: nothing trains them (warn_zero_gradients)"
        )


_MOST = 4  # parameters that a warning names
