"""Copies of tied weights get the sum of their gradients, through one group a rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.models import tiny
from support.world import run_world
from titanlike.config.schema import Config
from titanlike.launch.worker import Worker
from titanlike.parallel.mesh import open_mesh
from titanlike.parallel.tied import tie

PLACE = (0, 1, 2, 3)  # pipeline rank of each stage
STAGES = {"embedding": (0, 3), "scale": (1, 2), "bias": (0, 1, 3)}


def tied(config: Config, worker: Worker) -> tuple[int, dict[str, float]]:
    """How many groups this rank made; the gradients of its copies, of which each had rank + 1."""
    mesh = open_mesh(config, worker)
    stage = mesh.pp_rank
    mine = {name: nn.Parameter(torch.zeros(1)) for name, at in STAGES.items() if stage in at}
    made = []
    c10d = dist.distributed_c10d
    make = c10d._new_process_group_helper
    c10d._new_process_group_helper = lambda *a, **k: made.append(a) or make(*a, **k)
    weights = tie(STAGES, PLACE, {stage: mine}, mesh, 30)
    for parameter in mine.values():
        parameter.grad = torch.full((1,), 1.0 + worker.rank)
    weights.add_gradients()
    c10d._new_process_group_helper = make
    dist.barrier(dist.new_group())  # torch still counts groups alike on all ranks
    return len(made), {name: parameter.grad.item() for name, parameter in mine.items()}


@pytest.mark.parametrize("dp", [1, 2])
def test_a_rank_makes_one_group_for_each_set_of_holders(tmp_path: Path, dp: int) -> None:
    results = run_world(tied, tiny(4, dp), tmp_path, timeout=40)
    for rank, (made, gradients) in enumerate(results):
        assert made == len(STAGES), "whatever dp is"
        pipeline = [pp_rank * dp + rank % dp for pp_rank in PLACE]
        assert gradients == {
            name: sum(1.0 + pipeline[stage] for stage in at)
            for name, at in STAGES.items()
            if rank // dp in at
        }
