"""Groups of the mesh, and what ranks tell each other through them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.models import tiny
from support.world import run_world
from titanlike.core.config.groups.jobs import Launch
from titanlike.core.config.schema import Config
from titanlike.core.distributed.collectives import distinct_values
from titanlike.core.distributed.mesh import close_mesh, open_mesh
from titanlike.core.launch.worker import Worker


def counted(calls: list[str], name: str) -> None:
    right: Any = getattr(dist, name)

    def call(*args: Any, **more: Any) -> Any:
        calls.append(name)
        return right(*args, **more)

    setattr(dist, name, call)


def opened_groups(config: Config, worker: Worker) -> tuple[int, dict[str, list[int]], set[Any]]:
    """(calls of new_group, ranks by axis, timeouts)"""
    calls: list[str] = []
    counted(calls, "new_group")
    mesh = open_mesh(config, worker)
    groups = {name: mesh.axes.get_group(name) for name in mesh.axes.mesh_dim_names}
    ranks = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    cpu = torch.device("cpu")
    timeouts = {group._get_backend(cpu).options._timeout for group in groups.values()}
    close_mesh()
    return len(calls), ranks, timeouts


def test_a_rank_makes_only_the_groups_that_it_is_in(tmp_path: Path) -> None:
    """With launch.timeout. torch's own mesh makes 20 here, and of n ranks n of one rank each."""
    launch = Launch(timeout=77)
    config = tiny(pp=2, dp=2, replicate=2, tp=2, batch_size=4, launch=launch)
    every = run_world(opened_groups, config, tmp_path)
    assert [calls for calls, *_ in every] == [4] * 8
    _, ranks, timeouts = every[5]
    assert ranks == {"pp": [1, 5], "replicate": [5, 7], "shard": [5], "tp": [4, 5]}
    assert timeouts == {timedelta(seconds=77)}
    assert run_world(opened_groups, tiny(dp=2), tmp_path / "one axis")[0][0] == 1


def told(config: Config, worker: Worker) -> tuple[list[Any], list[str]]:
    calls: list[str] = []
    for name in ("broadcast_object_list", "all_gather_object"):
        counted(calls, name)
    mesh = open_mesh(config, worker)
    value = {f"layer {mesh.pp_rank}": (mesh.pp_rank, 3)}
    found = distinct_values(value, dist.group.WORLD)
    close_mesh()
    return found, calls


def test_what_ranks_have_in_common_is_sent_once(tmp_path: Path) -> None:
    """As names and shapes for checkpoint.start_from: of each pipeline rank, not of each rank."""
    config = tiny(pp=2, dp=2, layers=2, batch_size=4)
    both = [{"layer 0": (0, 3)}, {"layer 1": (1, 3)}]
    assert run_world(told, config, tmp_path) == [(both, ["broadcast_object_list"] * 2)] * 4
