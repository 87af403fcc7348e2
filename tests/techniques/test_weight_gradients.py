"""Weight gradients that wait for W: of which layers, exact however a layer is used, in any
order."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from support.cells import slow
from support.live_memory import LiveStorages
from support.models import tiny
from support.opened import opened
from support.proven import assert_proven
from support.records import numbers
from support.runs import train_each
from support.world import run_world
from titanlike.core.config.groups.computation import Precision
from titanlike.core.config.groups.pipeline import (
    LoopedSchedule,
    LoopedZeroBubbleSchedule,
    Schedule,
    ZeroBubbleSchedule,
)
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.techniques.weight_gradients import DeferredWeightGradients

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "pp, schedule",
    [
        (2, ZeroBubbleSchedule(microbatches=1)),
        *slow(
            (1, LoopedZeroBubbleSchedule(microbatches=2)),
            (2, LoopedZeroBubbleSchedule(microbatches=2)),
        ),
    ],
)
def test_weight_gradients_may_all_come_after_the_last_backward(
    pp: int, schedule: object, tmp_path: Path
) -> None:
    """With so few microbatches: FSDP has brought none of them to fp32 by then."""
    assert_proven(
        tiny(pp=pp, dp=2, schedule=schedule, layers=2 * pp, precision=Precision("bf16")), tmp_path
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "split, whole",
    [
        (ZeroBubbleSchedule("zbh2", 16), Schedule("1f1b", 16)),
        *slow(
            (ZeroBubbleSchedule("zbh1", 16), Schedule("1f1b", 16)),
            (LoopedZeroBubbleSchedule(microbatches=16), LoopedSchedule(microbatches=16)),
        ),
    ],
    ids=lambda schedule: schedule.name,
)
def test_weight_gradients_are_summed_in_fp32(split: Any, whole: Any, tmp_path: Path) -> None:
    """In bf16 under FSDP, however many W follow one another: to the bit as whole backwards."""
    runs = [
        tiny(
            pp=2,
            dp=2,
            layers=4,
            steps=2,
            batch_size=32,
            schedule=schedule,
            precision=Precision("bf16"),
            run_dir=str(tmp_path / schedule.name),
        )
        for schedule in (split, whole)
    ]
    for config in runs:
        Path(config.run_dir).mkdir()
    run_world(train_each, runs[0], tmp_path / "world", runs)
    assert numbers(tmp_path / split.name) == numbers(tmp_path / whole.name)


def test_only_plain_linear_layers_queue_their_gradients() -> None:
    """Others compute theirs at once: frozen ones, in autocast, and weights made of others."""
    torch.manual_seed(0)
    plain, frozen, made, cast = (nn.Linear(4, 4) for _ in range(4))
    frozen.weight.requires_grad_(False)
    nn.utils.parametrizations.weight_norm(made)
    stage = nn.ModuleDict({"plain": plain, "frozen": frozen, "made": made, "cast": cast})
    x = torch.randn(3, 4, requires_grad=True)

    def run() -> dict[str, Tensor]:
        y = stage["made"](stage["frozen"](stage["plain"](x)))
        with torch.autocast("cpu", torch.bfloat16):
            y = stage["cast"](y)
        y.float().square().sum().backward()
        return {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}

    right = run()
    stage.zero_grad()
    deferred = DeferredWeightGradients(stage, CPU)
    assert "plain.weight" not in run()
    with pytest.raises(AssertionError):
        deferred.check_all_taken()
    deferred.take()()
    deferred.check_all_taken()
    found = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
    assert found.keys() == right.keys()
    for name, gradient in right.items():
        torch.testing.assert_close(found[name], gradient)


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def of_inputs(linear: nn.Linear, x: Tensor) -> Tensor:
    """The forward has a gradient in it, as of an energy."""
    (gradient,) = torch.autograd.grad(linear(x).tanh().sum(), x, create_graph=True)
    return gradient


def of_weights(linear: nn.Linear, x: Tensor) -> Tensor:
    weights = [linear.weight, linear.bias]
    gradient, of_bias = torch.autograd.grad(linear(x).tanh().sum(), weights, create_graph=True)
    return x @ gradient + of_bias


USES = {
    "by keyword": lambda linear, x: linear(input=x),
    "in vmap": lambda linear, x: torch.vmap(linear)(x),
    "without a gradient": lambda linear, x: Stop.apply(linear(x)) + x,
    "a vector": lambda linear, x: linear(x[0]),
    "four dimensions": lambda linear, x: linear(x[None, None]),
    "no rows": lambda linear, x: linear(x[:0]).sum() + x,
    "twice, and its weight": lambda linear, x: linear(linear(x)) @ linear.weight,
    "changed in place": lambda linear, x: linear(x).relu_(),
    "the gradient of its input": of_inputs,
    "the gradient of its weight": of_weights,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_layer_with_deferred_weight_gradients_behaves_like_any_other(use) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)

    def run(finish) -> list[Tensor | None]:
        found = torch.autograd.grad(use(linear, x).square().sum(), x, retain_graph=True)
        use(linear, x).square().sum().backward()
        finish()
        return [*found, *(p.grad for p in linear.parameters())]

    right = run(lambda: None)
    linear.zero_grad()
    deferred = DeferredWeightGradients(nn.ModuleList([linear]), CPU)
    torch.testing.assert_close(run(lambda: deferred.take()()), right)


@pytest.mark.parametrize("bias", [True, False])
def test_the_output_of_a_deferred_layer_is_not_a_view(bias: bool) -> None:
    """FSDP warns of a view, and a view that a custom function returns cannot be changed in
    place."""
    stage = nn.Sequential(nn.Linear(4, 6, bias=bias))
    DeferredWeightGradients(stage, CPU)
    result = stage(torch.randn(2, 3, 4, requires_grad=True))
    assert result.shape == (2, 3, 6) and not result._is_view()


def beside_sums(config: Config, worker: Worker) -> tuple[list[int], int, int]:
    """Bytes that each W but a stage's first has at most; elements of the stage's weights, and of
    its largest."""
    peaks: list[int] = []
    calls: Counter[DeferredWeightGradients] = Counter()
    right, live = DeferredWeightGradients.take, LiveStorages()

    def take(self: DeferredWeightGradients) -> Any:
        add = right(self)

        def measured() -> None:
            calls[self] += 1
            before = live.peak = live.now
            add()
            peaks.extend([live.peak - before] * (calls[self] > 1))  # the first makes the sums

        return measured

    with opened(config, worker) as job, mock.patch.object(DeferredWeightGradients, "take", take):
        sizes = [p.numel() for _, p in job.parameters() if p.dim() == 2]
        with live:
            job.train()
    return peaks, sum(sizes), max(sizes)


def test_weight_gradients_are_added_to_their_sum_one_by_one(tmp_path: Path) -> None:
    """No W has gradients of all its weights beside their sums in fp32."""
    schedule = ZeroBubbleSchedule("zbh1", 4)
    sizes = {"layers": 8, "batch_size": 8, "seq_len": 4}  # few tokens: W frees less than it makes
    config = tiny(pp=2, dp=2, schedule=schedule, precision=Precision("bf16"), **sizes)
    for peaks, whole, largest in run_world(beside_sums, config, tmp_path):
        assert len(peaks) == 3 and whole > 8 * largest
        assert 2 * largest <= max(peaks) <= 4 * largest  # bf16, of a product or two
