"""A save is planned once; and again when anything changes, and by each run for itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from support.models import tiny
from support.world import run_world
from titanlike.checkpoint import writer
from titanlike.checkpoint.checkpointer import Checkpointer, Progress
from titanlike.checkpoint.discovery import step_name
from titanlike.checkpoint.integrity import check_all
from titanlike.checkpoint.state_dict import SHARED_STEP
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.tensor_index import read_entries
from titanlike.config.schema import Checkpoint, Config
from titanlike.data.loader import open_data
from titanlike.data.sources import Data
from titanlike.launch.worker import Worker
from titanlike.metrics.events import Events
from titanlike.parallel.mesh import close_mesh, open_mesh
from titanlike.training.build import Run, build


def test_a_plan_is_made_once_and_again_when_anything_changes(tmp_path: Path) -> None:
    config = tiny(1, 2, layers=2, checkpoint=Checkpoint(keep=0))
    run_world(save_often, config, tmp_path)


def save_often(config: Config, worker: Worker) -> None:
    made = count_plans()
    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    one, other = (opened(run, config, worker.run_dir / name) for name in ("one", "other"))
    steps = iter(range(1, 100))

    def saved(checkpointer: Checkpointer) -> int:
        """How many plans rank 0 has made for a save."""
        before, step = len(made), next(steps)
        checkpointer.save(Progress(step=step))
        folder = checkpointer._folder.at(step_name(step))
        check_all(folder)
        restored = {name: tensor.detach().clone() for name, tensor in run_tensors(run)}
        for _, tensor in run_tensors(run):
            tensor.fill_(-1)
        here = replace(config, checkpoint=Checkpoint(resume=str(folder)), run_dir="nowhere")
        assert Checkpointer(run.stage_states, here, *rest(here)).resume().step == step
        for name, tensor in run_tensors(run):
            assert torch.equal(tensor, restored[name]), name
        return len(made) - before

    first = int(worker.rank == 0)
    assert saved(one) == first
    assert saved(one) == 0
    assert saved(other) == first, "another run of the process has plans of its own"
    update(run)  # now there is optimizer state
    assert saved(one) == first
    update(run)
    assert saved(one) == 0
    assert saved(other) == first and saved(other) == 0

    with pytest.MonkeyPatch.context() as patch:
        if worker.rank == 1:
            patch.setattr(writer, "write_tensors", fails)
        one.save(Progress(step=50))
    assert one._writer.failures and one.newest != 50
    assert saved(one) == first, "after a failure all is planned anew"
    close_mesh()


def fails(*_: object) -> None:
    raise OSError("the disk of one rank is full")


def count_plans() -> list[int]:
    made: list[int] = []
    original = DefaultSavePlanner.create_global_plan

    def counted(self, all_plans):
        made.append(len(all_plans))
        return original(self, all_plans)

    DefaultSavePlanner.create_global_plan = counted
    return made


def opened(run: Run, config: Config, run_dir: Path) -> Checkpointer:
    run_dir.mkdir(exist_ok=True)
    here = replace(config, run_dir=str(run_dir))
    return Checkpointer(run.stage_states, here, *rest(here))


def rest(config: Config) -> tuple[Data, Events]:
    return open_data(config), Events(Path(), None)


def run_tensors(run: Run) -> list[tuple[str, torch.Tensor]]:
    found = []
    for part in run.stage_states:
        for name, parameter in part.parameters():
            found.append((name, local(parameter.data)))
            for key, value in part.optimizer_state(parameter).items():
                found.append((f"{name}.{key}", local(value)))
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def update(run: Run, leave_out: str = "nothing") -> None:
    for part in run.stage_states:
        for name, parameter in part.parameters():
            if leave_out not in name:
                parameter.grad = torch.ones_like(parameter)
        for optimizer in part.optimizers:
            optimizer.step()
        part.zero_grad()


def test_parameters_share_a_step_count_unless_theirs_differs(tmp_path: Path) -> None:
    """As of an expert that was not in each batch."""
    config = tiny(2, 1, layers=2, checkpoint=Checkpoint())
    run_world(save_uneven_steps, config, tmp_path)
    names = {e.name for e in read_entries(Storage(tmp_path / "checkpoints" / step_name(1)))}
    own = {name for name in names if name.endswith(".step")} - {SHARED_STEP}
    assert SHARED_STEP in names
    assert own and all("ffn_norm" in name for name in own)


def save_uneven_steps(config: Config, worker: Worker) -> None:
    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    checkpointer = Checkpointer(run.stage_states, config, *rest(config))
    update(run)
    update(run, leave_out="ffn_norm")
    before = {name: tensor.clone() for name, tensor in run_tensors(run)}
    counts = {float(value) for name, value in before.items() if name.endswith(".step")}
    assert counts == {1.0, 2.0}
    checkpointer.save(Progress(step=1))
    update(run)
    assert checkpointer.resume().step == 1
    for name, tensor in run_tensors(run):
        assert torch.equal(tensor, before[name]), name
    close_mesh()
