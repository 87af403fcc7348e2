"""The memory that is estimated for a rank is what its live storages take at the most: of real ranks,
and counted in a step of one that needs no devices and no other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import memory_layouts
from support.cells import GRID, cells, slow
from support.command_lines import examined
from support.counted_memory import counted_bytes
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
from titanlike.planning.estimate import make_estimate


def small(*mesh_and_schedule: Any, layers: int, **changes: Any) -> Config:
    model = Custom("llama", {**MODEL, "num_hidden_layers": layers})
    return layout(*mesh_and_schedule, model=model, **changes)


_1F1B = Schedule("1f1b", 8)
LAYOUTS = {
    "pp=2": small(2, 1, Schedule("1f1b", 4), layers=2),
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
    if config.ep == 1:  # how many tokens experts receive depends on values
        counted = [counted_bytes(config, rank) for rank in range(config.pp)]
        # a message stays until its receiver has it, which is later in some runs than in others
        shares = [own / taken for own, taken in zip(counted, real, strict=True)]
        assert all(0.95 < share < 1.02 for share in shares), shares


@pytest.mark.grid
def test_a_rank_takes_less_the_more_tensor_parallel_ranks_there_are(tmp_path: Path) -> None:
    """Parameters, state and activations are divided; norms and messages of exchanges are not."""
    names = ("1f1b, pp=1", "1f1b, pp=1 tp=2", "1f1b, pp=1 tp=4")
    one, two, four = (
        estimated_and_measured(memory_layouts.LAYOUTS[name], tmp_path / name)[1] for name in names
    )
    assert two < 0.56 * one and four < 0.33 * one


def test_estimated_memory_matches_a_counted_step_of_many_microbatches() -> None:
    """All are in flight at once."""
    config = small(2, 1, Schedule("gpipe", 16), layers=2)
    plan = make_plan(config)
    estimated = plan.memory().of_ranks(plan.recomputed.blocks)
    counted = [counted_bytes(config, rank) for rank in range(config.pp)]
    assert estimated == pytest.approx(counted, rel=0.1)


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
