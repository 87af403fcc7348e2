"""The process that writes: what goes wrong in it is told, and it never outlives its trainer."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from support.world import fork_context
from titanlike.checkpoint.staging import HostMemory, WriterProcess, write_tensors
from titanlike.checkpoint.storage import Storage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
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


def test_the_writer_process_writes_the_same_checkpoint_and_survives_errors_and_signals(
    memory: HostMemory, writer: WriterProcess, tmp_path: Path
) -> None:
    folder = Storage(tmp_path)
    expected = write_tensors(folder, "here", TENSORS.values())
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(writer.pid, one)  # what ends a run asks its trainer alone
    for _ in range(2):
        found = writer.write(folder, "there", shared(memory))
        assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
        assert replace(found, name="here") == expected
        with pytest.raises(OSError, match="No such file.*absent"):
            writer.write(folder.at("absent"), "there", shared(memory))
    process = writer._process
    writer.start()
    assert writer._process is process, "it runs already"
    writer.close()
    assert process.returncode == 0, "it ends by itself with its trainer's socket"


def test_a_dead_or_hung_writer_process_fails_the_save_and_is_replaced(
    memory: HostMemory, tmp_path: Path
) -> None:
    writer = WriterProcess(memory, timeout=0.5)
    says = {signal.SIGKILL: r"has died \(-9\)", signal.SIGSTOP: r"was not written in 0.5 s"}
    pids = set()
    for one, reason in says.items():
        writer.start()
        os.kill(writer.pid, one)
        with pytest.raises(OSError, match=f"there {reason}"):
            writer.write(Storage(tmp_path), "there", shared(memory))
        assert not psutil.pid_exists(writer.pid)
        pids.add(writer.pid)
    assert len(pids) == 2


def train_and_wait(connection: Any) -> None:
    writer = WriterProcess(HostMemory(shared=True), 60)
    writer.start()
    connection.send(writer.pid)
    time.sleep(60)


def test_the_writer_process_ends_when_its_trainer_is_killed() -> None:
    """Also while it is held up in a write, where it does not see the end of its socket."""
    ours, theirs = fork_context().Pipe()
    trainer = fork_context().Process(target=train_and_wait, args=(theirs,), daemon=True)
    trainer.start()
    writer = psutil.Process(ours.recv())
    while "torch" not in "".join(one.path for one in writer.memory_maps()):  # it has begun
        time.sleep(0.05)
    writer.suspend()
    trainer.kill()
    trainer.join(10)
    gone, left = psutil.wait_procs([writer], timeout=10)
    for one in left:
        one.kill()
    assert gone and not left
