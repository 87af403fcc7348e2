"""Dropout on tensor-parallel ranks: the same masks for activations that each rank has as a whole,
other masks for its own part of them; and what is equal on all of them stays equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.models import tiny
from support.opened import opened
from support.world import run_world
from support.wrong_plans import PLAN
from titanlike.core.config.groups.computation import ActivationCheckpoint
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.schema import Config
from titanlike.core.launch.watchdog import Watchdog
from titanlike.core.launch.worker import Worker
from titanlike.core.training.loop import train
from titanlike.core.training.preflight import preflight
from titanlike.core.training.session import open_session
from titanlike.core.training.step import drop_gradients, forward_backward, optimizer_step
from titanlike.core.training.train_plan import make_plan

# of each forward: weights of attention, its result, hidden features, their result
BLOCK = ["heads", "result", "features", "result"]
OTHER = {"heads", "features"}  # a rank has a part of these


def config(dropout: float = 0.5, attention: str = "Products", **changes: Any) -> Config:
    args = {"attention": attention, "dropout": dropout}
    model = Model("support.wrong_plans.Model", args, tp_plan=PLAN)
    plain = {"tp": 2, "batch_size": 4, "model": model, "schedule": Schedule("1f1b", 1)}
    return tiny(**{**plain, **changes})


def test_a_tp_plan_marks_dropout_on_sharded_activations() -> None:
    def draws(**changes: Any) -> dict[str, set[bool]]:
        transform = make_plan(config(**changes)).transforms["tp"]
        tensor = transform.sharding
        drawn = "draws random numbers for each tensor-parallel rank's part"
        # compiled code cannot change the generator
        assert (drawn in transform.why_not_compiled("blocks.1")) == bool(tensor.draws)
        return dict(tensor.draws)

    whole, parts = {False}, {True}
    first = {
        "dropout": whole,
        "blocks.0.attention": parts,
        "blocks.0.attention.dropout": whole,
        "blocks.0.mlp.hidden": parts,
        "blocks.0.mlp.dropout": whole,
    }
    second = {name.replace("blocks.0", "blocks.1"): found for name, found in first.items()}
    assert draws(tp_sequence=False) == first | second
    assert draws(tp_sequence=True) == dict.fromkeys(first | second, parts)
    assert draws(dropout=0.0) == {}


def steps(config: Config, worker: Worker) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(the masks of the first step, parameters that each rank has as a whole after two)."""
    masks: list[Tensor] = []
    first: list[Tensor] = []
    real = F.dropout

    def dropout(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.is_meta:
            return real(x, *args, **kwargs)
        kept = real(torch.ones_like(x), *args, **kwargs)
        masks.append(kept.detach())
        return x * kept

    F.dropout = dropout
    with opened(config, worker) as job:
        whole = next(job.stream)
        # a length that tp does not divide: activations are whole in it
        shorter = {name: field[:, :-1].contiguous() for name, field in next(job.stream).items()}
        for step, batch in enumerate((whole, shorter), 1):
            gradients = forward_backward(job.run, config, step, iter([batch]))
            first = first if step > 1 else list(masks)
            optimizer_step(job.run, config, step, gradients.norm)
            drop_gradients(job.run)
        placements = job.run.plan.placements
        named = job.parameters()
        found = {n: p.detach().clone() for n, p in named if placements[n].part is None}
    found["drawn next"] = torch.rand(3)
    return first, found


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_dropout_masks_are_equal_where_activations_are_replicated(
    sequence: bool, tmp_path: Path
) -> None:
    case = config(tp_sequence=sequence, activation_checkpoint=ActivationCheckpoint("full"))
    (masks, weights), (others, same) = run_world(steps, case, tmp_path)
    forward = ["embedding", *BLOCK, *BLOCK]
    for name, mine, other in zip(forward, masks, others, strict=False):
        assert torch.equal(mine, other) == (not sequence and name not in OTHER), name
        assert 0.3 < (mine == 0).float().mean() < 0.7
    again = masks[len(forward) :]  # the backward computes the last block first
    assert len(again) == 8
    for mine, redrawn in zip(masks[1:9], again[4:] + again[:4], strict=True):
        assert torch.equal(mine, redrawn)
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def drawn_after_resume(config: Config, worker: Worker) -> tuple[int, Tensor]:
    with (
        Watchdog(worker, config.launch) as watchdog,
        open_session(config, worker, watchdog) as session,
    ):
        return session.progress.step, torch.rand(3)


@pytest.mark.slow
def test_tp_ranks_draw_equal_masks_after_resuming_from_tp_1(tmp_path: Path) -> None:
    case = replace(config(), steps=1, checkpoint=Checkpoint(last=True))
    run_world(train, replace(case, tp=1, dp=2), tmp_path)
    (step, mine), (_, other) = run_world(drawn_after_resume, replace(case, steps=2), tmp_path)
    assert step == 1 and torch.equal(mine, other)


MIXED = "draws random numbers both for whole activations and for a rank's part"
BETWEEN = "draws random numbers for a rank's part (dropout) between the modules of stages"


@pytest.mark.parametrize(
    ("attention", "between", "sequence", "told"),
    [("Mixed", "nothing", False, MIXED), ("Attention", "dropout", True, BETWEEN)],
    ids=["in one module", "between blocks"],
)
def test_ambiguous_dropout_masks_are_refused(
    attention: str, between: str, sequence: bool, told: str
) -> None:
    args = {"attention": attention, "between": between, "dropout": 0.5}
    model = Model("support.wrong_plans.Model", args, tp_plan=PLAN)
    (problem,) = preflight(config(model=model, tp_sequence=sequence))
    assert told in str(problem) and "nn.Dropout" in problem.fix, problem
    assert not preflight(config(model=replace(model, args={**args, "dropout": 0.0})))
