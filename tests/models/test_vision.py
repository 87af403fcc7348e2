"""Models of images: skip connections over stages, and batch norm with the whole batch's
statistics."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cells import slow
from support.proven import assert_proven
from support.vision_models import of_images
from titanlike.core.config.groups.pipeline import BalanceSplit, PointSplit
from titanlike.core.config.schema import Config

SKIPS = PointSplit(points=["down.2", "up.0", "up.2"])  # 3 skips: over 1, 2 and 3 boundaries
# the first stage's output is used in every later one, the image again in the last
LATE = PointSplit(points=["blocks.1", "blocks.3", "blocks.5"])
BALANCE = BalanceSplit(balance=[3, 2, 3])


@pytest.mark.parametrize(
    "config",
    [
        *slow(
            of_images("Tower", 1, 2, args={"recompute": True}),
            of_images("Late", 2, 1, "interleaved1f1b", split=LATE),
            of_images("Late", 4, 1, split=LATE),
            of_images("UNet", 4, 2, split=SKIPS),
            of_images("UNet", 2, 2, "zbvzerobubble", split=SKIPS),
            of_images("Tower", 2, 1, "zbvzerobubble", args={"recompute": True}),
            of_images("ResNet", 2, 2, args={"momentum": None}),
            of_images("ResNet", 3, 2, "interleaved1f1b", batch_size=12),
            of_images("sequential", 3, 2, split=BALANCE, batch_size=12),
        ),
    ],
    ids=lambda config: f"{config.model.name.rpartition('.')[2]} {config.schedule.name}",
)
def test_vision_models_in_layouts_match_one_process(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path)
