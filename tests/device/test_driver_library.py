"""NVML, which lists GPUs without starting CUDA: a stand-in of the library in C, called as the real
one."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.stand_in_gpus import driver
from titanlike.core.device import nvml


@pytest.mark.parametrize(
    "visible,free",
    [
        (None, [70, 69, 68, 67]),
        ("2,0", [68, 70]),
        ("1,9,0", [69]),  # CUDA ends the list at what does not exist
        ("GPU-c", [68]),
        ("MIG-7", [63]),
        ("", []),
        ("-1", []),
    ],
)
def test_gpus_are_those_that_cuda_shows_to_the_process(
    visible: str | None, free: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver(monkeypatch, tmp_path, 4)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = nvml.visible_gpus()
    assert [gpu.free >> 30 for gpu in found] == free
    assert {gpu.name for gpu in found} <= {"NVIDIA H200"}
    assert all(gpu.total == 80 << 30 and gpu.capability == (9, 0) for gpu in found)


def test_no_driver_and_no_library_mean_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver(monkeypatch, tmp_path, -1)
    assert nvml.visible_gpus() == []
    monkeypatch.setattr(nvml, "_LIBRARY", str(tmp_path / "none.so"))
    assert nvml.visible_gpus() == []
