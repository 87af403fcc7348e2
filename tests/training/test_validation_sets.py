"""Validation sets of one's own: what a plain loop over each finds, in every layout and over a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from support.cells import cells, meshes
from support.models import tiny
from support.runs import train_each
from support.world import run_world
from titanlike.core.config.groups.data import TokenData
from titanlike.core.config.groups.jobs import Checkpoint, Validation
from titanlike.core.config.groups.optimization import ConstantLr
from titanlike.core.config.schema import Config
from titanlike.core.data import registry
from titanlike.core.data.registry import DataError, open_data
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.use.generate import load_model

VOCABULARY = 64
# name -> tokens: of 16 sequences in a batch two that are ragged, one with less than a batch, one
# that is a batch
SIZES = {"code": 37 * 16 + 1, "web": 5 * 16 + 3, "books": 16 * 16 + 1}


def token_file(folder: Path, name: str, count: int) -> str:
    path = folder / f"{name}.bin"
    ids = np.random.default_rng(len(name)).integers(0, VOCABULARY, count)
    ids.astype("<u2").tofile(path)
    return str(path)


def sets_in(folder: Path) -> Config:
    data = TokenData(path=token_file(folder, "train", 4001), vocab_size=VOCABULARY)
    sets = {name: {"path": token_file(folder, name, count)} for name, count in SIZES.items()}
    return tiny(
        layers=2,
        data=data,
        steps=4,
        lr=ConstantLr(),
        validation=Validation(every=2, batches=0, data=sets),
        checkpoint=Checkpoint(every=2, keep=0),
    )


def by_hand(config: Config, step: int) -> dict[str, float]:
    """The loss of each set, a sample at a time."""
    found = {}
    checkpoint = Path(config.run_dir) / "checkpoints" / f"step-{step:08d}"
    model = load_model(str(checkpoint), torch.device("cpu"), torch.float32).model
    for name, source in open_data(config).validations.items():
        samples = [source[i] for i in range(len(source))]
        with torch.no_grad():
            losses = [F.cross_entropy(model(s["inputs"][None])[0], s["targets"]) for s in samples]
        found[f"val_loss/{name}"] = float(torch.stack(losses).double().mean())
    return found | {"val_loss": sum(found.values()) / len(found)}


LAYOUTS = meshes("pp=2 dp=2")
MORE_LAYOUTS = meshes("one process", "tp=2", "cp=2 dp=2")


@pytest.mark.parametrize("layout", cells(LAYOUTS, MORE_LAYOUTS))
def test_every_validation_set_matches_a_plain_loop_in_every_layout(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    config = replace(sets_in(tmp_path), run_dir=str(tmp_path / "run"), **layout)
    Path(config.run_dir).mkdir()
    run_world(train_each, config, tmp_path / "world", [replace(config, steps=2), config])
    rows = {row["step"]: row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")}
    assert rows.keys() == {1, 2, 3, 4}
    for step in (2, 4):
        found = {key: value for key, value in rows[step].items() if key.startswith("val_")}
        assert found == pytest.approx(by_hand(config, step), abs=3e-6)
    assert not any(key.startswith("val_") for key in rows[1] | rows[3])


def test_a_validation_set_may_change_on_a_resume_but_not_the_data(tmp_path: Path) -> None:
    config = replace(sets_in(tmp_path), run_dir=str(tmp_path / "run"))
    Path(config.run_dir).mkdir()
    other = {"code": {"path": token_file(tmp_path, "others", 333)}}
    then = replace(config, validation=Validation(2, 0, other))
    run_world(train_each, config, tmp_path / "world", [replace(config, steps=2), then])
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert rows[3]["val_loss"] == rows[3]["val_loss/code"] and "val_loss/web" not in rows[3]
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "validation code: 333 tokens" in events and "validation web: None, was" in events
    assert "training" not in events.partition("data_changed")[2].partition("\n")[0]
    without = replace(then, validation=Validation(), steps=6)  # of which a part is held out
    with pytest.raises(AssertionError, match="data.changed=true"):
        run_world(train_each, config, tmp_path / "again", [without])


def test_with_a_validation_set_all_of_the_data_is_trained_on(tmp_path: Path) -> None:
    config = sets_in(tmp_path)
    assert len(open_data(config).train) == 4000 // 16
    without = replace(config, validation=Validation())
    assert len(open_data(without).train) == 3800 // 16


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"path": "none.bin"}, "validation.data.path=none.bin: there is no such file"),
        ({"pth": "a"}, "validation.data.pth=a: unknown key; write validation.data.path=a"),
        ({"a/b": {"path": "a"}}, "validation.data.a/b=.* a name has"),
        ({"a": {"name": "nope"}}, "validation.data.a.name=nope: no such choice"),
        ({"path": "code.bin", "vocab_size": 65}, "has 65 token ids, and the training data have 64"),
        ({"name": "mixture"}, "is mixed by weights, for training alone"),
    ],
)
def test_an_unknown_validation_set_is_refused_before_launch(
    given: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = sets_in(tmp_path)
    wrong = replace(config, validation=replace(config.validation, data=given))
    (problem,) = registry.problems(wrong)
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(str(problem))


def test_validating_on_all_of_an_endless_source_is_refused(tmp_path: Path) -> None:
    config = sets_in(tmp_path)
    endless = replace(config.validation, data={"name": "synthetic", "vocab_size": 64})
    with pytest.raises(DataError, match="has no end; write validation.batches=100"):
        open_data(replace(config, validation=endless))


def test_validating_on_training_data_is_a_warning(tmp_path: Path) -> None:
    config = sets_in(tmp_path)
    own = {"seen": {"path": config.data.path}, "code": {"path": str(tmp_path / "code.bin")}}
    same = replace(config, validation=Validation(data=own))
    (text,) = registry.warnings(same)
    assert "validation.data.seen" in text and "train.bin is trained on, too" in text
    assert not [*registry.warnings(config)]
