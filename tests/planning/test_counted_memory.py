"""The memory that is estimated for a rank, and that `plan --exact` counts in its own step, without
devices and other ranks, is what its live storages take at the most."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from support import memory_layouts
from support.cells import GRID, cells, slow
from support.command_lines import examined
from support.live_memory import measured
from support.memory_layouts import MODEL, estimated_and_measured, layout
from support.world import run_world
from titanlike.core.config.groups.computation import (
    FitActivationCheckpoint,
    Fsdp,
    Precision,
    SelectiveActivationCheckpoint,
)
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.optimizer import ParameterGroup
from titanlike.core.config.optimizers.adamw import AdamW
from titanlike.core.config.optimizers.muon import Muon
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.training.train_plan import make_plan
from titanlike.planning.counted_memory import with_exact_memory
from titanlike.planning.estimate import make_estimate
from titanlike.planning.estimate_text import as_data, as_text
from titanlike.planning.known_hardware import shipped
from titanlike.run.tools import plan as main


def small(*mesh_and_schedule: Any, layers: int, **changes: Any) -> Config:
    model = Custom("llama", {**MODEL, "num_hidden_layers": layers})
    return layout(*mesh_and_schedule, model=model, **changes)


_1F1B = Schedule("1f1b", 8)
LAYOUTS = {
    "pp=2": small(2, 1, Schedule("1f1b", 4), layers=2),
    "partial sums": memory_layouts.LAYOUTS["1f1b, pp=1, exact"],
}
MORE_LAYOUTS = {
    "dp=2, ZeRO 3, bf16, selective": small(
        1,
        2,
        Schedule("1f1b", 2),
        layers=2,
        fsdp=Fsdp(3),
        precision=Precision("bf16"),
        activation_checkpoint=SelectiveActivationCheckpoint(),
    ),
    "muon in a pipeline": layout(2, 2, _1F1B, optimizer=Muon()),
    "SGD": layout(2, 1, _1F1B, optimizer=Sgd()),
    "a group of SGD": layout(
        2, 1, _1F1B, optimizer=AdamW(groups={"*mlp*": ParameterGroup(optimizer="sgd")})
    ),
    "cp=2": layout(2, 1, _1F1B, cp=2),
    **memory_layouts.LAYOUTS,
}
del MORE_LAYOUTS["1f1b, pp=1, exact"]
LAST_LAYOUTS = {
    name: MORE_LAYOUTS.pop(name)
    for name in ("1f1b, pp=1 dp=2, ZeRO 3", "1f1b, pp=1 tp=2, large logits")
}


@pytest.mark.parametrize("config", cells(LAYOUTS, MORE_LAYOUTS, LAST_LAYOUTS))
def test_estimated_and_counted_memory_match_real_ranks(config: Config, tmp_path: Path) -> None:
    every = run_world(measured, config, tmp_path)
    size = config.world_size // config.pp  # of a stage's ranks, whose experts receive more or fewer
    real = [max(one.peak for one in every[at : at + size]) for at in range(0, len(every), size)]
    plan = make_plan(config)
    estimated = plan.memory().of_ranks(plan.recomputed.blocks)
    assert 0.95 < max(estimated) / max(real) < 1.05, [estimated, real]
    how = config.activation_checkpoint
    if isinstance(how, FitActivationCheckpoint):
        assert max(estimated) <= how.memory and max(real) < 1.05 * how.memory
    plan = with_exact_memory(make_estimate(config, shipped("cpu")))
    if config.ep > 1:
        assert plan.not_counted
        return
    assert plan.not_counted == ""
    # a message stays until its receiver has it, which is later in some runs than in others
    shares = [own / taken for own, taken in zip(plan.memory_bytes, real, strict=True)]
    assert all(0.95 < share < 1.02 for share in shares), shares


@pytest.mark.slow
@pytest.mark.grid
def test_a_rank_takes_less_the_more_tensor_parallel_ranks_there_are(tmp_path: Path) -> None:
    """Parameters, their state and activations are divided; norms and messages of exchanges are
    not."""
    names = ("1f1b, pp=1", "1f1b, pp=1 tp=2", "1f1b, pp=1 tp=4")
    one, two, four = (
        estimated_and_measured(memory_layouts.LAYOUTS[name], tmp_path / name)[1] for name in names
    )
    assert two < 0.56 * one and four < 0.33 * one


def test_memory_of_a_large_job_is_counted_in_one_process() -> None:
    """Nor all microbatches, but where memory grows with them."""
    config = small(2, 512, Schedule("1f1b", 4), batch_size=4 * 512, layers=2)
    plan = with_exact_memory(make_estimate(config, shipped("cpu")), [0, 1])
    assert set(plan.counted) == {0, 1} and not dist.is_initialized()
    assert as_data(plan)["memory_counted"] == [True, True]
    assert plan.counted[0] > plan.counted[1]
    several = small(2, 1, Schedule("gpipe", 16), layers=2)
    plan = make_estimate(several, shipped("cpu"))
    counted = with_exact_memory(plan, [0]).counted
    assert counted[0] == pytest.approx(plan.memory_bytes[0], rel=0.1)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"fsdp": Fsdp(cpu_offload=True), "dp": 2}, "on the host"),
        ({"model": Custom("moe", {"vocab_size": None}), "ep": 2, "dp": 2}, "experts receive"),
    ],
)
def test_memory_that_cannot_be_counted_is_estimated_with_a_reason(
    changes: dict, reason: str
) -> None:
    config = replace(layout(1, 1, Schedule("1f1b", 2)), **changes)
    plan = make_estimate(config, shipped("cpu"))
    counted = with_exact_memory(plan)
    assert counted.memory_bytes == plan.memory_bytes and reason in counted.not_counted
    assert reason in as_text(counted, width=200)


def test_the_command_counts_on_demand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "--json pp=2 dp=2 hardware=cpu model.num_hidden_layers=2 data=synthetic schedule.microbatches=2"
    found = []
    for flags in ([], ["--exact"]):
        assert main([*words.split(), *flags]) == 0
        found.append(json.loads(capsys.readouterr().out))
    estimated, exact = found
    assert exact["memory_counted"] == [True, True] and estimated["memory_counted"] == [False, False]
    assert exact["memory_bytes"] != estimated["memory_bytes"]
    assert exact["memory_bytes"] == pytest.approx(estimated["memory_bytes"], rel=0.1)


@pytest.mark.parametrize(
    "words",
    [
        *slow("experiment=llama3_70b", "experiment=llama3_8b pp=1 dp=8", "experiment=llama3_405b"),
        *slow("experiment=gpt2_124m", marks=GRID),
    ],
)
def test_a_shipped_experiment_fits_on_the_gpus_that_it_is_for(words: str) -> None:
    limit = 73 << 30  # bytes: an 80 GB GPU less 8%
    memory = [] if "gpt2" in words else [f"activation_checkpoint.memory={limit}"]
    checked = examined(*words.split(), *memory, "data=synthetic", "device=cpu")
    assert checked.config is not None and not checked.problems
    plan = make_plan(checked.config)
    assert max(plan.recomputed.memory, default=0) <= limit
    assert make_estimate(checked.config, plan=plan).fullest <= limit
