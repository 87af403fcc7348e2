"""The learning rate over the steps, and the norm by which each rank clips its gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from support.models import tiny
from support.opened import opened
from support.world import run_world
from titanlike.core.config.groups.optimization import ConstantLr, DecayLr, WsdLr
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.optim.fused import clip_in_place
from titanlike.core.optim.optimizer import clip_divisor, lr_factor


@given(
    lr=st.one_of(
        st.builds(ConstantLr, warmup=st.integers(0, 50)),
        st.builds(
            DecayLr,
            name=st.sampled_from(["linear", "cosine"]),
            warmup=st.integers(0, 50),
            final=st.floats(0, 1),
        ),
        st.builds(
            WsdLr, warmup=st.integers(0, 50), decay=st.floats(0.01, 1), final=st.floats(0, 1)
        ),
    ),
    steps=st.integers(60, 500),
)
def test_the_learning_rate_rises_then_never_rises_again(lr, steps) -> None:
    factors = [lr_factor(lr, step, steps) for step in range(1, steps + 1)]
    warm, rest = factors[: lr.warmup], factors[max(0, lr.warmup - 1) :]
    assert warm == sorted(warm)
    assert all(a >= b - 1e-12 for a, b in zip(rest, rest[1:], strict=False))
    assert max(factors) <= 1 and min(factors) >= 0
    assert factors[-1] == pytest.approx(getattr(lr, "final", 1.0))


def test_wsd_keeps_its_peak_when_a_run_is_made_longer() -> None:
    lr = WsdLr(warmup=10, decay=0.2)
    before_decay = [lr_factor(lr, step, 100) for step in range(1, 80)]
    assert before_decay == [lr_factor(lr, step, 1000) for step in range(1, 80)]


# --- the norm of all gradients --------------------------------------------------------------------


def norm_of_step(config: Config, worker: Worker) -> float:
    with opened(config, worker) as job:
        return job.step(1).record["grad_norm"]


SIZES = {"layers": 2, "tied": True, "optimizer": Sgd()}


def test_the_gradient_norm_is_equal_in_every_layout(tmp_path: Path) -> None:
    """Replicas, shards, and what tensor-parallel ranks hold together or apart, count once."""
    [right] = run_world(norm_of_step, tiny(**SIZES), tmp_path / "one")
    assert right > 0
    for layout in ({"dp": 2, "replicate": 2}, {"tp": 2}, {"pp": 2}):
        name = "_".join(layout)
        found = run_world(norm_of_step, tiny(**layout, **SIZES), tmp_path / name)
        assert found == pytest.approx([right] * len(found), rel=1e-5), layout


@pytest.mark.parametrize("limit, factor", [(2.0, 0.4), (10.0, 1.0)])
def test_gradients_are_scaled_to_the_limit_and_never_up(limit: float, factor: float) -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    clip_in_place(parameters, clip_divisor(torch.tensor(5.0), limit))
    assert torch.allclose(parameters[0].grad, torch.tensor([3.0, 0.0]) * factor)
    assert torch.allclose(parameters[1].grad, torch.tensor([0.0, 4.0]) * factor)
    assert parameters[2].grad is None
