"""split=trace: torch's own tracer, cut at modules of any depth; what it cannot do is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.cells import slow
from support.models import tiny
from support.proven import assert_proven
from support.vision_models import of_images
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.pipeline import TraceSplit
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.graph.trace_forward import trace_forward
from titanlike.core.training.train_plan import make_plan


def traced(*points: str, schedule: str = "1f1b", **changes: Any) -> Config:
    return tiny(pp=2, schedule=schedule, split=TraceSplit(points=list(points)), layers=4, **changes)


SKIPS = TraceSplit(points=["down.2", "up.0.1", "up.2"])  # the second is inside of a block


@pytest.mark.parametrize(
    "config",
    [
        *slow(
            traced("model.layers.1.self_attn.k_proj", tied=True),
            of_images("UNet", 2, 1, "zbvzerobubble", split=SKIPS),
        ),
    ],
    ids=["1f1b", "U-Net"],
)
def test_traced_models_in_layouts(config: Config, tmp_path: Path) -> None:
    assert_proven(config, tmp_path)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_traced_in_the_mode_of_the_model(training: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        batch = {"inputs": torch.empty(2, 8)}
    recording = trace_forward(model.train(training), batch)
    assert any(node.random for node in recording.nodes) == training


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        if x.sum() > 0:
            x = -x
        return self.head(x)


class Constant(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x) * torch.tensor([1.0, 2.0] * 4))


class Counting(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.head(self.embedding(x))


@pytest.mark.parametrize(
    "model, told",
    [
        ("Branching", "tracer cannot follow its forward.*split=points or split=even"),
        ("Constant", "creates a tensor from numbers.*register_buffer"),
        ("Counting", "its forward changes steps.*split=points or split=even"),
    ],
)
def test_an_untraceable_model_is_refused_with_an_alternative(model: str, told: str) -> None:
    model_of_ours = Custom(f"test_trace.{model}", {})
    with pytest.raises(ConfigError, match=told):
        make_plan(traced("head", model=model_of_ours))


def test_batch_norms_are_refused() -> None:
    with pytest.raises(ConfigError, match="split=trace: the tracer cannot see.*split=points"):
        make_plan(of_images("ResNet", 2, 1, split=TraceSplit(points=["layer2"])))


def test_the_nearest_module_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no unit model.layers.2.mpl; .*model.layers.2.mlp"):
        make_plan(traced("model.layers.2.mpl"))
