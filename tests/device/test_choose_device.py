"""A GPU is never silently left unused, and never used by two ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from support.models import tiny
from support.stand_in_gpus import driver, gpus
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.computation import FitActivationCheckpoint
from titanlike.core.config.groups.jobs import Launch
from titanlike.core.config.schema import Config
from titanlike.core.device import accelerator
from titanlike.core.device.accelerator import own_backend
from titanlike.core.device.choose import choose_device, claim_device, first_device, start_device
from titanlike.core.device.memory import total_memory
from titanlike.core.training.preflight import preflight

Patch = pytest.MonkeyPatch


def asks(device: str, each: int = 1) -> Config:
    """each: ranks that may share a GPU."""
    return Config(device=device, launch=Launch(ranks_per_device=each))


@pytest.mark.parametrize("kind,backend", [("cuda", "nccl"), ("xpu", "xccl")])
def test_each_rank_of_a_machine_has_the_gpu_of_its_number(
    kind: str, backend: str, monkeypatch: Patch
) -> None:
    gpus(monkeypatch, 8, kind)
    assert choose_device(asks("auto"), 3, 8) == (torch.device(kind, 3), "8 GPUs found")
    assert choose_device(asks(kind), 0, 2) == (torch.device(kind, 0), "asked for")
    assert choose_device(asks("cpu"), 3, 8) == (torch.device("cpu"), "asked for")
    assert own_backend(torch.device(kind)) == backend


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_fewer_gpus_than_ranks_are_an_error_unless_each_rank_has_one_visible(
    wanted: str, monkeypatch: Patch
) -> None:
    """As srun --gpus-per-task=1 shows each of 8 ranks its own, which all are number 0."""
    gpus(monkeypatch, 1)
    device, why = choose_device(asks(wanted), 5, 8)
    assert device == torch.device("cuda", 0) and why == "the one GPU that this rank sees"
    gpus(monkeypatch, 2)
    with pytest.raises(ConfigError) as raised:
        choose_device(asks(wanted), 0, 4)
    assert str(raised.value) == (
        f"device={wanted}: 2 GPUs for 4 ranks on this machine; write launch.ranks_per_device=2 to "
        "check a layout, slowly, device=cpu to train on the CPU, or start at most 2 ranks on this "
        "machine"
    )
    assert choose_device(asks(wanted, 2), 3, 4)[0] == torch.device("cuda", 1), "the fix works"


def test_one_gpu_for_the_ranks_that_this_command_starts_is_an_error_before_they_start(
    monkeypatch: Patch,
) -> None:
    gpus(monkeypatch, 1)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (problem,) = preflight(tiny(2, 1, layers=2, device="auto"))
    assert problem.key == "device" and "1 GPU for 2 ranks" in problem.reason
    assert "device=cpu" in problem.fix and "at most 1 rank" in problem.fix
    assert problem.fix.startswith("launch.ranks_per_device=2 ")
    shared = Launch(ranks_per_device=2)
    assert not preflight(tiny(2, 1, layers=2, device="auto", launch=shared))
    assert not preflight(tiny(2, 1, layers=2, device="cpu"))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # started by srun: each may see another one
        monkeypatch.setenv(name, "2")
    assert not preflight(tiny(2, 1, layers=2, device="auto"))


def test_without_a_gpu_auto_is_the_cpu_and_a_gpu_that_is_asked_for_an_error(
    monkeypatch: Patch,
) -> None:
    gpus(monkeypatch, 0)
    assert choose_device(asks("auto"), 0, 4) == (torch.device("cpu"), "no GPU found")
    with pytest.raises(ConfigError, match="device=cuda: no GPU is visible .*write device=auto"):
        choose_device(asks("cuda"), 0, 1)
    with pytest.raises(
        ConfigError, match="device=xpu: torch .* is built for cuda; write device=auto"
    ):
        choose_device(asks("xpu"), 0, 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: None)
    with pytest.raises(ConfigError, match="is built for no accelerator"):
        choose_device(asks("cuda"), 0, 1)


@pytest.mark.parametrize("built", [True, False])
def test_gpus_that_this_torch_cannot_use_are_an_error(
    built: bool, monkeypatch: Patch, tmp_path: Path
) -> None:
    """A torch for CPUs on a GPU node, or one that is too new for the node's driver."""
    driver(monkeypatch, tmp_path, 8)
    if built:
        gpus(monkeypatch, 0)
    else:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: None)
    why = "whose CUDA needs another driver" if built else "which is built without CUDA"
    with pytest.raises(ConfigError, match=f"8 GPUs on this machine cannot be used .*{why}"):
        choose_device(asks("auto"), 0, 1)
    assert choose_device(asks("cpu"), 0, 1)[0].type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user hides them
    assert choose_device(asks("auto"), 0, 1)[0].type == "cpu"


