"""`hardware=measure`: this machine and a model's units are measured once, and kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.cells import GRID, slow
from support.models import tiny
from support.stand_in_gpus import driver, gpus
from titanlike.config.schema import Config, MeasuredHardware
from titanlike.device import accelerator
from titanlike.planning import known_hardware as measured
from titanlike.planning.estimate import make_estimate
from titanlike.planning.known_hardware import measured_hardware, measured_times, shipped
from titanlike.training.train_plan import make_plan


def test_measurements_are_cached_by_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The median of what the processes find; units by whether their weight gradients wait."""
    config = tiny(pp=2, layers=2, device="cpu", hardware=MeasuredHardware(folder=str(tmp_path)))
    units = len(make_plan(config).model_graph.units)
    asked: list[tuple[str, int]] = []

    def measure(config: Config, what: str, ranks: int) -> list[Any]:
        asked.append((what, ranks))
        if what == "measure_hardware":
            return [{"memory_bandwidth": bandwidth} for bandwidth in (1e9, 2e9, 9e9)]
        return [
            {name: [[unit, each * extra, 1.0] for unit in range(units)] for name, extra in waits}
            for each in (1.0, 2.0, 9.0)
        ]

    waits = [("together", 1.0), ("deferred", 10.0)]
    monkeypatch.setattr(measured, "_measure", measure)
    monkeypatch.setattr(measured, "available_cores", lambda: 8)
    for again in (False, False, True):
        changed = replace(config, hardware=replace(config.hardware, again=again))
        assert measured_hardware(changed, 2).memory_bandwidth == 2e9
    assert asked == [("measure_hardware", 2)] * 2, "the second time it is read"
    assert measured_hardware(config, 64).memory_bandwidth == 2e9 and asked[-1] == (
        "measure_hardware",
        8,
    )
    for deferred, backwards in (((), {2.0}), ((1,), {2.0, 20.0}), ((0, 1), {20.0})):
        found = measured_times(config, make_plan(config), deferred)
        assert [times[0] for times in found] == [*range(units)]
        assert {times[1] for times in found} == backwards
    assert asked.count(("measure_units", 2)) == 1


def test_efficiency_is_measured_on_a_known_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So MFU is a share of the data sheet's peak. Of another device the peak is what is reached."""
    device = torch.device("cpu")
    alone = measured.hardware_numbers(device, 0, 1)
    assert alone["matmul_efficiency"] == 1.0 and alone["fp8_flops"] == alone["bf16_flops"]
    monkeypatch.setattr(accelerator, "peak_flops", lambda *_: 1e15)
    known = measured.hardware_numbers(device, 0, 1)
    assert known["bf16_flops"] == 1e15 and "fp8_flops" not in known
    assert known["fp32_flops"] * known["matmul_efficiency"] < 1e15
    assert 0 < known["attention_efficiency"] <= 1


def test_an_h200_is_known_before_cuda_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver(monkeypatch, tmp_path, 1)
    gpus(monkeypatch, 1)
    monkeypatch.setattr(accelerator, "accelerator", lambda: "cuda")
    assert measured.likely_hardware(tiny(device="cuda")).name == "h200"


@pytest.mark.parametrize(
    "cp, method, tp", [*slow((2, "gather", 2)), *slow((2, "ulysses", 1), marks=GRID)]
)
def test_units_of_a_rank_with_a_part_of_each_sequence_are_measured(
    cp: int, method: str, tp: int, tmp_path: Path
) -> None:
    """In real processes, a core each."""
    hardware = MeasuredHardware(folder=str(tmp_path))
    config = tiny(pp=1, layers=1, batch_size=4, seq_len=16 * cp, hardware=hardware)
    plan = make_estimate(replace(config, cp=cp, context_parallel=method, tp=tp), shipped("cpu"))
    assert not plan.times.estimated and plan.step_seconds > 0
    assert len([*(tmp_path / "units").iterdir()]) == 1
