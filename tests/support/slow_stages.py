"""Training with ranks whose stages sleep in each forward."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

from titanlike.config.schema import Config
from titanlike.launch.worker import Worker
from titanlike.training import loop
from titanlike.training.train import train


def train_with_a_slow_stage(config: Config, worker: Worker, slow_ranks: tuple[int, ...]) -> None:
    take = loop.batches_from

    def batches_from(session: Any) -> Any:
        if worker.rank in slow_ranks:
            for stage in session.run.stages:
                stage.register_forward_pre_hook(lambda *_: time.sleep(0.1))
        return take(session)

    with mock.patch.object(loop, "batches_from", batches_from):
        train(config, worker)
