"""Configs of the vision models."""

from __future__ import annotations

from typing import Any

from support.models import tiny
from titanlike.config.optimizers.sgd import Sgd
from titanlike.config.schema import Config, Custom

IMAGES = Custom("support.vision_models.images", {"size": 8})
MASKS = Custom("support.vision_models.images", {"size": 8, "masks": True})


def of_images(model: str, pp: int, dp: int, schedule: Any = "1f1b", **changes: Any) -> Config:
    args = changes.pop("args", {})
    data = MASKS if model == "UNet" else IMAGES
    # SGD: Adam's first update does not depend on the gradient's scale
    return tiny(
        pp=pp,
        dp=dp,
        schedule=schedule,
        model=Custom(f"support.vision_models.{model}", args),
        **{"data": data, "seq_len": 1, "optimizer": Sgd(), **changes},
    )
