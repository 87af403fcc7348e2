"""Dropout: every dp rank, microbatch and stage has masks of its own, and a recomputation the
same."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.models import tiny
from support.opened import opened
from support.vision_models import of_images
from support.world import run_world
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker


class Masking(nn.Module):
    """Dropout that keeps its masks."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones_like(x), 0.5, self.training)
        if not x.is_meta:
            self.masks.append(mask.detach())
        return self.linear(x) * mask


class Masked(nn.Module):
    def __init__(self, *, dim: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, dim)
        self.layers = nn.ModuleList(Masking(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def a_step(
    config: Config, worker: Worker, again: str = ""
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train on one batch: masks, gradients and buffers of this rank."""
    with opened(config, worker, again) as job:
        job.train()
        for transform in job.run.transforms.values():
            transform.after_update(None)
    stages = job.run.stages
    masks = [m for stage in stages for x in stage.modules() for m in getattr(x, "masks", ())]
    held = {name: parameter.grad for name, parameter in job.parameters()}
    held |= {name: buffer for stage in stages for name, buffer in stage.named_buffers()}
    return masks, held if job.mesh.dp == 1 else {}


def a_step_of_each(_: Config, worker: Worker, configs: list[Config]) -> list[dict[str, Tensor]]:
    return [a_step(config, worker, f"{number}")[1] for number, config in enumerate(configs)]


def test_no_two_dropout_masks_are_equal(tmp_path: Path) -> None:
    config = tiny(pp=2, dp=2, model=Custom("test_dropout.Masked", {}), seq_len=4)
    results = run_world(a_step, config, tmp_path)
    masks = [mask for found, _ in results for mask in found]
    assert len(masks) == 4 * 2 * 8  # layers, dp ranks, microbatches
    assert not any(torch.equal(one, other) for one, other in combinations(masks, 2))


@pytest.mark.slow
def test_recomputation_changes_no_gradient_and_no_statistics(tmp_path: Path) -> None:
    how = ({"dropout": 0.3}, {"dropout": 0.3, "recompute": True}, {})
    configs = [of_images("Tower", 2, 1, "zbvzerobubble", args=args) for args in how]
    ranks = run_world(a_step_of_each, configs[0], tmp_path, configs)
    right, recomputed, plain = ({**one, **other} for one, other in zip(*ranks, strict=True))
    assert right.keys() == recomputed.keys() and len(right) > 20
    for name, value in right.items():
        torch.testing.assert_close(recomputed[name], value, rtol=0, atol=1e-6, msg=name)
    assert not torch.allclose(plain["stem.weight"], right["stem.weight"])  # dropout was on
