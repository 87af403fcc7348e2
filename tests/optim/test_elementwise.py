"""A built-in optimizer whose file has its keys and its arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titanlike.core.config.imports import import_object
from titanlike.core.config.keys import key
from titanlike.core.config.optimizer import Optimizer, optimizer_kinds
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.optim.fused import Elementwise, OptimizerContext, step_unless


@dataclass
class SignedMean(Optimizer):
    name: str = key("signed_mean", "choice")
    betas: list[float] = key([0.9, 0.99], "of the update; of the running mean")

    group_keys = ("betas",)
    state = ("exp_avg",)

    def update(
        self, options: dict[str, Any], weights: Tensor, gradient: Tensor, *state: Tensor
    ) -> None:
        beta1, beta2 = options["betas"]
        direction = state[0].lerp(gradient, 1 - beta1).sign_()
        weights.mul_(1 - options["lr"] * options["weight_decay"])
        weights.add_(direction, alpha=-options["lr"])
        state[0].lerp_(gradient, 1 - beta2)


def trained(weights: Tensor, gradients: list[Tensor], skipped: int = -1) -> list[Tensor]:
    """Weights and running mean after steps on gradients, clipped from double; one is skipped."""
    parameter = nn.Parameter(weights.clone())
    groups = [{"params": [parameter], "weight_decay": 0.1, "betas": (0.8, 0.9)}]
    optimizer = Elementwise(groups, SignedMean(lr=0.01), OptimizerContext(exact=True))
    for step, gradient in enumerate(gradients):
        parameter.grad = gradient * 2
        step_unless(optimizer, torch.tensor(float(step == skipped)), {}, torch.tensor(2.0))
    return [parameter.detach(), optimizer.state[parameter]["exp_avg"]]


def test_an_elementwise_optimizer_matches_its_formula_and_skips_bad_steps() -> None:
    weights, gradients = torch.randn(7, 5), [*torch.randn(3, 7, 5)]
    mean, expected = torch.zeros(7, 5), weights.double()
    for gradient in gradients:
        sign = (0.8 * mean + 0.2 * gradient).sign()
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * sign
        mean = 0.9 * mean + 0.1 * gradient
    found = trained(weights, gradients)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1], mean)
    for at in (0, 2):  # the first, in which state begins
        bad = [*gradients[:at], torch.full((7, 5), torch.nan), *gradients[at:]]
        again = trained(weights, bad, skipped=at)
        assert all(map(torch.equal, again, found))


def test_shards_are_updated_bitwise_like_the_full_parameter() -> None:
    weights, gradients = torch.randn(7, 5), [*torch.randn(3, 7, 5)]
    whole = trained(weights, gradients)
    first, second = (
        trained(weights[rows], [g[rows] for g in gradients]) for rows in (slice(3), slice(3, 7))
    )
    assert all(map(torch.equal, map(torch.cat, zip(first, second, strict=True)), whole))


def test_every_built_in_optimizer_is_fully_declared() -> None:
    for name, kind in optimizer_kinds().items():
        assert name == kind().name
        assert issubclass(import_object(kind().implementation), torch.optim.Optimizer)
        assert kind().touched_bytes == 12 + 2 * kind().state_bytes
    with pytest.raises(NotImplementedError, match="neither state nor state_bytes"):
        Optimizer(name="unfinished").touched_bytes  # noqa: B018
    with pytest.raises(ValueError, match="optimizer=lamb is none of adamw, muon, sgd"):
        Sgd().of_kind("lamb")
