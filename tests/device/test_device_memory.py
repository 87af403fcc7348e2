"""Memory that a run reports, and that its allocator takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from support.models import tiny
from support.stand_in_gpus import gpus
from support.world import run_world
from titanlike.core.config.schema import Config
from titanlike.core.device import accelerator, memory
from titanlike.core.device.memory import PeakMemory, count_anew, peak_memory, prepare_allocator
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.core.training.loop import train

GIB = 2**30


def peaks(config: Config, worker: Worker) -> tuple[int, int]:
    """With a large block of memory, and once it is gone and counted anew."""
    device = torch.device("cpu")
    larger = b"1" * GIB
    before = peak_memory(device).allocated
    del larger
    count_anew(device)
    return before, peak_memory(device).allocated


def test_a_jobs_peak_is_its_own_not_that_of_a_job_before_it_in_the_process(tmp_path: Path) -> None:
    """As of a sweep whose jobs share a process."""
    [(before, after)] = run_world(peaks, tiny(), tmp_path)
    assert before > GIB > after


def test_gpu_memory_of_an_earlier_job_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    gpus(monkeypatch, 1, module=type("Started", (), {"is_initialized": lambda self: True})())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 7)
    monkeypatch.setattr(memory.gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(
        torch.accelerator, "reset_peak_memory_stats", lambda device: calls.append("reset")
    )
    count_anew(torch.device("cuda", 0))
    assert calls == ["collect", "empty", "reset"]


class Cudart:
    """CUDA, whose last error is raised by torch after the next kernel."""

    error = 0

    def cudaHostRegister(self, *_: int) -> int:  # noqa: N802
        self.error = 1
        return self.error

    def kernel(self, *_: int, device: str) -> None:
        error, self.error = self.error, 0
        if error:
            raise RuntimeError("CUDA error: invalid argument")


def test_memory_that_cannot_be_pinned_fails_no_later_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "zeros", cudart.kernel)
    assert not accelerator.pin(0, 4096)
    assert not cudart.error


def train_as_on_gpus(config: Config, worker: Worker) -> None:
    from titanlike.core.training import step

    step.peak_memory = lambda device: PeakMemory(100 + worker.rank, 300 - worker.rank)
    train(config, worker)


def test_reserved_and_allocated_memory_are_both_reported(tmp_path: Path) -> None:
    run_world(train_as_on_gpus, tiny(dp=2, steps=1, layers=1), tmp_path)
    for record in read_jsonl(tmp_path / "metrics.jsonl"):  # of the fullest rank each
        assert (record["memory_bytes"], record["memory_reserved_bytes"]) == (101, 300)


@pytest.mark.parametrize(
    "device,users,cuda,called",
    [
        ("cuda", None, "13.0", True),
        ("cuda", "PYTORCH_ALLOC_CONF", "13.0", False),
        ("cuda", "PYTORCH_CUDA_ALLOC_CONF", "13.0", False),  # as it was named
        ("cuda", None, None, False),  # ROCm
        ("cpu", None, "13.0", False),
    ],
)
def test_cudas_segments_grow_unless_the_user_has_settings_of_their_own(
    device: str,
    users: str | None,
    cuda: str | None,
    called: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", seen.append)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for name in [name for name in os.environ if name.endswith("_ALLOC_CONF")]:
        monkeypatch.delenv(name)
    if users:
        monkeypatch.setenv(users, "max_split_size_mb:512")
    prepare_allocator(torch.device(device))
    assert seen == (["expandable_segments:True"] if called else [])
