"""Copies of tied weights get the sum of their gradients, through one group a rank."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from support.models import tiny
from support.world import run_world
from titanlike.core.config.schema import Config
from titanlike.core.distributed.gradients import TiedWeights
from titanlike.core.distributed.mesh import open_mesh
from titanlike.core.launch.worker import Worker

PP, DP = 3, 2
PLACE = (0, 1, 2, 2, 1, 0)  # pipeline rank of each stage: a V
STAGES = {"embedding": (0, 5), "scale": (1, 2), "bias": (0, 1, 4, 5), "alone": (3,)}
GROUPS = 2  # of the ranks 1 and 2, of 0 and 1; both copies of the embedding are on one rank


def tied(config: Config, worker: Worker) -> tuple[int, dict[int, dict[str, float]]]:
    """How many groups this rank made; stage -> the gradients of its copies."""
    mesh = open_mesh(config, worker)
    mine = {
        stage: {name: nn.Parameter(torch.zeros(1)) for name, at in STAGES.items() if stage in at}
        for stage, rank in enumerate(PLACE)
        if rank == mesh.pp_rank
    }
    made = []
    c10d = dist.distributed_c10d
    make = c10d._new_process_group_helper
    c10d._new_process_group_helper = lambda *a, **k: made.append(a) or make(*a, **k)
    weights = TiedWeights(STAGES, PLACE, mine, mesh, 30)
    for stage, parameters in mine.items():
        for name, parameter in parameters.items():
            if name != "bias" or stage != 5:  # which its backward did not reach
                parameter.grad = torch.full((1,), gradient_of(stage, mesh.dp_rank))
    weights.after_backward()
    c10d._new_process_group_helper = make
    dist.barrier(dist.new_group())  # torch still counts groups alike on all ranks
    found = {s: {n: p.grad.item() for n, p in named.items()} for s, named in mine.items()}
    return len(made), found


def gradient_of(stage: int, dp_rank: int) -> float:
    return 10.0**stage * (1 + dp_rank)


def test_one_process_group_for_each_set_of_ranks_with_tied_weights(tmp_path: Path) -> None:
    results = run_world(tied, tiny(pp=PP, dp=DP), tmp_path)
    for rank, (made, gradients) in enumerate(results):
        assert made == GROUPS, "whatever dp is"
        for stage, found in gradients.items():
            assert PLACE[stage] == rank // DP
            for name, gradient in found.items():
                reached = [s for s in STAGES[name] if (name, s) != ("bias", 5)]
                assert gradient == sum(gradient_of(s, rank % DP) for s in reached), (name, stage)
