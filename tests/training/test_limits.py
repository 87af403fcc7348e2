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
from titanlike.checkpoint.checkpointer import Checkpointer
from titanlike.config.schema import Checkpoint, Config, Validation
from titanlike.launch.worker import Worker
from titanlike.metrics.sinks import read_jsonl
from titanlike.training.train import STOPPED_EARLY, train

SAVING = Checkpoint(every=0, last=True)


def test_max_tokens_completes_the_run_at_the_first_step_that_has_them(tmp_path: Path) -> None:
    config = tiny(max_tokens=3 * 16 * 16 - 5, checkpoint=SAVING)
    (result,) = run_world(train, config, tmp_path)
    assert "exit_code" not in result
    assert [step for step, *_ in numbers(tmp_path)] == [1, 2, 3]
    assert (tmp_path / "checkpoints" / "step-00000003" / "COMMITTED").exists()


def test_max_time_stops_a_run_that_resumes_with_the_same_metrics(tmp_path: Path) -> None:
    config = tiny(2, 1, checkpoint=SAVING, steps=4)
    run_world(train, config, tmp_path / "uninterrupted")
    results = run_world(train, replace(config, max_time=1e-3), tmp_path / "stopped")
    assert {(r["stopped"], r["exit_code"]) for r in results} == {("max_time", STOPPED_EARLY)}
    # all ranks know of it once the numbers of the first step are read: in the second one
    assert [step for step, *_ in numbers(tmp_path / "stopped")] == [1, 2]
    printed = (tmp_path / "stopped" / "rank0.out").read_text()
    assert re.search(r"^resume with: .* --config-path ", printed, re.MULTILINE)
    run_world(train, config, tmp_path / "stopped")
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "uninterrupted")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["validation", *slow("save")])
def test_a_signal_to_one_rank_stops_all_of_them(where: str, tmp_path: Path) -> None:
    """Also during a validation, which is aborted, and during a save."""
    validation = Validation(every=2, batches=4)
    config = tiny(2, 1, checkpoint=Checkpoint(every=2), validation=validation, steps=4)
    run_world(train, config, tmp_path / "uninterrupted")
    results = run_world(interrupted, config, tmp_path / "stopped", where)
    assert {(r["stopped"], r["exit_code"]) for r in results} == {("SIGUSR1", STOPPED_EARLY)}
    rows = read_jsonl(tmp_path / "stopped" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert ("val_loss" in rows[1]) == (where == "save")
    newest = max(path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir())
    assert newest == "step-00000002"
    run_world(train, config, tmp_path / "stopped")
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "uninterrupted")


def interrupted(config: Config, worker: Worker, where: str) -> dict:
    """Train; rank 1 gets SIGUSR1 in its first validation, at the second batch, or first save."""
    from titanlike.training import step

    signal.signal(signal.SIGUSR1, lambda signum, _: worker.stop_request.receive(signum))
    if worker.rank == 1 and where == "validation":
        batches = step.validation_batches

        def validation_batches(*args, **kwargs):
            for i, batch in enumerate(batches(*args, **kwargs)):
                if i == 1:
                    os.kill(os.getpid(), signal.SIGUSR1)
                yield batch

        step.validation_batches = validation_batches
    elif worker.rank == 1:
        save = Checkpointer.save

        def saved(self, *args, **kwargs):
            os.kill(os.getpid(), signal.SIGUSR1)
            return save(self, *args, **kwargs)

        Checkpointer.save = saved
    return train(config, worker)
