"""Three steps of a run, of which the second is not applied."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from support.opened import opened
from titanlike.core.config.schema import Config
from titanlike.core.data.registry import open_data
from titanlike.core.launch.worker import Worker
from titanlike.core.training.anomalies import Anomaly, AnomalyDetector
from titanlike.core.training.step import validate


class Skips(AnomalyDetector):
    def limits(self) -> tuple[float, float]:
        return 0.0, 0.0

    def classify(
        self, record: dict, first_bad_gradient: Callable[[], str], counts: bool = True
    ) -> Anomaly | None:
        return Anomaly("spike", "skip", "for the test")


BALANCE = "balance of experts"


def three_steps(config: Config, worker: Worker) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """After each step the buffers, and the loads of experts (`ExpertBalance.loads`)."""
    buffers, loads = [], []
    with opened(config, worker) as job:
        for step in (1, 2, 3):
            job.step(step, Skips(config, {}) if step == 2 else None)
            validate(job.run, config, open_data(config))  # which changes nothing of them
            named = (item for stage in job.run.stages for item in stage.named_buffers())
            buffers.append({name: buffer.clone() for name, buffer in named})
            loads += [made[BALANCE].loads] if BALANCE in (made := job.run.transforms) else []
    return buffers, loads
