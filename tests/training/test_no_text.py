"""Data that are no text: datasets as a function returns them, in every layout; nothing speaks of
tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import titanlike
from support.cells import cells, meshes
from support.models import tiny
from support.runs import trained
from titanlike.core.config.groups.jobs import Checkpoint, Validation
from titanlike.core.config.groups.optimization import ConstantLr, Mse
from titanlike.core.config.groups.user_code import Custom, Model
from titanlike.core.config.groups.watching import Metrics
from titanlike.core.config.schema import Config
from titanlike.core.data.registry import DataError, open_data
from titanlike.core.metrics.console import Console
from titanlike.planning.estimate import make_estimate
from titanlike.planning.estimate_text import as_data, as_text
from titanlike.watch.report import read_history


class Unet(nn.Module):
    """[B, 1, 64] -> [B, 1, 64]: two scales, joined by a skip connection."""

    def __init__(self, *, width: int = 8):
        super().__init__()
        self.down = nn.Conv1d(1, width, 5, padding=2)
        self.deep = nn.Conv1d(width, width, 5, stride=2, padding=2)
        self.up = nn.ConvTranspose1d(width, width, 4, stride=2, padding=1)
        self.out = nn.Conv1d(2 * width, 1, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        fine = torch.relu(self.down(x))
        coarse = torch.relu(self.up(torch.relu(self.deep(fine))))
        return self.out(torch.cat([fine, coarse], 1))


def waves(count: int, seed: int) -> TensorDataset:
    """(noisy, clean) waves."""
    generator = torch.Generator().manual_seed(seed)
    phase = 2 * math.pi * torch.rand(count, 1, 1, generator=generator)
    clean = torch.sin(torch.linspace(0, 12, 64) + phase)
    return TensorDataset(clean + 0.3 * torch.randn(count, 1, 64, generator=generator), clean)


def one(count: int = 70, seed: int = 0) -> Dataset[Any]:
    return waves(count, seed)


def both() -> tuple[Dataset[Any], Dataset[Any]]:
    return waves(64, 0), waves(11, 1)


def near(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The share of points that are within 0.5."""
    return ((output - targets).abs() < 0.5).sum(), torch.tensor(targets.numel())


BOTH = Custom(f"{__name__}.both")


def unet(folder: Path, **changes: Any) -> Config:
    config = tiny(
        model=Model(f"{__name__}.Unet"),
        data=BOTH,
        loss=Mse(),
        steps=4,
        log_every=2,
        lr=ConstantLr(),
        metrics=Metrics(own={"near": f"{__name__}.near"}),
        validation=Validation(2, 0),
        checkpoint=Checkpoint(every=2, keep=0),
        run_dir=str(folder / "run"),
    )
    return replace(config, **changes)


LAYOUTS, MORE_LAYOUTS = meshes("pp=2 dp=2"), meshes("dp=4", "pp=3")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return trained(unet(tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize("layout", cells(LAYOUTS, MORE_LAYOUTS))
def test_layouts_have_the_losses_of_one_process_and_those_of_all_of_a_ragged_set(
    layout: dict[str, Any], alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    rows = trained(unet(tmp_path, **layout))
    keys = ("loss", "val_loss", "near", "val_near", "samples")
    for row, expected in zip(rows, alone, strict=True):
        ours, its = ({key: each[key] for key in keys if key in each} for each in (row, expected))
        assert ours == pytest.approx(its, rel=1e-5)
    assert "val_near" in rows[1] and rows[3]["samples"] == 4 * 16


def test_a_ragged_set_has_the_loss_of_plain_torch(tmp_path: Path) -> None:
    """11 samples in batches of 16; targets are no ids, of which some could be left out."""
    config = unet(tmp_path)
    with titanlike.build(config) as run:
        weights, data = run.parameters(), open_data(config)
        samples = [data.validation[i] for i in range(11)]
        inputs, targets = (torch.stack([s[n] for s in samples]) for n in ("inputs", "targets"))
        with torch.no_grad():
            output = torch.func.functional_call(Unet(), weights, (inputs,))
        assert run.validate() == pytest.approx(F.mse_loss(output, targets).item(), rel=1e-6)


def test_no_output_mentions_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = unet(tmp_path)
    rows = trained(config)
    Console(steps=4, own=["near"]).step(rows[1])
    line = capsys.readouterr().out
    assert " samples/s" in line and "tok" not in line and " near 0." in line
    estimate = make_estimate(config)
    said = [as_text(estimate), str(as_data(estimate)), str(rows)]
    history = read_history(tmp_path / "run")
    assert {"samples_per_second", "near", "val_near"} <= history["curves"].keys()
    assert [point[1] for point in history["curves"]["loss"]] == [16, 32, 48, 64]
    for text in said:
        assert "token" not in text and "sequence" not in text


@pytest.mark.parametrize(
    ("data", "sizes"),
    [
        (BOTH, (64, 11)),
        (Custom(f"{__name__}.one"), (66, 4)),
        (Custom(f"{__name__}.one", {"validation_fraction": 0.5}), (35, 35)),
    ],
)
def test_a_function_returns_one_dataset_or_two(data: Custom, sizes: tuple[int, int]) -> None:
    opened = open_data(tiny(data=data))
    assert (len(opened.train), len(opened.validation)) == sizes and opened.vocab_size is None
    every = [opened.train[0], opened.validation[0]]
    assert all(sample["inputs"].shape == (1, 64) for sample in every)


def test_with_a_validation_set_all_of_the_data_is_trained_on() -> None:
    sets = {"clean": {"seed": 5, "count": 9}, "far": {"name": f"{__name__}.both"}}
    config = tiny(data=Custom(f"{__name__}.one"), validation=Validation(data=sets))
    opened = open_data(config)
    assert len(opened.train) == 70
    assert {name: len(each) for name, each in opened.validations.items()} == {"clean": 9, "far": 11}
    tokens = {"name": "synthetic", "vocab_size": 8}
    with pytest.raises(DataError, match="has samples of .* the same fields, dtypes and shapes"):
        open_data(replace(config, validation=Validation(data=tokens)))
    assert waves(3, 0)[0][0].shape == (1, 64)
