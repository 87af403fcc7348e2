"""Parameters whose gradients are all zeros for many steps: the loss does not depend on them, or a
ReLU before them is dead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titanlike.distributed.placement import StageState
from titanlike.training.train_plan import TrainPlan

_NAME = "largest_gradients"  # among the numbers of a step
_NONE = -1.0  # instead of a norm: of a parameter of another rank


class ZeroGradients:
    """Keeps the largest norm of each gradient, and looks at them once in so many steps: an
    operation a step on the device, and a vector in the message that a step sends anyway."""

    def __init__(
        self, steps: int, plan: TrainPlan, states: Sequence[StageState], device: torch.device
    ) -> None:
        """steps: in a row, without a gradient, of which is warned; states: of this rank."""
        self._steps, self._count = steps, 0
        self._model = plan.model_graph.model
        self._names = [*dict.fromkeys(name for stage in plan.stage_parameters for name in stage)]
        at = {name: place for place, name in enumerate(self._names)}
        owned = [
            (name, p) for state in states for name, p in state.parameters() if state.owns(name)
        ]
        self._places = torch.tensor([at[name] for name, _ in owned], dtype=torch.int64).to(device)
        self._largest = torch.zeros(len(owned), device=device)
        # told at the start, or frozen
        self._left_out = {*plan.unused, *(name for name, p in owned if not p.requires_grad)}

    def measured(self, norms: Tensor) -> dict[str, Tensor]:
        """What a step sends; norms: of this rank's part of each gradient, fp32, in the order of
        `Run.owned`. All ranks call it in the same steps."""
        norms = norms.to(self._largest.device)  # which are on the CPU with fsdp.cpu_offload
        torch.maximum(self._largest, norms, out=self._largest)
        self._count += 1
        if self._count < self._steps:
            return {}
        sent = torch.full((len(self._names),), _NONE, device=norms.device)
        sent[self._places] = self._largest
        self._largest, self._count = torch.zeros_like(self._largest), 0
        return {_NAME: sent}

    def found(self, numbers: Mapping[str, Any]) -> list[str]:
        """The parameters to warn of, each once; numbers: of the step, the largest of all ranks."""
        pairs = zip(self._names, numbers.get(_NAME, []), strict=False)
        new = [name for name, norm in pairs if norm == 0 and name not in self._left_out]
        self._left_out.update(new)
        return new

    def text(self, names: Sequence[str]) -> str:
        """A warning of these parameters."""
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
