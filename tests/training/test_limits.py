"""max_tokens, max_time and signals end a run after a step, on all ranks, with a checkpoint."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from support.cells import slow
from support.models import tiny
from support.records import numbers
from support.world import run_world
from titanlike.core.checkpoint.checkpointer import Checkpointer
from titanlike.core.config.groups.jobs import Checkpoint, Validation
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.core.training import loop, step
from titanlike.core.training.loop import STOPPED_EARLY, train

SAVING = Checkpoint(every=0, last=True)
DROPOUT = Custom("support.data.Dropping", {"dim": 32, "layers": 4, "vocab_size": None})


def test_max_tokens_completes_the_run_at_the_first_step_that_has_them(tmp_path: Path) -> None:
    """As the first lines say, and the last how to train on."""
    config = tiny(layers=1, steps=40, max_tokens=3 * 16 * 16 - 5, checkpoint=SAVING)
    (result,) = run_world(train, config, tmp_path)
    assert "exit_code" not in result
    assert [step for step, *_ in numbers(tmp_path)] == [1, 2, 3]
    assert (tmp_path / "checkpoints" / "step-00000003" / "COMMITTED").exists()
    printed = (tmp_path / "rank0.out").read_text()
    assert re.search(r"steps +1 to 3$", printed, re.MULTILINE), printed
    assert re.search(r"^continue with: .* max_tokens=1536$", printed, re.MULTILINE)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, list]:
    """A pipeline with dropout, and its metrics."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    validation = Validation(every=2, batches=4)
    config = tiny(pp=2, model=DROPOUT, checkpoint=SAVING, steps=4, validation=validation)
    run_world(train, config, folder)
    return config, numbers(folder)


def test_max_time_stops_a_run_that_resumes_with_the_same_metrics(
    uninterrupted: tuple[Config, list], tmp_path: Path
) -> None:
    """Also the learning rate and the masks of dropout go on where they were."""
    config, whole = uninterrupted
    results = run_world(train, replace(config, max_time=1e-3), tmp_path)
    assert {(r["stopped"], r["exit_code"]) for r in results} == {("max_time", STOPPED_EARLY)}
    # all ranks know of it once the numbers of the first step are read: in the second one
    assert numbers(tmp_path) == whole[:2]
    printed = (tmp_path / "rank0.out").read_text()
    assert re.search(r"^resume with: .* --config-path ", printed, re.MULTILINE)
    run_world(train, config, tmp_path)
    assert numbers(tmp_path) == whole


@pytest.mark.parametrize("where", ["step", "validation", *slow("save")])
def test_a_signal_to_one_rank_stops_all_of_them(
    where: str, uninterrupted: tuple[Config, list], tmp_path: Path
) -> None:
    """After the next step; also during a validation, which is aborted, and during a save."""
    config, whole = uninterrupted
    config = replace(config, checkpoint=Checkpoint(every=2 if where == "save" else 0, last=True))
    if where == "step":  # not in a validation, which ranks ask by themselves
        config = replace(config, validation=Validation(every=0))
    results = run_world(interrupted, config, tmp_path, where)
    assert {(r["stopped"], r["exit_code"]) for r in results} == {("SIGUSR1", STOPPED_EARLY)}
    assert numbers(tmp_path) == whole[:2]
    validated = [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl") if "val_loss" in row]
    assert validated == ([2] if where == "save" else [])
    newest = max(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert newest == "step-00000002"


def interrupted(config: Config, worker: Worker, where: str) -> dict:
    """Train; rank 1 gets SIGUSR1 in its first step, in its first validation, at the second batch,
    or in its first save."""
    signal.signal(signal.SIGUSR1, lambda signum, _: worker.stop_request.receive(signum))

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    take, save, forward_backward = step.validation_batches, Checkpointer.save, loop.forward_backward

    def validation_batches(*args, **kwargs):
        for number, batch in enumerate(take(*args, **kwargs)):
            if number == 1:
                kill()
            yield batch

    def saved(self, *args, **kwargs):
        kill()
        return save(self, *args, **kwargs)

    def first_step(run, config, at, stream):
        if at == 1:
            kill()
        return forward_backward(run, config, at, stream)

    if worker.rank == 1 and where == "validation":
        step.validation_batches = validation_batches
    elif worker.rank == 1 and where == "save":
        Checkpointer.save = saved
    elif worker.rank == 1:
        loop.forward_backward = first_step
    return train(config, worker)
