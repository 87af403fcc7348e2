"""A new run from another run's weights: by name, in any layout, and never silently in part."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from support.saved_runs import a_run, checkpoint, events, train_all
from support.world import run_world
from titanlike.checkpoint.commands import main
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.tensor_index import read_entries
from titanlike.checkpoint.warm_start import renamed
from titanlike.config.schema import Config, Validation
from titanlike.launch.worker import Worker
from titanlike.metrics.sinks import read_jsonl
from titanlike.training.train import train

ROUNDING = 2e-6  # nats, between layouts


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of pp2 x dp2, with its model alone in bf16."""
    folder = tmp_path_factory.mktemp("warm") / "source"
    config = a_run(folder, 2, 2, steps=2, every=2, model_only="bf16")
    # far from where every run begins
    config = replace(config, optimizer=replace(config.optimizer, lr=1.0), validation=EACH)
    assert train_all(config) == [""]
    return folder


EACH = Validation(every=1, batches=1)


def warm(run_dir: Path, start_from: Path | str | None, pp: int = 1, dp: int = 1, **more: Any):
    """A run of one step that changes its weights by nothing: its validation is of the start."""
    location = None if start_from is None else str(start_from)
    config = a_run(run_dir, pp, dp, steps=1, every=1, start_from=location, **more)
    return replace(config, optimizer=replace(config.optimizer, lr=1e-30), validation=EACH)


def value(run_dir: Path, step: int = 1) -> float:
    """The validation loss of a step."""
    records = read_jsonl(run_dir / "metrics.jsonl")
    return next(record["val_loss"] for record in records if record["step"] == step)


def told(run_dir: Path) -> str:
    [event] = events(run_dir, "warm_start")
    return event["text"]


