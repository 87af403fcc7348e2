"""A disk that is full while a run saves: told at once, nothing lost, no leftovers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.records import numbers
from support.saved_runs import a_run, checkpoint, events, train_all, train_or_refuse
from support.world import run_world
from titanlike.core.checkpoint.checkpointer import Checkpointer
from titanlike.core.checkpoint.discovery import Progress
from titanlike.core.checkpoint.integrity import check_all
from titanlike.core.checkpoint.storage import Storage
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.training import session

SIZE = 3 * 2**20  # bytes of the disk: room for the three checkpoints of a run


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True).returncode != 0:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)


def train_on_a_disk_that_fills(
    config: Config, worker: Worker, disk: str, full_at: list[int]
) -> list[str]:
    """Train, with the disk full while the checkpoints of these steps are written."""
    filler = Path(disk) / "filler"

    class Fills(Checkpointer):
        begun = 0

        def save(self, progress: Progress, val_loss: float | None = None) -> float:
            if worker.rank == 0:
                self.wait_for_those_in_the_background()
                filler.unlink(missing_ok=True)
                if progress.step in full_at:
                    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                        while True:
                            file.write(bytes(2**14))
            self.begun += 1
            return super().save(progress, val_loss)

        def wait_for_those_in_the_background(self) -> None:
            deadline = time.monotonic() + 20
            while self.begun > sum(
                len(events(worker.run_dir, kind)) for kind in ("saved", "save_failed")
            ):
                assert time.monotonic() < deadline, "a save is not told of before the next one"
                time.sleep(0.01)
                self.poll()

    session.Checkpointer = Fills
    return train_or_refuse(config, worker, [config])


def test_a_failed_save_is_reported_and_training_continues_unless_it_is_the_last(
    disk: Path, tmp_path: Path
) -> None:
    """Or the user would believe that the run is kept. A save that succeeds in between makes good
    the failure before it."""
    run_dir, saved = tmp_path / "run", disk / "saved"
    config = a_run(run_dir, steps=9, last=True, mode="async", folder=str(saved))
    [[error]] = run_world(train_on_a_disk_that_fills, config, run_dir, str(disk), [3, 9])
    assert "step-00000009" in error and "No space left on device" in error
    assert "in a row" not in error
    told = events(run_dir, "save_failed")
    assert [event["step"] for event in told] == [3, 9]
    assert [event["step"] for event in events(run_dir, "saved")] == [6]
    output = (run_dir / "rank0.out").read_text()
    for event in told:
        assert str(saved / f"step-{event['step']:08d}") in event["text"]
        assert "No space left on device" in event["text"] and " free): " in event["text"]
        assert event["text"] in output
    assert os.listdir(saved) == ["step-00000006"]
    check_all(Storage(saved / "step-00000006"))
    assert [step for step, *_ in numbers(run_dir)] == list(range(1, 10))


@pytest.mark.slow
def test_two_failed_saves_in_a_row_end_the_run_and_it_can_resume(
    disk: Path, tmp_path: Path
) -> None:
    truth = a_run(tmp_path / "truth", steps=10)
    saving = replace(truth.checkpoint, folder=str(disk / "saved"))
    run_dir = tmp_path / "run"
    config = replace(truth, run_dir=str(run_dir), checkpoint=saving)
    [[error]] = run_world(train_on_a_disk_that_fills, config, run_dir, str(disk), [6, 9])
    assert error.startswith("OSError") and "failure 2 in a row" in error and "\n" not in error
    assert "step-00000009" in error and "No space left on device" in error
    assert [event["step"] for event in events(run_dir, "save_failed")] == [6, 9]
    assert os.listdir(disk / "saved") == ["step-00000003"]
    check_all(Storage(disk / "saved" / "step-00000003"))

    (disk / "filler").unlink()
    assert train_all(config, truth) == ["", ""]
    assert [event["step"] for event in events(run_dir, "resume")] == [3]
    assert numbers(run_dir) == numbers(Path(truth.run_dir))


def test_a_file_size_limit_is_a_failed_save(tmp_path: Path) -> None:
    """A quota, for one; without a file system of its own."""
    config = a_run(tmp_path / "run", steps=7)
    [[error]] = run_world(train_with_a_limit, config, tmp_path / "run")
    assert "could not be written" in error and "File too large" in error
    assert [e["step"] for e in events(tmp_path / "run", "save_failed")] == [3, 6]
    assert os.listdir(checkpoint(tmp_path / "run", 3).parent) == []


def train_with_a_limit(config: Config, worker: Worker) -> list[str]:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, 2**15))
    return train_or_refuse(config, worker, [config])
