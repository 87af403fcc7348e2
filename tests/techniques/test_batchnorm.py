"""Batch norm: running statistics of the whole batch, once a step, saved and resumed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.models import tiny
from support.skipped_step import three_steps
from support.vision_models import of_images
from support.world import run_world
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.computation import ActivationCheckpoint, Precision
from titanlike.core.config.groups.jobs import Checkpoint, Validation
from titanlike.core.config.groups.optimization import ConstantLr
from titanlike.core.config.groups.pipeline import PointSplit, Schedule
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.distributed.mesh import open_mesh
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.core.training.loop import train
from titanlike.core.training.train_plan import make_plan
from titanlike.techniques.batchnorm import BatchNorms


def differences(config: Config, worker: Worker) -> list[float]:
    """Of running statistics of parts in two microbatches from those of torch for the whole
    batch."""
    x = 1e3 + torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double()
    norm, right = nn.BatchNorm1d(3), nn.BatchNorm1d(3).double()
    stage = nn.Sequential(norm)
    norms = BatchNorms(open_mesh(config, worker))
    norms.on_weights(stage)
    with norms.training(torch.ones(())):
        for microbatch in x.chunk(2)[worker.rank].split([2, 4]):
            stage(microbatch.float())
    norms.after_update(None)
    right(x)
    pairs = ((norm.running_mean, right.running_mean), (norm.running_var, right.running_var))
    return [(mine - other).abs().max().item() for mine, other in pairs]


def test_batch_norm_statistics_cover_the_global_batch(tmp_path: Path) -> None:
    """With a mean far away, beside which the digits of the variance would be lost."""
    for mean, variance in run_world(differences, tiny(dp=2), tmp_path):
        assert mean < 1e-4 and variance < 1e-4


@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_a_skipped_step_updates_no_statistics(recomputed: str, tmp_path: Path) -> None:
    config = of_images("Tower", 1, 1, activation_checkpoint=ActivationCheckpoint(recomputed))
    [((first, second, third), _)] = run_world(three_steps, config, tmp_path)
    for name in first:
        assert torch.equal(first[name], second[name])
        assert not torch.equal(second[name], third[name])
    # one call a step in the blocks, two of the norm that is used twice
    assert third["blocks.0.norm.num_batches_tracked"] == 2
    assert third["twice.num_batches_tracked"] == 4


def curve(folder: Path) -> list[tuple[float, float]]:
    return [(row["loss"], row["val_loss"]) for row in read_jsonl(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_statistics_continue_after_a_stop_in_the_same_layout_and_in_another(tmp_path: Path) -> None:
    saving = {"validation": Validation(every=1, batches=1), "lr": ConstantLr(warmup=0)}
    saving |= {"checkpoint": Checkpoint(every=1), "batch_size": 12}
    # its second stage is a batch norm without weights: it has buffers alone
    split = PointSplit(points=["bn1", "relu"])
    bare = of_images("ResNet", 3, 1, Schedule("1f1b", 6), split=split, **saving)
    # six groups of two rows here, too
    other = of_images("ResNet", 1, 2, Schedule("1f1b", 3), **saving)
    whole, part = tmp_path / "whole", tmp_path / "part"
    run_world(train, replace(bare, steps=3), whole)
    run_world(train, replace(bare, steps=1), part)
    shutil.copytree(part, tmp_path / "other")
    run_world(train, replace(bare, steps=3), part)
    run_world(train, replace(other, steps=3), tmp_path / "other")
    truth = curve(whole)
    assert len(truth) == 3 and curve(part) == truth  # validation uses the running statistics
    for mine, right in zip(curve(tmp_path / "other"), truth, strict=True):
        assert mine == pytest.approx(right, abs=1e-5)


# --- what is refused ---------------------------------------------------------------------------


class Synced(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4), nn.Flatten(), nn.Linear(256, 4))


class Instances(nn.Sequential):
    def __init__(self) -> None:
        norm = nn.InstanceNorm2d(4, track_running_stats=True)
        super().__init__(nn.Conv2d(3, 4, 1), norm, nn.Flatten(), nn.Linear(256, 4))


class Untracked(nn.Sequential):
    def __init__(self) -> None:
        norm = nn.BatchNorm2d(4, track_running_stats=False)
        super().__init__(nn.Conv2d(3, 4, 1), norm, nn.Flatten(), nn.Linear(256, 4))


class Again(nn.Module):
    """Its first norm is used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv, self.head = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(self.norm(x))).mean((2, 3)))


CONV = {"split": PointSplit(points=["conv"])}


@pytest.mark.parametrize(
    "model, changes, reason",
    [
        (Synced, {}, "its 1 is a SyncBatchNorm.*; nn.BatchNorm2d"),
        (Instances, {}, "its 1 is an instance norm.*write track_running_stats=False"),
        (Untracked, {}, "its 1 is a batch norm without.*write track_running_stats=True there"),
        (None, {"precision": Precision("bf16")}, "precision=bf16: its bn1.*precision=fp32"),
        (Again, CONV, "two stages call norm.*; .*a module for each"),
    ],
)
def test_unsupported_batch_norms_are_refused(
    model: type | None, changes: dict, reason: str
) -> None:
    config = of_images("ResNet", 2, 1, **changes)
    if model is not None:
        config = replace(config, model=Custom(f"{__name__}.{model.__name__}", {}))
    with pytest.raises(ConfigError, match=reason):
        make_plan(config)
    if model is Untracked:  # on purpose
        make_plan(replace(config, mixes_samples=True))
    if model is Again:
        make_plan(replace(config, split=PointSplit(points=["head"])))
