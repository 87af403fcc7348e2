"""torch's record of collectives is written where torch's own analyzer finds it."""

from __future__ import annotations

import pickle
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.flight_recorder.components.loader import read_dir

from support.models import tiny
from support.world import run_world
from titanlike.core.config.schema import Config
from titanlike.core.distributed.mesh import open_mesh
from titanlike.core.launch.worker import Worker
from titanlike.core.torch_private.flight_recorder import write_records


def record_a_missing_rank(config: Config, worker: Worker) -> list[str]:
    open_mesh(config, worker)
    dist.all_reduce(torch.ones(3))
    folder = worker.run_dir / "records"
    if worker.rank == 0:
        dist.all_reduce(torch.ones(5), async_op=True)  # which rank 1 never comes to
    return [path.name for path in write_records(folder, worker.rank)]


def test_a_collective_that_others_have_not_come_to_is_in_the_record(tmp_path: Path) -> None:
    """Where torch's analyzer finds it."""
    files = run_world(record_a_missing_rank, tiny(dp=2), tmp_path)
    assert files == [["gloo_rank0"], ["gloo_rank1"]]
    sizes = [
        [entry["input_sizes"] for entry in pickle.loads(path.read_bytes())["entries"]]
        for path in sorted((tmp_path / "records").iterdir())
    ]
    assert sizes == [[[[3]], [[5]]], [[[3]]]]
    details, _ = read_dir(Namespace(trace_dir=str(tmp_path / "records"), prefix=None))
    assert sorted(detail["rank"] for detail in details.values()) == [0, 1]


def test_a_process_without_groups_writes_nothing(tmp_path: Path) -> None:
    assert write_records(tmp_path / "records", 0) == [] and not (tmp_path / "records").exists()
