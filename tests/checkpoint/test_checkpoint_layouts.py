"""What one layout saves, any other loads: parameters and optimizer state, to the last bit."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.cells import slow
from support.models import tiny
from support.world import run_world
from titanlike.checkpoint.checkpointer import Checkpointer, Progress
from titanlike.config.schema import BalanceSplit, Checkpoint, Config
from titanlike.data.loader import open_data
from titanlike.launch.worker import Worker
from titanlike.metrics.events import Events
from titanlike.parallel.mesh import close_mesh, open_mesh
from titanlike.torch_private.dtensor import local_slices
from titanlike.training.build import Run, build

LAYERS = 4
# 24 sequences divide among 1, 2, 3 and 4 ranks; 32 channels among 3 do not
LAYOUTS = {
    name: replace(tiny(*mesh, layers=LAYERS, tied=True, **changes), batch_size=24)
    for name, mesh, changes in (
        ("one", (1, 1), {}),
        ("dp3", (1, 3), {}),
        ("dp4 in two replicas", (1, 4), {"replicate": 2}),
        ("pp2 interleaved", (2, 1, "interleaved1f1b"), {}),
        ("pp2 x dp2 in a V", (2, 2, "zbvzerobubble"), {}),
        ("pp3 uneven", (3, 1, "gpipe"), {"split": BalanceSplit(balance=[1, 2, 1])}),
    )
}
PARAMETERS = LAYERS * 9 + 2  # the head's is the embedding's


@pytest.mark.slow
def test_any_layout_loads_what_any_other_saved(tmp_path: Path) -> None:
    for name, config in LAYOUTS.items():
        run_world(save, replace(config, checkpoint=Checkpoint()), tmp_path / name, name)
    for name, config in LAYOUTS.items():
        results = run_world(load_all, config, tmp_path / f"to {name}", str(tmp_path))
        loaded = {(source, key) for found in results for source, key in found}
        # model, exp_avg, exp_avg_sq and step of every parameter, in every one of the layouts
        assert len(loaded) == len(LAYOUTS) * 4 * PARAMETERS, name


def save(config: Config, worker: Worker, name: str) -> None:
    """Fill this rank's share with what `truth` says, and save it as step 7."""
    run, checkpointer = opened(config, worker)
    for key, tensor in tensors(run):
        whole = truth(key, tensor.shape)
        local(tensor).copy_(whole[local_slices(tensor)])
    checkpointer.save(Progress(step=7, left_out=3, value=0.1 + 0.2))
    close_mesh()


def load_all(config: Config, worker: Worker, root: str) -> list[tuple[str, str]]:
    """Load each layout's checkpoint; what of it this rank has, all of it compared with `truth`."""
    run, _ = opened(config, worker)
    found = []
    for source in LAYOUTS:
        for _, tensor in tensors(run):
            local(tensor).fill_(-1)
        here = replace(config, run_dir=str(Path(root) / source), checkpoint=Checkpoint())
        checkpointer = Checkpointer(run.stage_states, here, open_data(here), Events(Path(), None))
        assert checkpointer.resume() == Progress(step=7, left_out=3, value=0.1 + 0.2)
        for key, tensor in tensors(run):
            whole = truth(key, tensor.shape)
            assert torch.equal(local(tensor), whole[local_slices(tensor)]), (source, key)
            found.append((source, key))
    close_mesh()
    return found


def opened(config: Config, worker: Worker) -> tuple[Run, Checkpointer]:
    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    for parameter in run.parameters:
        parameter.grad = torch.zeros_like(parameter)
    for part in run.stage_states:
        for optimizer in part.optimizers:
            optimizer.step()  # so that there is a state
        part.zero_grad()
    events = Events(worker.run_dir, None)
    return run, Checkpointer(run.stage_states, config, open_data(config), events)


def tensors(run: Run) -> list[tuple[str, torch.Tensor]]:
    found = []
    for part in run.stage_states:
        for name, parameter in part.parameters():
            found.append((name, parameter.data))
            for key, value in part.optimizer_state(parameter).items():
                found.append((f"{name}.{key}", value))
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def truth(key: str, shape: torch.Size) -> torch.Tensor:
    """The whole tensor of a name."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big")
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mode", [*slow("sync", "async"), "async_pinned", "async_process"])
def test_a_background_save_holds_the_state_of_its_step(mode: str, tmp_path: Path) -> None:
    """Parameters change while it is written, and again before the next one."""
    config = tiny(2, 1, layers=2, steps=6, checkpoint=Checkpoint(every=1, mode=mode))
    found = run_world(save_and_change, config, tmp_path)
    assert all(found)
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["step-00000001", "step-00000002", "step-00000003"]


def save_and_change(config: Config, worker: Worker) -> bool:
    run, checkpointer = opened(config, worker)
    slow_down_writing()
    for step in (1, 2, 3):
        for _, tensor in tensors(run):
            local(tensor).fill_(step)
        begin = time.monotonic()
        checkpointer.save(Progress(step=step))
        waited = time.monotonic() - begin
        if config.checkpoint.mode != "sync" and step == 1:
            assert waited < 0.25, "training waited for a write in the background"
        checkpointer.before_update()
        for _, tensor in tensors(run):
            local(tensor).fill_(-1)
    checkpointer.finish(Progress(step=3), done=True)
    checkpointer.close()
    for step in (1, 2, 3):
        path = Path(config.run_dir) / "checkpoints" / f"step-{step:08d}"
        here = replace(config, checkpoint=Checkpoint(resume=str(path)), run_dir="nowhere")
        other = Checkpointer(run.stage_states, here, open_data(here), Events(Path(), None))
        assert other.resume().step == step
        for key, tensor in tensors(run):
            assert (local(tensor) == step).all(), (step, key)
    close_mesh()
    return True


def slow_down_writing() -> None:
    fsync = os.fsync

    def slow(handle: int) -> None:
        time.sleep(0.05)  # some eight times a save
        fsync(handle)

    os.fsync = slow
