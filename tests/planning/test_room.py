"""What a device's memory decides, and what is said where it is too small."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from support.cells import slow
from support.command_lines import examined
from support.memory_layouts import LAYOUTS, MODEL
from support.models import tiny
from support.proven import assert_proven
from titanlike.core.config.groups.computation import (
    ActivationCheckpoint,
    FitActivationCheckpoint,
    Fsdp,
)
from titanlike.core.config.groups.pipeline import (
    LoopedZeroBubbleSchedule,
    Schedule,
    ZeroBubbleSchedule,
)
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.training.train_plan import make_plan
from titanlike.planning.advice import memory_warning
from titanlike.planning.estimate import make_estimate

SMALL = [f"model.{key}={value}" for key, value in MODEL.items() if value is not None]
PIPELINE = ["pp=2", "schedule.microbatches=2"]
WORDS = [*SMALL, "seq_len=128", "batch_size=16", "device=cpu", "data=synthetic"]


def warned(*words: str, memory: int) -> tuple[str, list[str]]:
    """(the warning, the overrides in it) of a device with so many bytes."""
    limit = [f"activation_checkpoint.memory={memory}"]
    config = examined(*WORDS, *words, "activation_checkpoint=fit", *limit).config
    assert config is not None
    text = memory_warning(config, make_plan(config))
    found = re.search(r"with (.*) it would take", text)
    return text, shlex.split(found[1]) if found else []


def test_a_run_that_does_not_fit_is_told_what_does() -> None:
    config = examined(*WORDS, *PIPELINE, "activation_checkpoint=full").config
    assert config is not None
    needed = make_estimate(config, plan=make_plan(config)).fullest
    for share in (0.9, 0.45):
        memory = int(share * needed)
        text, overrides = warned(*PIPELINE, memory=memory)
        assert "a rank would take about" in text and overrides, text
        assert warned(*PIPELINE, *overrides, memory=memory) == ("", [])


@pytest.mark.slow
def test_no_alarm_where_it_fits_or_is_meant_for_another_machine() -> None:
    for words in ([], ["experiment=llama3_8b"]):
        config = examined("data=synthetic", *words).config
        assert config is not None
        config = replace(config, activation_checkpoint=ActivationCheckpoint("none"))
        assert memory_warning(config, make_plan(config)) == ""


def test_auto_takes_the_least_traffic_that_fits() -> None:
    """ZeRO 1 in a pipeline where there is room for whole gradients, else 2, and why. Without a
    pipeline microbatches are gathered and reduced once where that fits."""
    config = replace(LAYOUTS["1f1b, dp=2, ZeRO 1"], fsdp=Fsdp())
    needed = max(make_plan(config, device_memory=lambda: None).memory().of_ranks([[], []]))
    roomy, tight = (make_plan(config, device_memory=lambda m=m: m) for m in (2 * needed, needed))
    assert roomy.zero == 1 and "least traffic" in roomy.why_zero
    assert tight.zero == 2 and "would take about" in tight.why_zero
    assert make_plan(config, device_memory=lambda: None).zero == 2
    assert make_estimate(config, plan=tight).fullest == needed

    config = tiny(dp=2, schedule=Schedule("1f1b", 4))
    roomy = make_plan(config, device_memory=lambda: 2**30)
    tight = make_plan(config, device_memory=lambda: 2**19)
    assert roomy.zero == 1 and roomy.why_zero.startswith("4 microbatches, and about")
    assert tight.zero == 3 and "would take about" in tight.why_zero
    assert make_plan(tiny(dp=2), device_memory=lambda: 2**30).zero == 3  # of one microbatch


def squeezed(schedule: object) -> Config:
    """With as much memory as all blocks recomputed take, less half of the queue."""
    model = Custom("llama", {**MODEL, "hidden_size": 32, "intermediate_size": 64})
    config = tiny(pp=2, schedule=schedule, model=model, seq_len=64)
    full = replace(config, activation_checkpoint=ActivationCheckpoint("full"))
    plan = make_plan(full, device_memory=lambda: None)
    memory = plan.memory()
    deferred = max(memory.of_ranks(plan.recomputed.blocks))
    together = max(memory.changed(deferred=()).of_ranks(plan.recomputed.blocks))
    assert together < deferred
    limit = FitActivationCheckpoint(memory=(deferred + together) // 2)
    return replace(config, activation_checkpoint=limit)


@pytest.mark.parametrize(
    "schedule",
    slow(ZeroBubbleSchedule("zbvzerobubble", 8), LoopedZeroBubbleSchedule(microbatches=8)),
)
def test_weight_gradients_are_deferred_only_where_they_fit(
    schedule: object, tmp_path: Path
) -> None:
    config = squeezed(schedule)
    plan = make_plan(config)
    stages = frozenset(range(plan.order.stages))
    assert plan.deferred < stages and "together" in plan.why_together
    assert max(plan.recomputed.memory) <= config.activation_checkpoint.memory
    assert make_plan(config).deferred == plan.deferred  # as on a resume
    for stage in stages - plan.deferred:  # as few as needed
        rank = plan.order.stage_to_rank[stage]
        memory = plan.memory().changed(deferred=plan.deferred | {stage})
        assert memory.of_rank(rank, plan.recomputed.blocks) > config.activation_checkpoint.memory
    assert_proven(config, tmp_path)
