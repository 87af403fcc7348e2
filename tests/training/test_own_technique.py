"""A technique of a stranger: what it needs of a run is told to its `Transform`, and verify proves it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from support.cells import cells
from support.models import tiny
from support.world import run_world
from titanlike.core.config.groups.computation import ActivationCheckpoint, Fsdp, Numerics, Precision
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.schema import Config
from titanlike.core.data.registry import open_data
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.distributed.transform import Plan, Transform
from titanlike.core.launch.worker import Worker
from titanlike.core.training import build
from titanlike.core.training.transforms import stage_transforms
from titanlike.proof import reference
from titanlike.proof.exact import first_difference
from titanlike.proof.verification import compare_with_one_process


class LayerDrop(Transform):
    """Skips a block in training; which one depends on the step, the microbatch and the block."""

    by_microbatch = True
    step = 0

    def __init__(self, blocks: Sequence[str]) -> None:
        self._blocks, self._microbatch = {*blocks}, dict[int, int]()

    def begin_step(self, step: int) -> None:
        self.step = step

    def begin_microbatch(self, stage: int, microbatch: int) -> None:
        self._microbatch[stage] = microbatch

    def on_stage(self, index: int, stage: nn.Module, units: Sequence[str]) -> None:
        for name in self._blocks.intersection(units):
            self._wrap(stage.get_submodule(name), name, index)

    def in_one_process(self, model: nn.Module) -> Transform:
        for name in self._blocks:
            self._wrap(model.get_submodule(name), name, stage=0)
        return self

    def _wrap(self, block: nn.Module, name: str, stage: int) -> None:
        forward = block.forward

        def perhaps(x: Any, *args: Any) -> Any:
            place = f"{self.step} {self._microbatch[stage]} {name}"
            skipped = block.training and random.Random(place).random() < 0.4
            # a copy: FSDP warns of a module that returns a view of its input
            return x.clone() if skipped else forward(x, *args)

        block.forward = perhaps


class Unproven(LayerDrop):
    """It does not say what it is in one process."""

    def in_one_process(self, model: nn.Module) -> None:
        return None


class WholeStepDrop(LayerDrop):
    """Skips a block in all microbatches of a step, so that its weights have no gradient."""

    by_microbatch = False

    def begin_microbatch(self, stage: int, microbatch: int) -> None:
        self._microbatch[stage] = 0


def add(kind: type[LayerDrop]) -> None:
    """As a case at the end of `stage_transforms`, of which the build and the reference know."""

    def with_layerdrop(config: Config, mesh: Mesh, plan: Plan) -> dict[str, Transform]:
        blocks = [unit.name for unit in plan.model_graph.units if unit.block]
        return {**stage_transforms(config, mesh, plan), "layerdrop": kind(blocks)}

    for user in (build, reference):
        vars(user)["stage_transforms"] = with_layerdrop


def compared(config: Config, worker: Worker, kind: type[LayerDrop]) -> tuple[bool, int]:
    add(kind)
    found = compare_with_one_process(config, worker)
    return found.agrees, found.groups


LAYOUTS = {"pp=2, dp=2": tiny(pp=2, dp=2, layers=4, schedule=Schedule("1f1b", 2))}
MORE_LAYOUTS = {
    "pp=2, zbv": tiny(pp=2, layers=4, schedule=Schedule("zbvzerobubble")),
    "dp=2, zero 3, recomputed": tiny(
        dp=2, layers=4, fsdp=Fsdp(3), activation_checkpoint=ActivationCheckpoint("full")
    ),
    "bf16": tiny(pp=2, layers=4, precision=Precision("bf16")),
}


@pytest.mark.parametrize("config", cells(LAYOUTS, MORE_LAYOUTS))
def test_a_custom_transform_matches_one_process(config: Config, tmp_path: Path) -> None:
    agrees, groups = run_world(compared, config, tmp_path, LayerDrop)[0]
    assert agrees and groups > 1, "the reference computes the layout's microbatches"


@pytest.mark.slow
def test_a_transform_without_a_single_process_form_fails_verify(tmp_path: Path) -> None:
    agrees, _ = run_world(compared, LAYOUTS["pp=2, dp=2"], tmp_path, Unproven)[0]
    assert not agrees


def first_bit_that_differs(config: Config, worker: Worker) -> str:
    add(WholeStepDrop)
    return str(first_difference(config, open_data(config), worker))


def test_weights_without_a_gradient_in_a_step_are_exact(tmp_path: Path) -> None:
    config = tiny(pp=2, dp=2, layers=4, schedule=Schedule("1f1b", 8), numerics=Numerics("exact"))
    assert {*run_world(first_bit_that_differs, config, tmp_path)} == {"None"}
