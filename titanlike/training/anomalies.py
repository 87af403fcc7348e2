"""Detect steps with a non-finite loss or gradient norm, or a spike; their updates are skipped.

1. `limits` are computed from earlier steps; the device compares loss and gradient norm with them
   and skips the update if one is above, without a synchronization.
2. `classify` decides the same on the host once the metrics have arrived, and says what is wrong.

A spike is a loss or a gradient norm more than `spike_zscore` standard deviations above the mean of
the last `spike_window` good steps. The deviation is at least a share of the mean, so that small
noise after a very smooth stretch is no spike. Bad steps do not enter the window, but
`MOST_IN_A_ROW` spikes in a row are the new level: the window restarts with them.

`ZeroGradients` warns of parameters whose gradients are all zero for many steps: the loss does not
depend on them, or a ReLU before them is dead.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.config.schema import Config
from titanlike.data.sources import no_targets
from titanlike.distributed.placement import StageState
from titanlike.training.train_plan import TrainPlan

JUDGED = ("loss", "grad_norm")  # numbers of a record
MOST_IN_A_ROW = 10  # bad steps; spikes are then the new level, and skipping NaN does not help
LEAST_DEVIATION = 0.01  # as a share of the mean
_LARGEST_GRADIENTS = "largest_gradients"  # among a step's metrics
_ELSEWHERE = -1.0  # instead of the norm of a parameter on a different rank
_MOST_NAMED = 4  # parameters that a warning of zero gradients names
LARGEST = float(torch.finfo(torch.float32).max)  # that is finite


class BadNumbers(ValueError):
    """The run was stopped for a loss or a gradient norm that is not finite, or a spike."""


@dataclass(frozen=True)
class Anomaly:
    """What is wrong with a step, and the action that the config asks for."""

    kind: Literal["nonfinite", "spike"]
    action: Literal["stop", "skip", "rollback"]
    text: str  # step, loss and norm; ranks and parameters, or z-score, mean and window
    fix: str = ""  # set where the cause is not divergence


class AnomalyDetector:
    """Compares each step's loss and gradient norm with those of the last good steps."""

    def __init__(self, config: Config, state: dict[str, Any]) -> None:
        self._config = config
        self.load(state)

    def limits(self) -> tuple[float, float]:
        """The largest loss and gradient norm (fp32) with which the next step is good."""
        if self._config.on_spike == "ignore" or len(self._spikes) + 1 >= MOST_IN_A_ROW:
            return LARGEST, LARGEST  # any that is finite
        loss, norm = map(self._limit, JUDGED)
        return loss, norm

    def classify(
        self, record: dict[str, Any], first_bad_gradient: Callable[[], str], counts: bool = True
    ) -> Anomaly | None:
        """Return a bad step's anomaly, the same on all ranks, or None. Collective if it is bad.

        first_bad_gradient: returns a parameter's name on this rank, "" = none. counts: whether any
        target of the batch counts in the loss.
        """
        if not all(math.isfinite(record[name]) for name in JUDGED):
            return self._not_finite(record, first_bad_gradient, counts)
        self._nonfinite = 0
        numbers = {name: record[name] for name in JUDGED}
        if self._config.on_spike != "ignore" and (high := self._too_high(numbers)):
            self._spikes.append(numbers)
            count = len(self._spikes)
            if count < MOST_IN_A_ROW:
                text = f"step {record['step']}: {'; '.join(high)}"
                if count > 1:
                    text += f"; spike {count} in a row, {MOST_IN_A_ROW} are taken as a new level"
                return Anomaly("spike", self._config.on_spike, text)
            for window in self._good.values():
                window.clear()
            for spike in self._spikes:
                self._take(spike)
        else:
            self._take(numbers)
        self._spikes.clear()
        return None

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON: a resumed run decides as if never stopped."""
        return {
            **{name: list(window) for name, window in self._good.items()},
            "spikes": [dict(spike) for spike in self._spikes],
            "nonfinite": self._nonfinite,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; {} for a new run."""
        size = self._config.spike_window
        self._good = {name: deque(state.get(name, []), size) for name in JUDGED}
        self._spikes = [dict(spike) for spike in state.get("spikes", [])]  # the last ones, in a row
        self._nonfinite = state.get("nonfinite", 0)  # steps in a row

    def _take(self, numbers: dict[str, float]) -> None:
        for name, window in self._good.items():
            window.append(numbers[name])

    def _limit(self, name: str) -> float:
        """The value above which there is a spike. It is rounded down to fp32, the dtype of the
        metrics, so that device and host decide alike."""
        window = self._good[name]
        if 2 * len(window) < self._config.spike_window:
            return LARGEST
        mean, deviation = mean_and_deviation(window)
        exact = mean + self._config.spike_zscore * deviation
        if not exact < LARGEST:
            return LARGEST
        limit = np.float32(exact)
        return float(np.nextafter(limit, np.float32(-np.inf)) if float(limit) > exact else limit)

    def _too_high(self, numbers: dict[str, float]) -> list[str]:
        """Describe each metric that is a spike."""
        texts = []
        for name, window in self._good.items():
            if numbers[name] > self._limit(name):
                mean, deviation = mean_and_deviation(window)
                above = numbers[name] - mean
                zscore = above / deviation if deviation else math.inf
                texts.append(
                    f"{name} {numbers[name]:.4g} is {zscore:.1f} standard deviations above "
                    f"{mean:.4g}, the mean of the last {len(window)} good steps "
                    f"(spike_zscore={self._config.spike_zscore:g})"
                )
        return texts

    def _not_finite(
        self, record: dict[str, Any], first_bad_gradient: Callable[[], str], counts: bool
    ) -> Anomaly:
        names: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(names, first_bad_gradient())
        where = [f"rank {rank}: gradient of {name}" for rank, name in enumerate(names) if name]
        if where:
            reason = f"not finite on {'; '.join(where)}"
        elif math.isfinite(record["loss"]):
            reason = "each gradient is finite, the sum of their squares is not"
        else:
            reason = "each gradient is finite, the loss alone is not"
        self._nonfinite += 1
        action = self._config.on_nonfinite
        if action == "skip" and self._nonfinite >= MOST_IN_A_ROW:
            action = "stop"
            reason += f"; step {self._nonfinite} in a row, so that skipping does not help"
        numbers = ", ".join(f"{name} {record[name]}" for name in JUDGED)
        text, advice = f"step {record['step']}: {numbers}; {reason}", ""
        if not counts:
            advice = "on_nonfinite=skip, which passes over such steps, or give other data"
            text = str(no_targets(self._config.data, f"step {record['step']}", ""))
        return Anomaly("nonfinite", action, text, advice)


