"""A skip connection goes to its consumer in one message, or stays on the rank of both, and its
gradient comes back the same way: with one process's gradients, under every schedule."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from support.models import tiny
from support.opened import opened
from support.proven import assert_proven
from support.vision_models import of_images
from support.world import run_world
from titanlike.core.config.groups.data import SyntheticData
from titanlike.core.config.groups.pipeline import LoopedSchedule, PointSplit
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.pipeline.schedules import LOOPED, SCHEDULES, V_SCHEDULES
from titanlike.core.torch_private import pipeline_runtime
from titanlike.planning.estimate import make_estimate

POINTS = PointSplit(points=["down.2", "up.0", "up.2"])  # down.0 is used by stage 3, down.1 by 2
MICROBATCHES = 8


class Step(NamedTuple):
    gradients: dict[str, Tensor]
    losses: list[float]  # in training, and in evaluation after it
    sent: dict[tuple[int, int], int]  # (rank, bytes) -> messages to it in the training step


def step(config: Config, worker: Worker) -> Step:
    sent: Counter[tuple[int, int]] = Counter()
    post = pipeline_runtime._post

    def counted(operations: list[Any]) -> list[Any]:
        sent.update((o.peer, o.tensor.nbytes) for o in operations if o.op.__name__ == "isend")
        return post(operations)

    pipeline_runtime._post = counted
    with opened(config, worker) as job:
        batch = job.batch()
        loss, _ = job.run.pipeline.train(batch)
        messages = dict(sent)
        evaluated, _ = job.run.pipeline.evaluate(batch)
        named = {name: p.grad for name, p in job.parameters() if p.grad is not None}
        return Step(named, [loss.item(), evaluated.item()], messages)


def assert_as_in_one_process(config: Config, folder: Path, by_one: Config) -> list[Step]:
    """Returns what each rank did."""
    (right,) = run_world(step, by_one, folder / "one")
    steps = run_world(step, config, folder / "ranks")
    found = {name: gradient for rank in steps for name, gradient in rank.gradients.items()}
    assert found.keys() == right.gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, right.gradients[name], rtol=1e-4, atol=1e-6)
    assert steps[0].losses == pytest.approx(right.losses, rel=1e-6)
    return steps


def unet(pp: int, schedule: Any, **changes: Any) -> Config:
    return of_images("UNet", pp, 1, schedule, batch_size=MICROBATCHES, **changes)


def test_a_skip_connection_bypasses_the_stages_between(tmp_path: Path) -> None:
    config = unet(4, "1f1b", split=POINTS)
    steps = assert_as_in_one_process(config, tmp_path, unet(1, "gpipe"))
    first, _, third, last = (rank.sent for rank in steps)
    # of one image: 4, 8 and 8 channels of 8, 4 and 2 pixels squared, behind two poolings
    near = {(1, 4 * 8 * 2 * 2): 8}
    assert near | first == near | {(2, 4 * 8 * 4 * 4): 8, (3, 4 * 4 * 8 * 8): 8}
    assert {way: n for way, n in third.items() if way[0] == 0} == {(0, 4 * 8 * 4 * 4): 8}
    assert {way: n for way, n in last.items() if way[0] == 0} == {(0, 4 * 4 * 8 * 8): 8}
    plan = make_estimate(config)
    counted = near.items() <= first.items()  # 2.15 posts messages to the next stage elsewhere
    for rank, done in enumerate(steps if counted else ()):
        sent = sum(nbytes * count for (_, nbytes), count in done.sent.items())
        assert plan.traffic(rank)["messages"] == sent


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("pp", [2, 3])
def test_skip_connections_match_one_process_under_every_schedule(
    name: str, pp: int, tmp_path: Path
) -> None:
    schedule: Any = LoopedSchedule(name, stages_per_rank=2) if name in LOOPED else name
    config = unet(pp, schedule)
    config.batch_size = 12 if pp == 3 else 8
    one = replace(unet(1, "gpipe"), batch_size=config.batch_size)
    steps = assert_as_in_one_process(config, tmp_path, one)
    if name in V_SCHEDULES and pp == 2:  # stages 0 and 3 are on one rank: no message is as large
        assert max(nbytes for rank in steps for _, nbytes in rank.sent) < 4 * 4 * 8 * 8


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("name", ["TwoTowers", "HelpedInTraining", "Dense"])
def test_models_with_other_skip_connections_match_one_process(
    name: str, zero: int, tmp_path: Path
) -> None:
    model = Custom(f"support.forwards.{name}")
    points = ["blocks.1", "other" if name == "TwoTowers" else "blocks.2", "blocks.3"]
    more = {"model": model, "data": SyntheticData(vocab_size=64), "optimizer": Sgd()}
    config = tiny(pp=4, dp=2 if zero > 1 else 1, split=PointSplit(points=points), **more)
    if zero > 1:
        config.fsdp.zero = zero
        assert_proven(config, tmp_path)
    else:
        assert_as_in_one_process(config, tmp_path, tiny(pp=1, schedule="gpipe", **more))
