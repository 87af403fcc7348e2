"""Models of images: skip connections over stages, and batch norm with the whole batch's statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models_for_tests import SCHEDULES, tiny
from world import run_world

from titanlike.config.schema import (
    BalanceSplit,
    Config,
    Custom,
    PointSplit,
    Schedule,
    Sgd,
)
from titanlike.verification import verify

IMAGES = Custom("vision_models_for_tests.images", {"size": 8})
MASKS = Custom("vision_models_for_tests.images", {"size": 8, "masks": True})
STAGES = PointSplit(points=["down.2", "up.0", "up.2"])  # 3 skips: over 1, 2 and 3 boundaries


def of_images(model: str, pp: int, dp: int, schedule: Any = "1f1b", **changes: Any) -> Config:
    args = changes.pop("args", {})
    data = MASKS if model == "UNet" else IMAGES
    # SGD: Adam's first update does not show the size of a gradient
    return tiny(
        pp,
        dp,
        schedule,
        model=Custom(f"vision_models_for_tests.{model}", args),
        **{"data": data, "seq_len": 1, "optimizer": Sgd(), **changes},
    )


# the first stage's output is used in every later one, the image again in the last
LATE = PointSplit(points=["blocks.1", "blocks.3", "blocks.5"])


def assert_proven(config: Config, folder: Path) -> None:
    results = run_world(verify, config, folder)
    assert {result["exit_code"] for result in results} == {0}, (folder / "rank0.out").read_text()


@pytest.mark.parametrize(
    "config",
    {
        "U-Net": of_images("UNet", 4, 2, split=STAGES),
        "U-Net, interleaved": of_images("UNet", 2, 2, "interleaved1f1b", split=STAGES),
        "U-Net, zero bubble": of_images("UNet", 2, 2, "zbvzerobubble", split=STAGES),
        "ResNet": of_images("ResNet", 2, 2),
        "ResNet, interleaved": of_images("ResNet", 3, 2, "interleaved1f1b", batch_size=12),
        "ResNet, zero bubble": of_images("ResNet", 2, 2, "zbvzerobubble"),
        "ResNet, replicas of shards": of_images("ResNet", 1, 4, Schedule("1f1b", 2), replicate=2),
        "average of all steps": of_images("ResNet", 2, 2, args={"momentum": None}),
        "recomputed": of_images("Tower", 2, 2, args={"recompute": True}),
        "recomputed, zero bubble": of_images(
            "Tower", 2, 1, "zbvzerobubble", args={"recompute": True}
        ),
        "used late": of_images("Late", 4, 1, split=LATE),
        "Sequential": of_images(
            "sequential", 3, 2, split=BalanceSplit(balance=[3, 2, 3]), batch_size=12
        ),
    }.items(),
    ids=lambda item: item[0],
)
def test_models_of_images_in_layouts(config: tuple[str, Config], tmp_path: Path) -> None:
    assert_proven(config[1], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "csv"])
@pytest.mark.parametrize("model", ["UNet", "Late"])
def test_skips_over_stages_under_every_schedule(model: str, schedule: str, tmp_path: Path) -> None:
    one_stage = schedule in ("gpipe", "1f1b")
    split = STAGES if model == "UNet" else LATE
    assert_proven(of_images(model, 4 if one_stage else 2, 2, schedule, split=split), tmp_path)
