"""Training goes on while its state is copied; the copy is that of the step all the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from support.saved_runs import a_run, checkpoint, events, numbers, train_all, train_each
from support.world import run_world
from titanlike.checkpoint import writer
from titanlike.checkpoint.host_memory import HostMemory
from titanlike.checkpoint.staging import Copy
from titanlike.config.schema import Config
from titanlike.launch.worker import Worker

SECONDS = 0.3


class SlowCopy(Copy):
    """Later than the forward of the next step."""

    def finish(self) -> None:
        time.sleep(SECONDS)
        super().finish()


def train_with_slow_copies(config: Config, worker: Worker) -> list[str]:
    writer.Copy = SlowCopy
    return train_each(config, worker, [config])


def test_an_optimizer_step_waits_for_the_copy_and_nothing_before_it(tmp_path: Path) -> None:
    truth = a_run(tmp_path / "truth")
    config = a_run(tmp_path / "run", mode="async_pinned")
    assert train_all(truth) == [""]
    assert run_world(train_with_slow_copies, config, tmp_path / "run") == [[""]]
    assert numbers(tmp_path / "run") == numbers(tmp_path / "truth")
    for step in (3, 6):
        sums = [
            (checkpoint(tmp_path / name, step) / "pieces.json").read_text()
            for name in ("truth", "run")
        ]
        assert sums[0] == sums[1], "the tensors of a later step were saved"
    saved = events(tmp_path / "run", "saved")
    assert all(SECONDS / 2 < event["stall_seconds"] < event["seconds"] for event in saved)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_copies_into_pinned_memory_while_the_cpu_goes_on() -> None:
    """Large enough that the copy takes longer than what follows it in Python."""
    device = torch.device("cuda", torch.cuda.current_device())
    sources = {
        "late": torch.full((2**28,), 1.0, device=device),
        "early": torch.full((2**20,), 2.0, device=device),
        "cpu": torch.full((7,), 3.0),
    }
    memory = HostMemory(shared=True)
    memory.tensors_like(sources)  # allocated and pinned before
    begin = time.perf_counter()
    copy = Copy(sources, memory, lambda key: key == "late")
    sources["early"].fill_(-1)
    sources["cpu"].fill_(-1)
    copy.before_update()
    sources["late"].fill_(-1)
    issued = time.perf_counter() - begin
    copy.finish()
    assert issued < time.perf_counter() - begin
    assert all(tensor.is_pinned() for tensor in copy.tensors.values())
    for name, value in (("late", 1.0), ("early", 2.0), ("cpu", 3.0)):
        assert (copy.tensors[name] == value).all(), name
    memory.close()
