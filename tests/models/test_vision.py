"""Models of images: skip connections over stages, and batch norm with the whole batch's statistics."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cells import cells, slow
from support.models import SCHEDULES
from support.proven import assert_proven
from support.vision_configs import of_images
from titanlike.config.schema import (
    BalanceSplit,
    Config,
    PointSplit,
    Schedule,
)
from titanlike.pipeline.from_config import stage_count

STAGES = PointSplit(points=["down.2", "up.0", "up.2"])  # 3 skips: over 1, 2 and 3 boundaries


# the first stage's output is used in every later one, the image again in the last
LATE = PointSplit(points=["blocks.1", "blocks.3", "blocks.5"])


LAYOUTS = {
    "ResNet": of_images("ResNet", 2, 2),
    "recomputed, zero bubble": of_images("Tower", 2, 1, "zbvzerobubble", args={"recompute": True}),
    "used late": of_images("Late", 4, 1, split=LATE),
}
MORE_LAYOUTS = {
    "Sequential": of_images(
        "sequential", 3, 2, split=BalanceSplit(balance=[3, 2, 3]), batch_size=12
    ),
    "average of all steps": of_images("ResNet", 2, 2, args={"momentum": None}),
    "ResNet, replicas of shards": of_images("ResNet", 1, 4, Schedule("1f1b", 2), replicate=2),
    "U-Net": of_images("UNet", 4, 2, split=STAGES),
    "U-Net, interleaved": of_images("UNet", 2, 2, "interleaved1f1b", split=STAGES),
    "ResNet, interleaved": of_images("ResNet", 3, 2, "interleaved1f1b", batch_size=12),
    "ResNet, zero bubble": of_images("ResNet", 2, 2, "zbvzerobubble"),
    "recomputed": of_images("Tower", 2, 2, args={"recompute": True}),
}
REST = {  # left out by .ci/run
    "average of all steps": of_images("ResNet", 2, 2, args={"momentum": None}),
    "U-Net, zero bubble": of_images("UNet", 2, 2, "zbvzerobubble", split=STAGES),
    "recomputed, zero bubble": of_images("Tower", 2, 1, "zbvzerobubble", args={"recompute": True}),
    "Sequential": of_images(
        "sequential", 3, 2, split=BalanceSplit(balance=[3, 2, 3]), batch_size=12
    ),
    "used late": of_images("Late", 4, 1, split=LATE),
}


@pytest.mark.parametrize("config", cells(LAYOUTS, MORE_LAYOUTS, REST))
def test_models_of_images_in_layouts(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path)


SPLITS = {"UNet": STAGES, "Late": LATE}
EVERY = [(model, name) for model in SPLITS for name in SCHEDULES if name != "csv"]


@pytest.mark.parametrize("model, schedule", slow(*EVERY))
def test_skips_over_stages_under_every_schedule(model: str, schedule: str, tmp_path: Path) -> None:
    split = SPLITS[model]
    of_a_rank = stage_count(of_images(model, 1, 2, schedule).schedule, 1)
    assert_proven(of_images(model, 4 // of_a_rank, 2, schedule, split=split), tmp_path)
