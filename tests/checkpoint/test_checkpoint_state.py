"""What a save plans and copies, and what a checkpoint holds where one would not think so."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.models import tiny
from support.records import numbers
from support.saved_runs import a_run, checkpoint, train_or_refuse
from support.saved_state import (
    checkpointer_of,
    copied,
    fill,
    going_on,
    local,
    opened,
    tensors,
    update,
)
from support.world import run_world
from titanlike.core.checkpoint import staging, writer
from titanlike.core.checkpoint.discovery import Progress, committed, select_resume
from titanlike.core.checkpoint.integrity import read_index
from titanlike.core.checkpoint.staging import Copy, HostMemory
from titanlike.core.checkpoint.state_dict import SHARED_STEP
from titanlike.core.checkpoint.storage import INDEX, Storage
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.config.groups.optimization import Ema
from titanlike.core.config.schema import Config
from titanlike.core.distributed.mesh import close_mesh, open_mesh
from titanlike.core.launch.torchrun import start_id
from titanlike.core.launch.worker import Worker
from titanlike.core.training.build import build
from titanlike.core.training.loop import train

PP2 = tiny(pp=2, layers=2, checkpoint=Checkpoint(keep=0))


def test_optimizer_state_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    """None where no parameter, or not this one, was updated (an expert that was not used); with a
    step count that parameters share unless theirs differs."""
    run_world(save_states, PP2, tmp_path)
    names = [read_index(Storage(checkpoint(tmp_path, step))).tensors.keys() for step in (1, 2, 3)]
    own = {name for name in names[2] if name.endswith(".step")} - {SHARED_STEP}
    assert SHARED_STEP in names[2] and SHARED_STEP not in names[0]
    assert all(
        any(part in name for name in own) for part in ("post_attention_layernorm", "lm_head.weight")
    )
    assert not any("model.layers.0.mlp.up_proj" in name for name in own)


def save_states(config: Config, worker: Worker) -> None:
    run = build(config, open_mesh(config, worker))
    checkpointer = checkpointer_of(run, config)

    def saved_and_loaded(step: int) -> dict[str, torch.Tensor]:
        before = copied(run)
        checkpointer.save(Progress(step=step))
        assert copied(run).keys() == before.keys(), "saving changed the optimizer"
        update(run)
        assert checkpointer.resume().step == step
        after = copied(run)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
        return after

    assert not any(name.endswith(".step") for name in saved_and_loaded(1))
    update(run, leave_out="post_attention_layernorm")
    found = saved_and_loaded(2)
    assert not any("post_attention_layernorm" in name and name.endswith(".step") for name in found)
    if worker.rank == 0:
        update(run)  # a rank may have gone further than the others
    found = saved_and_loaded(3)
    steps = {float(value) for name, value in found.items() if name.endswith(".step")}
    assert steps == ({1.0, 2.0} if worker.rank == 0 else {1.0})
    close_mesh()


def test_a_later_save_copies_what_this_rank_writes_and_errors_are_of_all_ranks(
    tmp_path: Path,
) -> None:
    config = tiny(dp=2, replicate=2, layers=2, checkpoint=Checkpoint(mode="async_pinned", keep=0))
    (first, *here), (also, *there) = run_world(save_replicas, config, tmp_path)
    files = read_index(Storage(checkpoint(tmp_path, 3))).files
    sizes = [size - header for size, (header, _) in files.values()]
    assert first == also and max(sizes) < 0.6 * first, "each has all, and writes a half"
    assert [here, there] == [[sizes[0]] * 2 + [first], [sizes[1]] * 2 + [first + 4]], "another key"


def save_replicas(config: Config, worker: Worker) -> list[int]:
    run, checkpointer = opened(config, worker)
    original, sizes = HostMemory.tensors_like, list[int]()

    def counted(self: HostMemory, sources: Mapping[Any, torch.Tensor]) -> Any:
        sizes.append(sum(tensor.nbytes for tensor in sources.values()))
        return original(self, sources)

    HostMemory.tensors_like = counted
    for step in (1, 2, 3, 4):
        if step == 4 and worker.rank:
            run.stage_states[0].stage.register_buffer("odd", torch.zeros(1))
        checkpointer.save(Progress(step=step))
        checkpointer.before_update()
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(OSError, match="division by zero; failure 2"),
    ):
        if worker.rank:
            patch.setattr(Copy, "finish", lambda _: 1 / 0)
        for step in (5, 6, 7):
            checkpointer.save(Progress(step=step))
    if worker.rank:
        run.stage_states[0].stage.register_buffer("odd", torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(ValueError, match="odd is of complex128, which safetensors cannot hold"):
        checkpointer_of(run, replace(config, checkpoint=Checkpoint(every=1)))
    return sizes[:4]


# --- saves in the background ----------------------------------------------------------------------


def test_a_background_save_holds_the_state_of_its_step(tmp_path: Path) -> None:
    """Training goes on before anything is committed, and changes what is saved."""
    run_world(save_and_change, tiny(layers=2), tmp_path)


def save_and_change(config: Config, worker: Worker) -> None:
    run, _ = opened(config, worker)
    fsync, may_commit = os.fsync, threading.Event()

    def held_up(handle: int) -> None:
        assert may_commit.wait(60), "training waits for a save in the background"
        fsync(handle)

    os.fsync = held_up
    for mode in ("async", "async_pinned"):
        checkpointer = checkpointer_of(run, going_on(config, worker.run_dir / mode, mode=mode))
        for step in (1, 2):
            fill(run, step)
            may_commit.clear()
            checkpointer.save(Progress(step=step))
            checkpointer.before_update()
            fill(run, -1)
            assert len(committed(checkpointer.folder)) == step - 1
            may_commit.set()
            checkpointer.finish(Progress(step=step), done=False)
        checkpointer.close()
        for step in (1, 2):
            resume = str(checkpoint(worker.run_dir / mode, step))
            here = going_on(config, worker.run_dir / "nowhere", resume=resume)
            assert checkpointer_of(run, here).resume().step == step
            for key, tensor, _ in tensors(run):
                assert (local(tensor) == step).all(), (mode, step, key)


def test_the_next_update_waits_for_the_checkpoint_copy(tmp_path: Path) -> None:
    """The checkpoint is that of a save without a copy, and so are the losses."""
    runs = [a_run(tmp_path / mode, steps=5, mode=mode) for mode in ("sync", "async_pinned")]
    assert run_world(train_with_late_copies, runs[0], tmp_path, runs) == [["", ""]]
    truth, found = (Path(config.run_dir) for config in runs)
    assert numbers(found) == numbers(truth)
    indexes = [json.loads((checkpoint(path, 3) / INDEX).read_text()) for path in (truth, found)]
    assert indexes[0]["pieces"] == indexes[1]["pieces"], "tensors of a later step were saved"


def train_with_late_copies(config: Config, worker: Worker, runs: list[Config]) -> list[str]:
    class Late(Copy):
        """Copies nothing before training is about to change it."""

        def before_update(self) -> None:
            reached.set()
            super().before_update()

        def finish(self) -> None:
            assert reached.wait(30), "training does not wait before it changes parameters"
            super().finish()

    reached = threading.Event()
    writer.Copy = Late
    return train_or_refuse(config, worker, runs)


def pinning_threads(config: Config, worker: Worker) -> list[str]:
    """The threads in which memory is pinned, and how often a save has enlarged it."""
    threads: list[str] = []
    staging.pin = lambda *_: bool(threads.append(threading.current_thread().name))
    train(config, worker)
    return threads


def test_memory_of_saves_is_pinned_while_training_goes_on(tmp_path: Path) -> None:
    settings = Checkpoint(mode="async_pinned", every=3)
    config = tiny(dp=2, layers=2, steps=6, checkpoint=settings, ema=Ema(0.9))
    assert run_world(pinning_threads, config, tmp_path) == [["pin memory"]] * 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_state_is_copied_before_the_update_that_changes_it(device: str) -> None:
    """A GPU copies it into pinned memory while the CPU goes on."""
    large = 2**28 if device == "cuda" else 2**10  # its copy takes longer than what follows it
    sources = {
        "late": torch.full((large,), 1.0, device=device),
        "early": torch.full((2**10,), 2.0, device=device),
        "cpu": torch.full((7,), 3.0),
    }
    memory = HostMemory()
    memory.tensors_like(sources)  # allocated and pinned before
    copy = Copy(sources, memory, lambda key: key == "late")
    sources["early"].fill_(-1)
    sources["cpu"].fill_(-1)

    def an_update() -> None:
        copy.before_update()
        sources["late"].fill_(-1)

    if device == "cuda":
        an_update()
        assert copy._gpu_copied is not None and not copy._gpu_copied.query(), "the CPU has waited"
        copy.finish()
        assert all(tensor.is_pinned() for tensor in copy.tensors.values())
    else:
        updating = threading.Thread(target=an_update, daemon=True)
        updating.start()
        updating.join(0.2)
        assert updating.is_alive(), "an update does not wait for the copy"
        copy.finish()
        updating.join(30)
    for name, value in (("late", 1.0), ("early", 2.0), ("cpu", 3.0)):
        assert (copy.tensors[name] == value).all(), name
    assert (sources["late"] == -1).all()
    memory.close()


# --- whose it is ----------------------------------------------------------------------------------


def test_restarted_ranks_agree_on_a_new_name_in_an_old_store() -> None:
    """torchrun's store keeps what earlier starts have written, and its counts may differ."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    with ThreadPoolExecutor(3) as pool:
        names = [
            set(pool.map(lambda rank: start_id(store, rank, 3, 10), range(3))) for _ in range(3)
        ]
    assert all(len(found) == 1 for found in names) and len(set().union(*names)) == 3


def test_a_checkpoint_folder_holds_one_run(tmp_path: Path) -> None:
    """Else the jobs of a sweep would go on with each other's."""
    config = tiny(layers=2, checkpoint=Checkpoint(folder=str(tmp_path / "shared")))
    run_world(save_one, config, tmp_path / "one")
    assert select_resume(replace(config, run_dir=str(tmp_path / "one"))).path is not None
    with pytest.raises(ValueError, match=f"checkpoints of the run in {tmp_path / 'one'}"):
        select_resume(replace(config, run_dir=str(tmp_path / "two")))


def save_one(config: Config, worker: Worker) -> None:
    opened(config, worker)[1].save(Progress(step=1))