def test_an_accelerator_without_a_backend_of_its_own_is_not_chosen(monkeypatch: Patch) -> None:
    """MPS: gloo does not reach its tensors."""
    gpus(monkeypatch, 1, "mps")
    assert choose_device(asks("auto"), 0, 1)[0] == first_device("auto") == torch.device("cpu")


def test_two_ranks_with_the_same_gpu_are_named(monkeypatch: Patch) -> None:
    gpu = torch.device("cuda", 0)

    def claimed(uuids: str, each: int = 1) -> list[str]:
        store, said = HashStore(), []
        for rank, uuid in enumerate(uuids):
            properties = SimpleNamespace(uuid=uuid)
            module = SimpleNamespace(
                get_device_properties=lambda device, found=properties: found,
                get_device_name=lambda device: "NVIDIA H100 80GB HBM3",
            )
            monkeypatch.setattr(torch, "get_device_module", lambda *_, found=module: found)
            try:
                for _ in range(2):  # again: it is its own
                    claim_device(asks("auto", each), gpu, rank, len(uuids), store)
                said.append("")
            except ConfigError as error:
                said.append(str(error))
        return said

    assert claimed("ab") == ["", ""]
    *fine, error = claimed("aba")
    assert fine == ["", ""]
    assert error.startswith(
        "device=auto: ranks 0 and 2 have the same GPU, NVIDIA H100 80GB HBM3 a;"
    )
    assert "srun --gpus-per-task=1" in error and "device=cpu" in error
    assert "launch.ranks_per_device=3 to check a layout" in error
    assert claimed("abaa", 3) == claimed("aabb", 2) == claimed("abab", 2) == [""] * 4, "may share"
    *fine, error = claimed("aaba", 2)
    assert not any(fine) and "ranks 0, 1 and 3 have the same GPU" in error


def test_a_gpu_that_does_not_start_is_named_with_the_drivers_reason(monkeypatch: Patch) -> None:
    def busy(index: int) -> None:
        raise RuntimeError(
            "CUDA error: all CUDA-capable devices are busy\nCUDA kernel errors might"
        )

    monkeypatch.setattr(torch.accelerator, "set_device_index", busy)
    with pytest.raises(ConfigError) as raised:
        start_device("auto", torch.device("cuda", 3))
    assert str(raised.value) == (
        "device=auto: cuda:3 cannot be started: CUDA error: all CUDA-capable devices are busy; "
        "write device=cpu to train on the CPU"
    )


class NotStarted:
    """In place of torch.cuda: only what does not initialize CUDA."""

    def is_initialized(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"torch.cuda.{name} initializes CUDA")


def test_the_checks_before_a_start_do_not_initialize_cuda(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    gpus(monkeypatch, 2, module=NotStarted())
    driver(monkeypatch, tmp_path, 2)
    for name in ("set_device_index", "get_memory_info", "memory_stats", "synchronize"):
        monkeypatch.setattr(torch.accelerator, name, NotStarted().__getattr__)
    decided = []
    config = tiny(2, device="auto", activation_checkpoint=FitActivationCheckpoint())
    assert not preflight(config, decided.append) and decided
    assert total_memory(torch.device("cuda", 0), 2) == 80 << 30  # as NVML says
    assert accelerator.multiplies_float8(torch.device("cuda", 0))
