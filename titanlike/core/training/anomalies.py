"""Detect steps with a non-finite loss or gradient norm, or a spike; their updates are skipped.

1. `limits` are computed from earlier steps; the device compares loss and gradient norm with them
   and skips the update if one is above, without a synchronization.
2. `classify` decides the same on the host once the metrics have arrived, and says what is wrong.

A spike is a loss or a gradient norm more than `spike_zscore` standard deviations above the mean of
the last `spike_window` good steps. The deviation is at least a share of the mean, so that small
noise after a very smooth stretch is no spike. Bad steps do not enter the window, but
`MOST_IN_A_ROW` spikes in a row are the new level: the window restarts with them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.core.config.schema import Config
from titanlike.core.data.sources import no_targets

JUDGED = ("loss", "grad_norm")  # numbers of a record
MOST_IN_A_ROW = 10  # bad steps; spikes are then the new level, and skipping NaN does not help
LEAST_DEVIATION = 0.01  # as a share of the mean
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