def mean_and_deviation(window: deque[float]) -> tuple[float, float]:
    """Mean and standard deviation of some numbers, the latter at least a share of the mean."""
    mean = math.fsum(window) / len(window)
    variance = math.fsum((number - mean) ** 2 for number in window) / len(window)
    return mean, max(math.sqrt(variance), LEAST_DEVIATION * abs(mean))


def is_bad(loss: Tensor, norm: Tensor, limits: tuple[float, float]) -> Tensor:
    """A flag on the device, fp32: 0 if loss and gradient norm are finite and within the limits,
    else 1.

    loss, norm: fp32 scalars. Comparisons with NaN are false.
    """
    good = (loss >= -LARGEST) & (loss <= limits[0]) & (norm <= limits[1])
    return 1 - good.float()


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
        sent = torch.full((len(self._names),), _ELSEWHERE, device=norms.device)
        sent[self._places] = self._largest
        self._largest, self._count = torch.zeros_like(self._largest), 0
        return {_LARGEST_GRADIENTS: sent}

    def found(self, numbers: Mapping[str, Any]) -> list[str]:
        """The parameters to warn of, each once. numbers: a step's metrics, the max over all ranks."""
        pairs = zip(self._names, numbers.get(_LARGEST_GRADIENTS, []), strict=False)
        new = [name for name, norm in pairs if norm == 0 and name not in self._left_out]
        self._left_out.update(new)
        return new

    def text(self, names: Sequence[str]) -> str:
        """The warning for these parameters."""
        shown = []
        for name in names[:_MOST_NAMED]:
            module = name.rpartition(".")[0]
            shown.append(f"{name} ({type(self._model.get_submodule(module)).__name__})")
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return (
            f"WARNING: in the last {self._steps} steps all gradients were zero of "
            f"{', '.join(shown)}{more}: nothing trains them (warn_zero_gradients)"
        )
