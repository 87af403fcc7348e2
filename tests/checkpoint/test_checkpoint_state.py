"""What a checkpoint holds besides parameters, where it is not what one would think."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.models import tiny
from support.world import run_world
from titanlike.checkpoint.checkpointer import Checkpointer, Progress
from titanlike.checkpoint.dcp_metadata import RestrictedUnpickler
from titanlike.checkpoint.integrity import UnsafeCheckpoint
from titanlike.config.schema import Checkpoint, Config
from titanlike.data.loader import open_data
from titanlike.launch.start_id import start_id
from titanlike.launch.worker import Worker
from titanlike.metrics.events import Events
from titanlike.parallel.mesh import close_mesh, open_mesh
from titanlike.training.build import build


def test_a_parameter_without_optimizer_state_has_none_after_loading(tmp_path: Path) -> None:
    """No gradient so far (an expert that was not used), or no update at all (all were skipped)."""
    for updated in (False, True):
        config = tiny(2, 1, layers=2, checkpoint=Checkpoint())
        results = run_world(save_and_load, config, tmp_path / str(updated), updated)
        assert all(results)


def save_and_load(config: Config, worker: Worker, updated: bool) -> bool:
    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    checkpointer = Checkpointer(
        run.stage_states, config, open_data(config), Events(worker.run_dir, None)
    )
    if updated:
        update(run, leave_out="ffn_norm")
    before = states(run)
    checkpointer.save(Progress(step=1))
    assert states(run).keys() == before.keys(), "saving changed the optimizer"
    update(run, leave_out="nothing")
    assert checkpointer.resume().step == 1
    after = states(run)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    close_mesh()
    return True


def update(run, leave_out: str) -> None:
    for part in run.stage_states:
        for name, parameter in part.stage.named_parameters():
            if leave_out not in name:
                parameter.grad = torch.ones_like(parameter)
        for optimizer in part.optimizers:
            optimizer.step()
        part.zero_grad()


def states(run) -> dict[str, torch.Tensor]:
    found = {}
    for part in run.stage_states:
        for name, parameter in part.stage.named_parameters():
            for key, value in part.optimizer_state(parameter).items():
                local = value.to_local() if hasattr(value, "to_local") else value
                found[f"{name}.{key}"] = local.clone()
    return found


def test_what_a_planted_file_changes_in_a_class_is_refused_and_undone() -> None:
    """BUILD sets attributes of a class that GLOBAL has named."""
    from torch.distributed.checkpoint.metadata import Metadata

    before = dict(vars(Metadata))
    module = b"torch.distributed.checkpoint.metadata"
    planted = b"c" + module + b"\nMetadata\n" + pickle.dumps((None, {"evil": 1}), 2)[2:-1] + b"b."
    with pytest.raises(UnsafeCheckpoint, match="changes .*Metadata"):
        RestrictedUnpickler(planted).load()
    assert dict(vars(Metadata)) == before
    with pytest.raises(UnsafeCheckpoint, match=r"asks for pathlib"):
        RestrictedUnpickler(pickle.dumps(Path("/tmp"))).load()


def test_ranks_that_start_again_on_an_old_store_agree_on_a_new_name() -> None:
    """torchrun's store keeps what earlier starts have written, and its counts may differ."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    names = [start(store, 3) for _ in range(3)]
    assert all(len(set(found)) == 1 for found in names), names
    assert len({found[0] for found in names}) == 3


def start(store: dist.Store, size: int) -> list[str]:
    found = [""] * size

    def rank(number: int) -> None:
        found[number] = start_id(store, number, size, 10)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    return found


def test_a_folder_of_its_own_takes_the_checkpoints_of_one_run(tmp_path: Path) -> None:
    """Else the jobs of a sweep would go on with each other's."""
    from titanlike.checkpoint.resume import select_resume

    shared = Checkpoint(every=0, last=True, folder=str(tmp_path / "shared"))
    config = tiny(steps=1, layers=2, checkpoint=shared)
    from titanlike.training.train import train

    run_world(train, config, tmp_path / "one")
    assert select_resume(replace(config, run_dir=str(tmp_path / "one"))).path is not None
    with pytest.raises(ValueError, match=f"checkpoints of the run in {tmp_path / 'one'}"):
        select_resume(replace(config, run_dir=str(tmp_path / "two")))
