"""One truth: every layout trains the model that one process of plain torch trains.

Each case is `tools/verify.py` on a layout: initial weights to the last bit, losses to 1e-6, every
gradient to 1e-6, the updated parameters, and the validation loss.
"""

from __future__ import annotations

import math
import re
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from support.cells import GRID, cells, slow
from support.hf_tiny import model_of, tiny_hf
from support.layouts import (
    DIMENSIONS,
    PAIRS,
    Cell,
    allowed,
    config_of,
    name_of,
    one_of_each,
    possible,
    random_cells,
    ranks,
)
from support.models import tiny
from support.proven import assert_proven
from support.world import run_world
from titanlike.core.config.groups.computation import Float8Precision, Fsdp, Precision
from titanlike.core.config.groups.jobs import Verify
from titanlike.core.config.groups.optimization import ConstantLr
from titanlike.core.config.groups.pipeline import LoopedSchedule, Schedule
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.data.sources import IGNORE
from titanlike.core.launch.worker import Worker
from titanlike.core.pipeline.pipeline import Pipeline
from titanlike.proof.verify import verify

BF16, FLOAT8 = Precision("bf16"), Float8Precision(min_features=16)
SCALED = {"bf16": 1.02, "float8": 1.1}  # what a fault multiplies a gradient with
UNEVEN = Custom("support.data.uneven", {"vocab_size": 64})

AFFORDABLE = [  # float8, whose library each rank imports, has tests of its own
    cell
    for cell in random_cells(1000, seed=1)
    if 1 < ranks(cell) <= 4 and cell["precision"] != "float8"
]
SAMPLE = one_of_each(AFFORDABLE)
PATIENCE = 300  # seconds: eight ranks on a busy machine; blocks that are compiled
RANDOM = random_cells(200, seed=0)
COMPILED = [  # of a ring, which cannot be traced, torch.compile makes nothing
    *(cell for cell in one_of_each(PAIRS) if ranks(cell) < 8 and cell["cp"] != "ring"),
    *(cell for cell in RANDOM[:30] if cell["cp"] != "ring"),
]


@pytest.mark.parametrize(
    "cell",
    [
        *(pytest.param(cell, id=name_of(cell)) for cell in SAMPLE[::2]),
        *(
            pytest.param(cell, id=name_of(cell), marks=pytest.mark.slow)
            for cell in SAMPLE[1::2] + PAIRS
        ),
        *(pytest.param(cell, id=f"random: {name_of(cell)}", marks=GRID) for cell in RANDOM),
    ],
)
def test_every_pair_of_values_matches_one_process(cell: Cell, tmp_path: Path) -> None:
    assert_proven(config_of(cell, tmp_path), tmp_path, PATIENCE)


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=name_of(cell), marks=GRID) for cell in COMPILED]
)
def test_compiled_blocks_in_every_layout(cell: Cell, tmp_path: Path) -> None:
    assert_proven(config_of(cell, tmp_path, compile=True), tmp_path, 3 * PATIENCE)


def test_the_table_of_pairs_is_that_of_the_dimensions() -> None:
    """Each pair of values is in a cell, or in none that is allowed."""
    assert all(map(allowed, PAIRS))
    met = {pair for cell in PAIRS for pair in combinations(cell.items(), 2)}
    for names in combinations(DIMENSIONS, 2):
        for values in product(*map(DIMENSIONS.get, names)):
            pair = tuple(zip(names, values, strict=True))
            assert (pair in met) == possible(dict(pair)), pair


LAYOUTS = {  # what no dimension has
    "fewer microbatches than stages": tiny(pp=4, schedule=Schedule("1f1b", 2)),
}
MORE_LAYOUTS = {
    "two blocks in a V of eight": tiny(pp=4, schedule="zbvzerobubble", layers=2),
    "three stages a rank, uneven": tiny(
        pp=2, dp=2, schedule=LoopedSchedule("loopedbfs", None, 3), layers=7
    ),
    "gradient accumulation and ZeRO 3": tiny(dp=2, schedule=Schedule("1f1b", 4), fsdp=Fsdp(3)),
    "four ranks in one replica": tiny(dp=4, fsdp=Fsdp(2)),
    "four replicas": tiny(dp=4, replicate=4),
    "shards of unequal size": tiny(dp=3, batch_size=12),
    "four parts of each layer": tiny(tp=4),
}


@pytest.mark.parametrize("config", cells(LAYOUTS, MORE_LAYOUTS))
def test_layouts_outside_of_the_table_match_one_process(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path)


# --- verify must be able to fail ---------------------------------------------------------------


