"""ramp: smaller batches and shorter sequences at the beginning of a run, by tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.cells import cells
from support.models import tiny
from support.proven import assert_proven
from support.records import numbers
from support.world import run_world
from titanlike.core.config.groups.computation import Precision
from titanlike.core.config.groups.data import RampStage
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy, ConstantLr
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.schema import Config
from titanlike.core.config.validate import problems
from titanlike.core.data.loader import batches
from titanlike.core.data.registry import open_data
from titanlike.core.optim.optimizer import learning_rate
from titanlike.core.training.loop import train
from titanlike.core.training.preflight import preflight

# batches of 4 x 16, 8 x 8, then 16 x 16
RAMP = [RampStage(tokens=60, batch_size=4), RampStage(tokens=128, batch_size=8, seq_len=8)]
RAMPED = {"ramp": RAMP, "layers": 2}
OWN = Model("support.any_models.Deep")  # looked at with the first batch


@pytest.mark.parametrize(
    "config",
    cells(
        {
            "pp and dp": tiny(pp=2, dp=2, **RAMPED),
            "own model, bf16": tiny(pp=2, model=OWN, precision=Precision("bf16"), ramp=RAMP),
        },
        {
            "tp": tiny(tp=2, dp=2, **RAMPED),
            "cp": tiny(cp=2, loss=ChunkedCrossEntropy(chunk=7), **RAMPED),
            "V": tiny(pp=2, schedule="zbvzerobubble", ramp=RAMP, layers=4),
            "microbatches": tiny(pp=2, schedule=Schedule(microbatches=4), **RAMPED),
        },
    ),
)
def test_each_batch_size_of_a_ramp_matches_one_process(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path)


def test_a_ramp_reads_the_same_samples_in_order_on_any_number_of_ranks() -> None:
    config = tiny(**RAMPED)
    source = open_data(config).train
    plain = next(batches(source, replace(config, ramp=[]), dp_rank=0))["inputs"]
    stream = batches(source, config, dp_rank=0)
    read = [next(stream)["inputs"] for _ in range(3)]
    assert [x.shape for x in read] == [(4, 16), (8, 8), (16, 16)]
    assert torch.equal(torch.cat([x.flatten() for x in read])[: plain.numel()], plain.flatten())
    halves = [batches(source, replace(config, dp=2), dp_rank=r, start_step=1) for r in (0, 1)]
    for right in read[1:]:  # as resumed after the first step
        assert torch.equal(torch.cat([next(half)["inputs"] for half in halves]), right)


def test_tokens_decide_the_learning_rate_and_the_end() -> None:
    config = tiny(steps=6, lr=ConstantLr(warmup=4), **RAMPED)
    assert [config.tokens(step) for step in (0, 1, 2, 3, 4)] == [0, 64, 128, 384, 640]
    full = 16 * 16 * 4 / config.optimizer.lr
    rates = [learning_rate(config, step) for step in (1, 2, 3)]
    assert rates == pytest.approx([64 / full, 128 / full, 384 / full])
    assert replace(config, max_tokens=129).last_step == 3
    assert replace(config, max_tokens=128).last_step == 2


def test_a_run_resumes_in_another_layout_within_its_ramp(tmp_path: Path) -> None:
    whole = tiny(**RAMPED)
    saved = replace(whole, checkpoint=replace(whole.checkpoint, last=True), steps=1)
    run_world(train, whole, tmp_path / "whole")
    run_world(train, replace(saved, pp=2), tmp_path / "moved")
    run_world(train, replace(whole, dp=2), tmp_path / "moved")
    first, then = numbers(tmp_path / "whole"), numbers(tmp_path / "moved")
    assert len(first) == len(then) == 5
    for one, other in zip(first, then, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize(
    "stage, said",
    [
        (
            RampStage(tokens=60, batch_size=3),
            "no 2 times as many whole samples of 16; batch_size: 4",
        ),
        (RampStage(tokens=60, batch_size=32), "is larger than batch_size=16 seq_len=16"),
        (RampStage(tokens=60, seq_len=6), "seq_len=16 is not cut into sequences of 6; seq_len: 4"),
    ],
)
def test_stages_that_do_not_divide_are_refused(stage: RampStage, said: str) -> None:
    (problem,) = problems(tiny(dp=2, ramp=[stage]))
    assert said in str(problem)


def test_a_stage_with_too_few_sequences_for_its_microbatches_is_refused() -> None:
    (problem,) = preflight(tiny(pp=2, schedule=Schedule(microbatches=8), **RAMPED))
    assert "4 sequences of a dp rank do not divide into 8" in str(problem)