def as_file(source: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The folder of a checkpoint with the model of `source` after a change."""
    file = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
    assert main(["consolidate", str(source), str(file)]) == 0
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    assert main(["restore", str(file), str(file.with_suffix(""))]) == 0
    return file.with_suffix("") / "model-00000000"


def test_a_run_starts_from_the_weights_of_another_in_any_layout(
    source: Path, tmp_path: Path
) -> None:
    """Of a run, of one of its checkpoints, of the model alone, of a restored file."""
    restored = as_file(source, tmp_path, lambda tensors: None)
    starts = {
        "fresh": None,
        "run": source,
        "step": checkpoint(source, 2),
        "bf16": source / "checkpoints" / "model-00000002",
        "file": restored,
    }
    configs = {name: warm(tmp_path / name, start) for name, start in starts.items()}
    assert train_all(*configs.values()) == [""] * len(configs)
    expected, found = value(source, 2), {name: value(tmp_path / name) for name in configs}
    assert abs(found["fresh"] - expected) > 0.1
    assert found["run"] == pytest.approx(expected, abs=ROUNDING)
    assert found["run"] == found["step"] == found["file"]  # to the last bit
    assert found["bf16"] == pytest.approx(expected, abs=2e-2) and found["bf16"] != expected
    assert told(tmp_path / "run").endswith("/step-00000002: 21 parameters loaded")
    assert not events(tmp_path / "fresh", "warm_start")
    # the optimizer's state, too: of both it is that of a first step
    one, other = (str(checkpoint(tmp_path / name, 1)) for name in ("run", "file"))
    assert main(["compare", one, other]) == 0

    assert train_all(replace(warm(tmp_path / "tp2", source, pp=2), tp=2)) == [""]
    assert value(tmp_path / "tp2") == pytest.approx(expected, abs=ROUNDING)


def test_the_same_command_goes_on_and_does_not_start_again(source: Path, tmp_path: Path) -> None:
    """Even where the source has gone."""
    copy = shutil.copytree(source, tmp_path / "copy")
    first = warm(tmp_path / "run", copy)
    first = replace(first, optimizer=replace(first.optimizer, lr=1e-2))
    straight = replace(first, steps=2, run_dir=str(tmp_path / "straight"))
    assert train_all(first, straight) == ["", ""]
    shutil.rmtree(copy)
    assert train_all(replace(first, steps=2)) == [""]
    assert len(events(tmp_path / "run", "warm_start")) == 1
    assert [event["step"] for event in events(tmp_path / "run", "resume")] == [1]
    assert value(tmp_path / "run", 2) == value(tmp_path / "straight", 2)
    assert value(tmp_path / "run", 2) != value(tmp_path / "run", 1)


def test_names_that_differ_are_an_error_unless_they_may(source: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("layers.")]:
            tensors[name.replace("layers.", "blocks.")] = tensors.pop(name)
        del tensors["norm.weight"]
        tensors["extra.weight"] = tensors["head.weight"].clone()

    other = as_file(source, tmp_path, change)
    rename = {"rename": ["blocks.:layers."]}
    refused, listed, kept, loose, nothing = train_all(
        warm(tmp_path / "refused", other),
        warm(tmp_path / "listed", other, **rename),
        warm(tmp_path / "kept", other, rename=["blocks.:layers.", "extra.:norm."], strict=False),
        warm(tmp_path / "loose", other, strict=False, **rename),
        warm(tmp_path / "nothing", other, rename=[":other."], strict=False),
    )
    assert "19 not in the checkpoint: layers.0.attention.wk.weight, " in refused
    assert "19 only in the checkpoint: blocks.0.attention.wk.weight, " in refused
    assert "write checkpoint.rename=[old.:new.]" in refused and "strict=false" in refused
    assert (
        "parameters 1 not in the checkpoint: norm.weight; 1 only in the checkpoint: extra.weight"
        in (listed)
    )
    assert "norm.weight is (64, 32) there and (32,) here" in kept  # a shape is never loose
    assert loose == ""
    text = told(tmp_path / "loose")
    assert "20 parameters loaded; 18 renamed: blocks.0.attention.wk.weight as layers.0." in text
    assert "1 not in the checkpoint: norm.weight; 1 only in the checkpoint: extra.weight" in text
    assert "no name is the same" in nothing  # it would train from nothing


def test_renamed_parameters_are_the_same_weights(source: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors["net." + name.replace("ffn", "mlp")] = tensors.pop(name)

    other = as_file(source, tmp_path, change)
    names = [f"net.layers.{i}.mlp" for i in range(2)]
    rules = [f"{name}:layers.{i}.ffn" for i, name in enumerate(names)] + ["net.:"]
    for name in list(names):
        rules.insert(0, f"{name}_norm:layers.{name.split('.')[2]}.ffn_norm")
    assert train_all(warm(tmp_path / "run", other, rename=rules)) == [""]
    assert value(tmp_path / "run") == pytest.approx(value(source, 2), abs=ROUNDING)


def test_two_parameters_cannot_get_one_name(source: Path, tmp_path: Path) -> None:
    config = warm(tmp_path / "run", source, rename=["layers.0.:layers.1."])
    [text] = train_all(config)
    assert "would both be layers.1.attention.wk.weight" in text


def test_another_shape_is_named_on_every_rank(source: Path, tmp_path: Path) -> None:
    """Also by ranks that do not hold that parameter: none waits for the others in vain."""

    def change(tensors: dict[str, Any]) -> None:
        tensors["head.weight"] = tensors["head.weight"][:-1].clone()

    other = as_file(source, tmp_path, change)
    config = replace(warm(tmp_path / "run", other, pp=2, strict=False), tp=2)
    for text in run_world(raised, config, tmp_path / "run"):
        assert "head.weight is (63, 32) there and (64, 32) here" in text


def raised(config: Config, worker: Worker) -> str:
    try:
        train(config, worker)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_source_that_is_damaged_or_none_is_refused(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "copy")
    path = checkpoint(copy, 2) / "__0_0.distcp"
    [weight] = [e for e in read_entries(Storage(path.parent)) if e.name == "model.head.weight"]
    data = bytearray(path.read_bytes())
    data[weight.shards[0].begin + weight.shards[0].length // 2] ^= 1
    path.write_bytes(data)
    empty = tmp_path / "empty"
    empty.mkdir()
    damaged, none = train_all(
        warm(tmp_path / "damaged", copy),
        warm(tmp_path / "none", empty),
    )
    assert "step-00000002 is damaged: __0_0.distcp does not match the checksum" in damaged
    assert f"checkpoint.start_from={empty}: no complete checkpoint there" in none


def test_the_first_rule_that_fits_renames_a_beginning() -> None:
    rules = ["a.b.:x.", "a.:y.", "c:"]
    assert [renamed(name, rules) for name in ("a.b.c", "a.c", "b.a.c", "cd")] == [
        "x.c",
        "y.c",
        "b.a.c",
        "d",
    ]