def verify_with_a_fault(config: Config, worker: Worker, fault: str) -> dict:
    """`verify`, on a pipeline whose backward does something wrong on one rank."""
    train_right = Pipeline.forward_backward

    steps = 0

    def train_wrong(self: Pipeline, batch: dict[str, torch.Tensor], *options: Any):
        nonlocal steps
        steps += 1
        targets = batch["targets"].clone()
        if fault == "microbatch":
            targets[: len(targets) // self._planned.order.microbatches] = IGNORE
        elif fault == "dp rank" and self._mesh.dp_rank == 1:
            targets[:] = IGNORE
        batch = batch | {"targets": targets}
        result = train_right(self, batch, *options)
        if self._mesh.pp_rank == 1:
            named = dict(self._stages[1].named_parameters())
            parameter = named["model.layers.5.mlp.up_proj.weight"]
            if fault == "scaled" or (fault == "scaled later" and steps > 1):
                parameter.grad *= SCALED.get(config.precision.name, 1.01)
            elif fault == "missing":
                parameter.grad = None
            elif fault == "nan":
                parameter.grad *= math.nan
        if fault == "loss":
            return result[0] * (1 + 1e-5), *result[1:]
        return result

    Pipeline.forward_backward = train_wrong
    return verify(config, worker)


def verdict_of(folder: Path) -> str:
    """What stands before where it is wrong."""
    lines = (folder / "rank0.out").read_text().splitlines()
    return next(line for line in lines if line.startswith(("PASS", "FAIL")))


@pytest.mark.parametrize("fault", ["scaled", *slow("missing", "nan", "loss")])
def test_a_wrong_gradient_or_loss_is_detected_and_named(fault: str, tmp_path: Path) -> None:
    # SGD, because Adam's first update does not show the size of a gradient
    results = run_world(verify_with_a_fault, tiny(pp=2, optimizer=Sgd()), tmp_path, fault)
    assert {result["exit_code"] for result in results} == {1}
    verdict = verdict_of(tmp_path)
    wrong = "loss of step" if fault == "loss" else "gradient of model.layers.5.mlp.up_proj.weight"
    assert verdict.startswith("FAIL") and wrong in verdict


@pytest.mark.slow
def test_a_wrong_gradient_of_a_later_step_is_not_taken_for_rounding(tmp_path: Path) -> None:
    config = tiny(pp=2, optimizer=Sgd())
    results = run_world(verify_with_a_fault, config, tmp_path, "scaled later")
    assert {result["exit_code"] for result in results} == {1}
    verdict = verdict_of(tmp_path)
    assert verdict.startswith("FAIL") and "update of model.layers.5.mlp.up_proj.weight" in verdict


@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2])
def test_rounding_that_a_model_amplifies_from_step_to_step_is_no_fault(
    pp: int, tmp_path: Path
) -> None:
    """With such a learning rate the loss is 1e6 after five steps, its first digits chance."""
    exploding = Sgd(lr=20.0, clip=None), ConstantLr(warmup=0)
    config = tiny(pp=pp, dp=2, optimizer=exploding[0], lr=exploding[1], verify=Verify(steps=5))
    assert_proven(config, tmp_path)
    assert re.search(
        r"loss +loss after the last .* rounding\n", (tmp_path / "rank0.out").read_text()
    )


@pytest.mark.parametrize(
    "precision, fault",
    [
        *slow((BF16, "microbatch"), (FLOAT8, "scaled")),
        *slow((BF16, "missing"), (BF16, "scaled"), (BF16, "dp rank"), marks=GRID),
        *slow((FLOAT8, "missing"), (FLOAT8, "dp rank"), marks=GRID),
    ],
)
def test_a_wrong_gradient_is_named_in_low_precision_too(
    precision: Precision, fault: str, tmp_path: Path
) -> None:
    config = tiny(pp=2, dp=2 if fault == "dp rank" else 1, optimizer=Sgd(), precision=precision)
    results = run_world(verify_with_a_fault, config, tmp_path, fault, timeout=PATIENCE)
    assert {result["exit_code"] for result in results} == {1}
    shown = (tmp_path / "rank0.out").read_text()
    assert re.search(r"gradient +model.layers.5.mlp.up_proj.weight .*DIFFERS", shown), shown


@pytest.mark.slow
def test_an_update_that_follows_from_rounding_alone_is_no_fault_in_fp32(tmp_path: Path) -> None:
    """As below; BART's decoder has such biases."""
    assert_proven(tiny(pp=2, dp=2, model=Custom("support.wrapped_transformers.bart")), tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        *slow(
            tiny_hf(model_of("opt"), 2, 1, precision=BF16),
            tiny_hf(model_of("qwen2"), 2, 2, precision=BF16),
            tiny_hf(model_of("gpt_neox"), 1, 2, precision=BF16),
            tiny_hf(model_of("opt"), 1, 2, precision=BF16, lr=ConstantLr(warmup=0)),
        ),
    ],
)
def test_a_gradient_that_is_rounding_alone_is_no_fault_in_bf16(
    config: Config, tmp_path: Path
) -> None:
    """A softmax does not change with the bias of its keys, whose true gradient is zero."""
    assert_proven(config, tmp_path)
