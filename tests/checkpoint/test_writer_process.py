"""The process that writes: what goes wrong in it is told, and it never outlives its trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from support.cells import slow
from support.paths import ROOT
from support.saved_runs import a_run, events, numbers, train_all
from titanlike.checkpoint.host_memory import HostMemory
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.tensor_file import write_tensors
from titanlike.checkpoint.writer_process import AVAILABLE, WriterProcess
from titanlike.job import check

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs Linux")
TENSORS = {
    "a": torch.arange(1000.0),
    "b": torch.arange(7, dtype=torch.uint8),
    "c": torch.ones(3, 5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3.0),
}


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    memory = HostMemory(shared=True)
    yield memory
    memory.close()


@pytest.fixture
def writer(memory: HostMemory) -> Iterator[WriterProcess]:
    writer = WriterProcess(memory, timeout=60)
    writer.start()
    yield writer
    writer.close()


def shared(memory: HostMemory) -> list[torch.Tensor]:
    copies = memory.tensors_like(TENSORS)
    for name, tensor in TENSORS.items():
        copies[name].copy_(tensor)
    return list(copies.values())


def test_it_writes_what_the_trainer_would_and_survives_errors_and_signals(
    memory: HostMemory, writer: WriterProcess, tmp_path: Path
) -> None:
    folder = Storage(tmp_path)
    expected = write_tensors(folder, "here", TENSORS.values())
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(writer.pid, one)  # what ends a run asks its trainer alone
    for _ in range(2):
        found = writer.write(folder, "there", shared(memory))
        assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
        assert (found.size, found.ends, found.sums) == (
            expected.size,
            expected.ends,
            expected.sums,
        )
        with pytest.raises(FileNotFoundError, match="absent"):
            writer.write(folder.at("absent"), "there", shared(memory))
    pid = writer.pid
    writer.start()
    assert writer.pid == pid, "it runs already"
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(OSError, match=r"the process that writes .*there has died \(-9\)"):
        writer.write(folder, "there", shared(memory))
    writer.start()
    assert writer.write(folder, "there", shared(memory)).sums == expected.sums
    writer.close()
    assert not psutil.pid_exists(writer.pid)


def test_one_that_does_not_answer_fails_the_save_in_time(
    memory: HostMemory, tmp_path: Path
) -> None:
    writer = WriterProcess(memory, timeout=0.5)
    writer.start()
    os.kill(writer.pid, signal.SIGSTOP)
    with pytest.raises(OSError, match=r"there was not written in 0.5 s"):
        writer.write(Storage(tmp_path), "there", shared(memory))
    assert not psutil.pid_exists(writer.pid)


TRAINER = """
import sys, time
from titanlike.checkpoint.host_memory import HostMemory
from titanlike.checkpoint.writer_process import WriterProcess
writer = WriterProcess(HostMemory(shared=True), 60)
writer.start()
print(writer.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [*slow("idle"), "stuck"])
def test_it_is_gone_when_its_trainer_is_killed(how: str) -> None:
    """Also while it is held up in a write, where it does not see the end of its socket."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", TRAINER]
    trainer = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
    writer = psutil.Process(int(trainer.stdout.readline()))
    while "torch" not in "".join(one.path for one in writer.memory_maps()):  # it has begun
        time.sleep(0.05)
    if how == "stuck":
        writer.suspend()
    trainer.kill()
    trainer.wait(10)
    gone, left = psutil.wait_procs([writer], timeout=10)
    assert gone and not left


@pytest.mark.slow
def test_a_run_that_a_process_saves_is_the_run_that_saves_itself(tmp_path: Path) -> None:
    truth = a_run(tmp_path / "truth")
    config = a_run(tmp_path / "run", mode="async_process")
    assert train_all(truth) == [""]
    assert train_all(config) == [""]
    assert numbers(tmp_path / "run") == numbers(tmp_path / "truth")
    assert [event["step"] for event in events(tmp_path / "run", "saved")] == [3, 6]
    for step in (3, 6):
        files = [
            (tmp_path / name / "checkpoints" / f"step-{step:08d}" / "pieces.json").read_text()
            for name in ("truth", "run")
        ]
        assert files[0] == files[1]


def test_a_folder_that_another_process_does_not_see_is_refused(tmp_path: Path) -> None:
    config = a_run(tmp_path / "run", mode="async_process", folder="memory://a")
    [problem] = check.problems(config)
    assert str(problem).startswith("checkpoint.mode=async_process: ")
    assert "async_pinned" in str(problem) and "\n" not in str(problem)
