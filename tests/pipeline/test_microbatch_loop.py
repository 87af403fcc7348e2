"""One process runs the microbatches of its stage without torch's pipeline runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.models import tiny
from support.opened import opened
from support.world import run_world
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.pipeline.microbatch_loop import MicrobatchLoop
from titanlike.core.pipeline.pipeline import Pipeline


def results(config: Config, worker: Worker) -> dict[str, Any]:
    """Losses of training and evaluation, gradients, and the actions that are told of."""
    with opened(config, worker) as job:
        actions: list[str] = []
        job.run.pipeline.on_action = lambda action: actions.append(str(action))
        batch = job.batch()
        loss, evaluated = job.run.pipeline.train(batch)[0], job.run.pipeline.evaluate(batch)[0]
        job.run.pipeline.train(batch)  # gradients are added
        gradients = {name: p.grad.clone() for name, p in job.parameters()}
        loop = isinstance(
            job.run.pipeline._executor(job.run.pipeline._planned, batch), MicrobatchLoop
        )
        return {"loop": loop, "loss": [loss, evaluated], **gradients, "actions": actions}


def results_of_both(config: Config, worker: Worker) -> list[dict[str, Any]]:
    found = [results(config, worker)]
    Pipeline._is_loop = lambda *_: False
    return [*found, results(config, worker)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_microbatch_loop_matches_torchs_pipeline_runtime(schedule: str, tmp_path: Path) -> None:
    config = tiny(schedule=Schedule(schedule, 4), layers=2)
    loop, torchs = run_world(results_of_both, config, tmp_path)[0]
    assert loop.pop("loop") and not torchs.pop("loop")
    told, of_torch = loop.pop("actions"), torchs.pop("actions")
    assert told == [action for action in of_torch if action == "None" or action[1] in "FB"]
    assert told.count("None") == 3 and "0B3" in told
    torch.testing.assert_close(loop, torchs, rtol=0, atol=0)
