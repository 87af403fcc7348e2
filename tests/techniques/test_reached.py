"""A parameter that no rank reaches in a step is left alone, as torch's optimizers do in one
process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.cells import cells
from support.models import tiny
from support.proven import assert_proven
from support.records import numbers
from support.world import run_world
from titanlike.core.config.groups.computation import Fsdp, Precision
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.config.groups.optimization import ConstantLr
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.optimizers.adamw import AdamW
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.training.loop import train

DECAYING = {"optimizer": AdamW(lr=1e-2, weight_decay=1.0), "lr": ConstantLr(warmup=0)}
ONE = Schedule("gpipe", 1)  # one microbatch: blocks that count their calls count steps


def sparse(
    pp: int = 1, dp: int = 1, schedule: Any = "1f1b", model: dict | None = None, **more: Any
) -> Config:
    model = Custom("support.unreached.Net", model or {})
    return tiny(
        pp=pp, dp=dp, schedule=schedule, model=model, **({"batch_size": 8} | DECAYING | more)
    )


ALTERNATING = {"block": "Alternating"}
LAYOUTS = {
    "ZeRO 2": sparse(dp=2, fsdp=Fsdp(2), schedule=Schedule("1f1b", 2)),
    "a branch in every other step": sparse(1, 2, ONE, ALTERNATING),
}
MORE_LAYOUTS = {
    "one process, gradient accumulation": sparse(schedule=Schedule("1f1b", 4)),
    "HSDP, ZeRO 3, several microbatches": sparse(
        dp=4, replicate=2, fsdp=Fsdp(3), schedule=Schedule("1f1b", 2)
    ),
    "tied weights in a V": sparse(2, 2, "zbvzerobubble", {"shared": True}),
    "a pipeline in bf16, momentum": sparse(
        2,
        2,
        precision=Precision("bf16"),
        optimizer=Sgd(lr=0.1, momentum=0.9, weight_decay=0.1),
    ),
    "CPU offload": sparse(1, 2, fsdp=Fsdp(cpu_offload=True)),
    "a branch in every other step of a pipeline": sparse(2, 2, ONE, ALTERNATING, fsdp=Fsdp(1)),
}


@pytest.mark.parametrize("config", cells(LAYOUTS, MORE_LAYOUTS, most=1))
def test_parameters_without_gradients_are_not_updated(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path)


@pytest.mark.slow
def test_a_run_resumes_with_never_updated_parameters(tmp_path: Path) -> None:
    saving = {"checkpoint": Checkpoint(every=0, last=True)}
    run_world(train, sparse(2, 2, steps=4), tmp_path / "whole")
    run_world(train, sparse(1, 2, steps=2, **saving), tmp_path / "part")
    run_world(train, sparse(2, 2, steps=4, **saving), tmp_path / "part")
    for whole, part in zip(numbers(tmp_path / "whole"), numbers(tmp_path / "part"), strict=True):
        assert part == pytest.approx(whole, abs=1e-5)
