"""The norm of all gradients of a model, by which each rank clips its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from support.models import tiny
from support.world import run_world
from titanlike.config.schema import Config, Sgd
from titanlike.data.loader import batches, open_data
from titanlike.launch.worker import Worker
from titanlike.optim.optimizer import clip_gradients, gradient_norm
from titanlike.parallel.mesh import open_mesh
from titanlike.training.build import build
from titanlike.training.guard import Guard
from titanlike.training.step import measured_step


def norms(config: Config, worker: Worker) -> tuple[float, float]:
    """Of a step's gradients: that in the step's record, and that of `gradient_norm`."""
    mesh, data = open_mesh(config, worker), open_data(config)
    run = build(config, mesh, data)
    stream = batches(data.train, config, dp_rank=mesh.dp_rank)
    found: list[float] = []

    def keep() -> None:
        found.append(gradient_norm(run.owned, mesh, config, run.shares).item())

    guard = Guard(config, {})
    record = measured_step(run, config, 1, stream, guard, worker, before_update=keep).record
    return record["grad_norm"], found[0]


SIZES = {"layers": 2, "tied": True, "optimizer": Sgd()}


def test_the_norm_is_that_of_the_whole_model_in_every_layout(tmp_path: Path) -> None:
    """Replicas, shards, and what tensor-parallel ranks hold together or apart, count once."""
    [(right, again)] = run_world(norms, tiny(**SIZES), tmp_path / "one")
    assert right == pytest.approx(again, rel=1e-6) and right > 0
    for layout in ({"dp": 2, "replicate": 2}, {"tp": 2}, {"pp": 2}):
        name = "_".join(layout)
        for found in run_world(norms, tiny(**layout, **SIZES), tmp_path / name):
            assert found == pytest.approx((right, right), rel=1e-5), layout


@pytest.mark.parametrize("limit, factor", [(2.0, 0.4), (10.0, 1.0)])
def test_gradients_are_scaled_to_the_limit_and_never_up(limit: float, factor: float) -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    clip_gradients(parameters, torch.tensor(5.0), limit)
    assert torch.allclose(parameters[0].grad, torch.tensor([3.0, 0.0]) * factor)
    assert torch.allclose(parameters[1].grad, torch.tensor([0.0, 4.0]) * factor)
    assert parameters[2].grad is None
