"""A run on a rank of a world, opened as a job opens it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.sources import Batch
from titanlike.core.distributed.mesh import Mesh, close_mesh, open_mesh
from titanlike.core.launch.worker import Worker
from titanlike.core.training.anomalies import AnomalyDetector
from titanlike.core.training.build import Run, build
from titanlike.core.training.device_batches import to_device
from titanlike.core.training.session import open_data_on_every_rank
from titanlike.core.training.step import StepResult, measured_step


@dataclass(frozen=True)
class Opened:
    run: Run
    mesh: Mesh
    config: Config
    worker: Worker
    stream: Iterator[Batch]  # of this rank, not yet on its device

    def batch(self) -> dict[str, Tensor]:
        return to_device(next(self.stream), self.mesh, self.config)

    def train(self) -> Tensor:
        """Forward and backward of a batch: its loss. Gradients are added to those there are."""
        return self.run.pipeline.train(self.batch())[0]

    def step(
        self,
        number: int,
        detector: AnomalyDetector | None = None,
        before_update: Callable[[], Any] = lambda: None,
    ) -> StepResult:
        detector = detector or AnomalyDetector(self.config, {})
        work = self.run, self.config, number, self.stream, detector, self.worker
        return measured_step(*work, before_update=before_update)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Of this rank, by their names in the whole model."""
        return [named for state in self.run.stage_states for named in state.parameters()]


@contextmanager
def opened(config: Config, worker: Worker, again: str = "") -> Iterator[Opened]:
    """again: a name for each one behind the first in these processes."""
    if again and worker.store is not None:
        worker = replace(worker, store=dist.PrefixStore(again, worker.store))
    data = open_data_on_every_rank(config, worker)
    mesh = open_mesh(config, worker)
    stream = batches(data.train, config, dp_rank=mesh.dp_rank)
    yield Opened(build(config, mesh, data), mesh, config, worker, stream)
    close_mesh()
