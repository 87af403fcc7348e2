"""Metrics of one's own: in every layout what a plain computation finds, of steps and validations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.cells import cells, meshes
from support.models import tiny
from support.runs import trained
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.computation import Numerics
from titanlike.core.config.groups.data import TokenData
from titanlike.core.config.groups.jobs import Checkpoint, Validation
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy, ConstantLr
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.watching import Metrics
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.registry import open_data
from titanlike.core.data.sources import IGNORE
from titanlike.core.training.measured import MEASURED
from titanlike.core.training.preflight import preflight
from titanlike.use.generate import load_model

OWN = {"accuracy": f"{__name__}.accuracy", "margin": f"{__name__}.margin"}


def accuracy(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    counts = targets != IGNORE
    return ((output.argmax(-1) == targets) & counts).sum(), counts.sum()


def margin(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """How far the best is before the second."""
    best = output.float().topk(2).values
    return (best[..., 0] - best[..., 1]).sum(), targets.numel()


def by_sequence(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    right = (output.argmax(-1) == targets).float().mean(1) > 0.01
    return right.sum(), torch.tensor(len(targets))


def mean_alone(output: Tensor, targets: Tensor) -> Tensor:
    return (output.argmax(-1) == targets).float().mean()


def of_the_batch(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return output.std(), torch.tensor(1)


def config_in(folder: Path, **changes: Any) -> Config:
    ids = np.random.default_rng(0).integers(0, 64, 6000)
    for name, part in {"train": ids[:4001], "held": ids[4001 : 4001 + 37 * 16 + 1]}.items():
        part.astype("<u2").tofile(folder / f"{name}.bin")
    config = tiny(
        layers=2,
        data=TokenData(path=str(folder / "train.bin"), vocab_size=64),
        steps=4,
        lr=ConstantLr(),
        log_every=2,
        metrics=Metrics(own=OWN),
        validation=Validation(2, 0, {"path": str(folder / "held.bin")}),
        checkpoint=Checkpoint(every=1, keep=0),
        run_dir=str(folder / "run"),
    )
    return replace(config, **changes)


def plain(config: Config, step: int) -> dict[str, float]:
    """By the weights that a step began with, and those that it ended with."""
    alone = replace(config, dp=1)
    data, device = open_data(alone), torch.device("cpu")
    at = Path(config.run_dir) / "checkpoints"

    def numbers(step: int, samples: list[dict[str, Tensor]]) -> dict[str, float]:
        model = load_model(str(at / f"step-{step:08d}"), device, torch.float32).model
        inputs, targets = (torch.stack([s[n] for s in samples]) for n in ("inputs", "targets"))
        with torch.no_grad():
            logits = model(inputs)
        found = {name: function(logits, targets) for name, function in FUNCTIONS.items()}
        return {name: float(total / count) for name, (total, count) in found.items()}

    batch = next(batches(data.train, alone, dp_rank=0, start_step=step - 1))
    trained = [{n: value[i] for n, value in batch.items()} for i in range(config.batch_size)]
    held = [data.validation[i] for i in range(len(data.validation))]
    assert len(held) % config.batch_size
    of_validation = {f"val_{n}": value for n, value in numbers(step, held).items()}
    return numbers(step - 1, trained) | of_validation


FUNCTIONS = {"accuracy": accuracy, "margin": margin}
CHUNKED = ChunkedCrossEntropy(chunk=24)
LAYOUTS = {"tp=2, chunked": {"tp": 2, "loss": CHUNKED}, **meshes("pp=2 dp=2", "cp=2")}
MORE_LAYOUTS = {
    **meshes("one process", "tp=2", "pp=2 cp=2 tp=2"),
    "chunked": {"loss": CHUNKED},
    "pp=2, chunked, gpipe": {"pp": 2, "loss": CHUNKED, "schedule": Schedule("gpipe")},
    "exact": {"pp": 2, "dp": 2, "numerics": Numerics(name="exact")},
}


@pytest.mark.parametrize("layout", cells(LAYOUTS, MORE_LAYOUTS, most=1))
def test_a_custom_metric_matches_plain_torch_in_every_layout(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    config = config_in(tmp_path, **layout)
    rows = {row["step"]: row for row in trained(config)}
    for step in (2, 4):
        expected = plain(config, step)
        found = {name: rows[step][name] for name in expected}
        assert found == pytest.approx(expected, rel=1e-5)
    assert "accuracy" not in rows[1] and "val_accuracy" not in rows[3]


@pytest.mark.slow
def test_custom_metrics_are_bitwise_equal_in_exact_layouts(tmp_path: Path) -> None:
    found = []
    for layout in ({}, {"pp": 2}, {"dp": 2}):
        folder = tmp_path / "-".join(layout)
        folder.mkdir(exist_ok=True)
        rows = trained(config_in(folder, numerics=Numerics(name="exact"), **layout))
        keys = ("margin", "val_margin", "accuracy", "val_loss")
        found.append([row.get(key) for row in rows for key in keys])
    assert found[0] == found[1] == found[2] and any(found[0])


@pytest.mark.parametrize(
    ("function", "changes", "told"),
    [
        ("mean_alone", {}, "return a sum and a count"),
        ("of_the_batch", {}, "over two samples do not add up"),
        ("by_sequence", {"cp": 2}, "over parts of a sequence .* or cp=1 and loss=cross_entropy"),
        ("by_sequence", {"loss": CHUNKED}, "over parts of a sequence"),
        ("nothing", {}, "has no nothing"),
    ],
)
def test_a_metric_that_depends_on_the_layout_is_refused(
    function: str, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    own = {"mine": f"{__name__}.{function}"}
    with pytest.raises(ConfigError, match=f"metrics.own.mine=.*{told}"):
        raise ConfigError(preflight(config_in(tmp_path, metrics=Metrics(own=own), **changes)))
    assert function != "by_sequence" or not preflight(
        config_in(tmp_path, metrics=Metrics(own=own), pp=2)
    )


@pytest.mark.parametrize(
    "name", [*(entry.name for entry in MEASURED), "grad_norm", "dropped", "busiest_expert"]
)
def test_a_metric_is_not_named_as_another_of_the_step(name: str, tmp_path: Path) -> None:
    config = config_in(tmp_path, metrics=Metrics(own={name: f"{__name__}.nothing"}))
    with pytest.raises(ConfigError, match=f"metrics.own.{name}=.*another number"):
        raise ConfigError(preflight(config))
