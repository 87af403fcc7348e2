"""Losses: chunked cross entropy, mean squared error, a user's own, in every kind of layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.cells import cells
from support.live_memory import Largest
from support.models import tiny
from support.opened import opened
from support.proven import assert_proven
from support.world import run_world
from titanlike.core.config.groups.computation import Precision
from titanlike.core.config.groups.data import SyntheticData
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy, CrossEntropy, Mse
from titanlike.core.config.groups.pipeline import BalanceSplit
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.sources import IGNORE
from titanlike.core.launch.worker import Worker
from titanlike.core.optim.loss import build_loss
from titanlike.core.training.preflight import preflight
from titanlike.core.training.train_plan import make_plan

CHUNKED = ChunkedCrossEntropy(chunk=7)  # does not divide the tokens of a microbatch
UNEVEN = Custom("support.data.uneven", {"vocab_size": 64})


def own(name: str, **args: Any) -> Custom:
    return Custom(f"support.losses.{name}", args)


def regression(loss: Any, *mesh: Any, returns: str = "tensor", **changes: Any) -> Config:
    model, data = own("Regressor", returns=returns), own("curves")
    return tiny(*mesh, model=model, data=data, loss=loss, **changes)


def ended(end: str, *mesh: Any, **changes: Any) -> Config:
    model = own("Ended", vocab_size=64, end=end)
    return tiny(*mesh, **{"model": model, "loss": CHUNKED, **changes})


LAYOUTS = {
    "chunked": tiny(2, 1, loss=replace(CHUNKED, z_loss=0.1), data=UNEVEN, layers=2),
    "z-loss, vocabulary divided": tiny(tp=2, loss=CrossEntropy(z_loss=0.1), layers=1),
    "chunked, norm and head in one module": ended("inside", 2, 1),
    "chunked, all forwards first": tiny(2, 1, "gpipe", loss=CHUNKED, data=UNEVEN, layers=2),
    "own that counts": tiny(1, 2, data=UNEVEN, loss=own("Smoothed", amount=0.1), layers=2),
    "own of a dataclass": regression(own("likelihood"), 2, 1, returns="dataclass"),
}
MORE_LAYOUTS = {
    "chunked, compiled": tiny(loss=replace(CHUNKED, chunk=8), compile=True, layers=1),
    "chunked, vocabulary divided": tiny(tp=2, loss=CHUNKED, data=UNEVEN, layers=1),
    "torch's own": regression(Custom("torch.nn.functional.l1_loss", {"reduction": "none"}), 1, 2),
    "own with arguments": regression(own("huber", delta=0.3), 2, 2, "zbvzerobubble"),
    "mse": regression(Mse(), 2, 2, returns="dict"),
    "chunked, soft cap, in a dict": ended("cap", 2, 2, "interleavedzerobubble"),
    "chunked, tied by the forward": ended("tied", 2, 2, "dualpipev"),
    "chunked, a weight, bf16": ended("weight", 2, 2, precision=Precision("bf16")),
}


@pytest.mark.parametrize("config", cells(LAYOUTS, MORE_LAYOUTS, most=3))
def test_losses_in_layouts_match_one_process(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path)


def test_z_loss_is_trained_and_not_evaluated() -> None:
    logits = torch.randn(2, 3, 8, requires_grad=True)
    targets = torch.tensor([[0, 7, IGNORE], [3, 3, IGNORE]])
    counted = logits[:, :2].flatten(0, 1)
    entropy = torch.nn.functional.cross_entropy(counted, targets[:, :2].flatten(), reduction="sum")
    right = entropy + 0.1 * counted.exp().sum(-1).log().square().sum()
    loss = build_loss(CrossEntropy(z_loss=0.1))
    torch.testing.assert_close(loss(logits, targets), right)
    gradients = (torch.autograd.grad(x, logits)[0] for x in (loss(logits, targets), right))
    torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(loss(logits, targets), entropy)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_chunked_loss_matches_autograd(
    dtype: torch.dtype, compiled: bool
) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 5, 17).to(dtype), torch.randint(0, 17, (10,))
    targets[3] = IGNORE
    for z_loss in (0.0, 0.1):
        loss = build_loss(CrossEntropy(z_loss=z_loss))
        loss.compiled = compiled
        leaf = logits.clone().requires_grad_()
        total = loss.total(leaf, targets)
        found, gradient = loss.total_and_gradient(logits, targets)
        torch.testing.assert_close(found, total)
        torch.testing.assert_close(gradient, torch.autograd.grad(total, leaf)[0])
        assert gradient.dtype == dtype


def test_the_mean_of_a_custom_loss_is_over_its_own_count() -> None:
    targets = torch.tensor([[3, IGNORE, 5, IGNORE]])
    for loss, count in ((own("Smoothed", amount=0.1), 2), (own("huber"), None)):
        found = build_loss(loss).count(targets)
        assert (found if found is None else int(found)) == count


# --- memory ------------------------------------------------------------------------------------


def largest_tensors(config: Config, worker: Worker, losses: list) -> list[tuple[int, int]]:
    """Numbers in the largest tensor of a training step, and of an evaluation, with each loss."""
    found = []
    for loss in losses:
        ids = torch.zeros(config.batch_size, config.seq_len, dtype=torch.int64)
        with opened(replace(config, loss=loss), worker) as job:
            numbers = []
            for step in (job.run.pipeline.train, job.run.pipeline.evaluate):
                with Largest() as largest:
                    step({"inputs": ids, "targets": ids})
                numbers.append(largest.numbers)
        found.append(tuple(numbers))
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zbvzerobubble"])
def test_logits_of_all_tokens_are_never_in_memory(schedule: str, tmp_path: Path) -> None:
    vocabulary, chunk = 4096, 8
    data = SyntheticData(vocab_size=vocabulary)
    config = tiny(1, 1, schedule, data=data, batch_size=8, layers=2)
    tokens = make_plan(config).model_graph.microbatch_size * config.seq_len
    losses = [CrossEntropy(), ChunkedCrossEntropy(chunk=chunk)]
    [(whole, (train, evaluation))] = run_world(largest_tensors, config, tmp_path, losses)
    assert whole == (tokens * vocabulary,) * 2, "so it is seen"
    weight = vocabulary * config.model.args["hidden_size"]  # of the head, and its gradient
    assert chunk * vocabulary < train == evaluation == weight < tokens * vocabulary


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, key, reason",
    [
        (regression(own("mean")), "loss.name", "mean or another scalar; return the losses unred"),
        (regression(own("mean_of_one")), "loss.name", "1 losses for 16 sequences and 1 for 32"),
        (regression(own("looking")), "loss.name", "reads the values of tensors"),
        (regression(own("pair")), "loss.name", "it returns a tuple of 2 and not a tensor"),
        (regression(own("hubert")), "loss.name", "write loss.name=support.losses.huber"),
        (regression(own("huber", detla=1)), "loss.detla", "has no such key; write loss.delta=1"),
        (regression(own("Smoothed")), "loss.name", "missing a required argument: 'amount'"),
        (regression(Custom("nowhere.f")), "loss.name", "importing nowhere failed"),
        (regression(Custom("support.losses.IGNORE")), "loss.name", "is no function"),
        (
            regression(own("likelihood")),
            "loss.name",
            "with an output that is a tensor [16, 16, 2] and targets [16, 16, 2] it raised "
            "AttributeError: 'Tensor' object has no attribute 'value'",
        ),
        (
            regression(CrossEntropy()),
            "loss.name",
            "not logits [16, 16, 2] and targets [16, 16, 2] of float32",
        ),
        (tiny(loss=Mse()), "loss.name", "one shape, not [16, 16, 64] and [16, 16]"),
        (
            regression(Mse(), returns="dataclass"),
            "loss.name",
            "returns a Guess of 'value' [16, 16, 2], 'spread' [16, 16, 2], in which nothing",
        ),
        (regression(Mse(), returns="tuple"), "loss.name", "returns a tuple of 2, in which nothing"),
        (ended("mixed"), "loss.name", "ends with sub and not with a linear layer"),
        (ended("summed"), "loss.name", "(cumsum) is not done token by token; write loss=cross_ent"),
        (ended("inside", split=BalanceSplit(balance=[4])), None, ""),
        (tiny(loss=CHUNKED), None, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_loss_config_is_refused(config: Config, key: str | None, reason: str) -> None:
    problems = preflight(config)
    if key is None:
        assert not problems
        return
    (problem,) = problems
    assert problem.key == key and reason in str(problem), str(problem)
