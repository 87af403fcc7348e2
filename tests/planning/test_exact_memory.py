"""`plan --exact`: a rank's memory is counted in its own step, without devices and other ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from support.cells import cells
from support.live_memory import measured
from support.memory_layouts import LAYOUTS, layout
from support.world import run_world
from titanlike.command.plan import main
from titanlike.config.groups import Schedule
from titanlike.config.schema import Config, Custom, Fsdp, Muon, Sgd, SyntheticData
from titanlike.planning import plan_search
from titanlike.planning.exact_memory import with_exact_memory
from titanlike.planning.known_hardware import shipped
from titanlike.planning.plan import make_plan
from titanlike.planning.plan_search import search, search_text
from titanlike.planning.plan_text import as_data, as_text

_1F1B = Schedule("1f1b", 8)
QUICK = {"1f1b, dp=2, ZeRO 3, bf16, selective": LAYOUTS["1f1b, dp=2, ZeRO 3, bf16, selective"]}
MORE = {  # besides those of test_memory_estimate.py
    "muon in a pipeline": layout(2, 2, _1F1B, optimizer=Muon()),
    "SGD": layout(2, 1, _1F1B, optimizer=Sgd()),
    "cp=2": layout(2, 1, _1F1B, cp=2),
}


@pytest.mark.parametrize("config", cells(QUICK, MORE))
def test_what_is_counted_is_what_real_ranks_take(config: Config, tmp_path: Path) -> None:
    every = run_world(measured, config, tmp_path)
    real = [each.peak for each in every[:: config.world_size // config.pp]]
    plan = with_exact_memory(make_plan(config, shipped("cpu")))
    assert plan.not_counted == ""
    # a message stays until its receiver has it, which is later in some runs than in others
    shares = [own / taken for own, taken in zip(plan.memory_bytes, real, strict=True)]
    assert all(0.95 < share < 1.02 for share in shares), shares


def test_a_job_of_many_ranks_needs_none_of_them() -> None:
    config = layout(4, 512, Schedule("1f1b", 4), batch_size=4 * 512)
    plan = with_exact_memory(make_plan(config, shipped("cpu")), [0, 3])
    assert set(plan.counted) == {0, 3} and not dist.is_initialized()
    assert as_data(plan)["memory_counted"] == [True, False, False, True]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"fsdp": Fsdp(cpu_offload=True), "dp": 2}, "on the host"),
        ({"model": Custom("moe", {"vocab_size": None}), "ep": 2, "dp": 2}, "experts receive"),
    ],
)
def test_what_cannot_be_counted_stays_estimated_with_the_reason(changes: dict, reason: str) -> None:
    config = replace(layout(1, 1, Schedule("1f1b", 2)), **changes)
    plan = make_plan(config, shipped("cpu"))
    counted = with_exact_memory(plan)
    assert counted.memory_bytes == plan.memory_bytes and reason in counted.not_counted
    assert reason in as_text(counted, width=200)


def test_the_command_counts_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--exact", "pp=2", "hardware=cpu"]) == 0
    exact = json.loads(capsys.readouterr().out)
    assert main(["--json", "pp=2", "hardware=cpu"]) == 0
    estimated = json.loads(capsys.readouterr().out)
    assert exact["memory_counted"] == [True, True] and estimated["memory_counted"] == [False, False]
    assert exact["memory_bytes"] != estimated["memory_bytes"]
    assert exact["memory_bytes"] == pytest.approx(estimated["memory_bytes"], rel=0.1)


def test_a_search_leaves_out_what_does_not_fit_when_it_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(layout(1, 2, Schedule("1f1b", 2)), hardware=shipped("h100_sxm"))
    config = replace(config, data=SyntheticData(vocab_size=4000))
    found = search(config, ["pp=1", "dp=2", "tp=1", "cp=1"], 2, most=2, exact=True)
    assert all(len(one.plan.counted) == 1 for one in found.ranked) and not found.too_large
    monkeypatch.setattr(
        plan_search, "with_exact_memory", lambda plan, _: replace(plan, counted={0: 1 << 40})
    )
    found = search(config, ["pp=1", "dp=2", "tp=1", "cp=1"], 2, most=2, exact=True)
    assert not found.ranked and found.too_large == 2
    assert "2 of the fastest left out" in search_text(found)
