"""A new run from another run's weights: by name, and never silently in part. That any layout starts
from any other's is in test_checkpoint_layouts.py."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.saved_runs import a_run, checkpoint, edited, events
from support.saved_state import Loaded, load, load_each, load_in_silence, local, opened, tensors
from support.world import run_world
from titanlike.core.checkpoint.discovery import Progress
from titanlike.core.checkpoint.state_dict import renamed
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.run.checks import problems
from titanlike.use.checkpoint_commands import main

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of step 2, and its model alone in bf16."""
    folder = tmp_path_factory.mktemp("warm") / "source"
    run_world(save_a_source, a_run(folder, model_only="bf16"), folder)
    return folder


def save_a_source(config: Config, worker: Worker) -> None:
    run, checkpointer = opened(config, worker)
    for _, tensor, _ in tensors(run):
        tensor.uniform_()
    checkpointer.save(Progress(step=2))
    checkpointer.finish(Progress(step=2), done=True)


def warm(run_dir: Path, start_from: Path, **more: Any) -> Config:
    return a_run(run_dir, start_from=str(start_from), **more)


def weights_of(source: Path, tmp_path: Path) -> Weights:
    file = tmp_path / "weights.safetensors"
    assert main(["consolidate", str(source), str(file)]) == 0
    return load_file(file)


@dataclass(frozen=True)
class Started:
    loaded: Loaded
    told: str
    weights: Weights
    others: set[float]  # values of the optimizer's state, which was all -1


def start_each(_: Config, worker: Worker, configs: list[Config]) -> list[Started]:
    run, _ = opened(configs[0], worker)
    found = []
    for config in configs:
        loaded = load(run, config, worker.rank)
        told = [event["text"] for event in events(Path(config.run_dir), "warm_start")]
        own = {name for stage in run.stage_states for name, _ in stage.parameters()}
        now = {name: local(tensor).clone() for name, tensor, _ in tensors(run)}
        weights = {name: now.pop(name) for name in own}
        others = {value for tensor in now.values() for value in tensor.unique().tolist()}
        found.append(Started(loaded, " ".join(told), weights, others))
    return found


def started(tmp_path: Path, *configs: Config) -> list[Started]:
    return run_world(start_each, configs[0], tmp_path / "world", list(configs))[0]


def same(found: Weights, expected: Weights) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


def test_a_start_tells_no_rank_what_all_others_have(source: Path, tmp_path: Path) -> None:
    """Which for 16,384 ranks is 0.3 GB on each."""
    config = replace(warm(tmp_path / "run", source), dp=2, pp=2)
    every = run_world(load_in_silence, config, tmp_path / "world")
    assert [(one.step, one.error) for one in every] == [(0, "")] * 4


@pytest.mark.slow
def test_a_run_starts_from_the_weights_of_another(source: Path, tmp_path: Path) -> None:
    """Of a run, of one of its checkpoints, of the model alone, of a restored file, of names that
    are changed; the optimizer begins anew."""

    def change(found: dict[str, Any]) -> None:
        for name in list(found):
            found[
                "net." + name.replace("post_attention_layernorm", "ffn_norm").replace("mlp", "ffn")
            ] = found.pop(name)

    restored = edited(source, tmp_path, lambda _: None)
    blocks = [f"net.model.layers.{i}.ffn" for i in range(2)]
    rules = [
        f"{name}_norm:model.layers.{i}.post_attention_layernorm" for i, name in enumerate(blocks)
    ]
    rules += [f"{name}:model.layers.{i}.mlp" for i, name in enumerate(blocks)] + ["net.:"]
    run, step, file, renaming, bf16 = started(
        tmp_path,
        warm(tmp_path / "run", source),
        warm(tmp_path / "step", checkpoint(source, 2)),
        warm(tmp_path / "file", restored),
        warm(tmp_path / "renaming", edited(source, tmp_path, change), rename=rules),
        warm(tmp_path / "bf16", source / "checkpoints" / "model-00000002"),
    )
    expected = weights_of(source, tmp_path)
    assert len(expected) == 21
    for one in (run, step, file, renaming, bf16):
        assert (one.loaded.step, one.loaded.error, one.others) == (0, "", {-1.0})
        if one is not bf16:
            assert same(one.weights, expected)
    assert same(bf16.weights, {name: one.bfloat16().float() for name, one in expected.items()})
    assert run.told.endswith("/step-00000002: 21 parameters loaded")


def test_the_same_command_resumes_instead_of_warm_starting_again(
    source: Path, tmp_path: Path
) -> None:
    """Even where the source has gone."""
    gone = Path(shutil.copytree(source, tmp_path / "copy"))
    run_world(start_and_go_on, warm(tmp_path / "run", gone), tmp_path / "run", gone)
    assert len(events(tmp_path / "run", "warm_start")) == 1
    assert [event["step"] for event in events(tmp_path / "run", "resume")] == [1]


def start_and_go_on(config: Config, worker: Worker, gone: Path) -> None:
    run, checkpointer = opened(config, worker)
    assert checkpointer.resume() == Progress()
    checkpointer.save(Progress(step=1))
    shutil.rmtree(gone)
    assert load(run, config, 0).step == 1


def test_different_names_or_shapes_are_errors_unless_names_are_mapped(
    source: Path, tmp_path: Path
) -> None:
    def other_blocks(found: dict[str, Any]) -> None:
        for name in [name for name in found if name.startswith("model.layers.")]:
            found[name.replace("model.layers.", "blocks.")] = found.pop(name)
        del found["model.norm.weight"]
        found["extra.weight"] = found["lm_head.weight"].clone()

    def more(found: dict[str, Any]) -> None:
        found["extra.weight"] = found["lm_head.weight"].clone()

    def fewer(found: dict[str, Any]) -> None:
        del found["model.norm.weight"]

    other = edited(source, tmp_path, other_blocks)
    [known] = problems(warm(tmp_path / "checked", other))  # before a launch
    assert known.key == "checkpoint.start_from" and "19 not in the checkpoint" in known.reason
    rename = {"rename": ["blocks.:model.layers."]}
    (tmp_path / "empty").mkdir()
    refused, listed, unused, missing, kept, loose, nothing, twice, none = started(
        tmp_path,
        warm(tmp_path / "refused", other),
        warm(tmp_path / "listed", other, **rename),
        warm(tmp_path / "unused", edited(source, tmp_path, more)),
        warm(tmp_path / "missing", edited(source, tmp_path, fewer)),
        warm(
            tmp_path / "kept",
            other,
            rename=["blocks.:model.layers.", "extra.:model.norm."],
            strict=False,
        ),
        warm(tmp_path / "loose", other, strict=False, **rename),
        warm(tmp_path / "nothing", other, rename=[":other."], strict=False),
        warm(tmp_path / "twice", source, rename=["model.layers.0.:model.layers.1."]),
        warm(tmp_path / "none", tmp_path / "empty"),
    )
    error = refused.loaded.error
    assert "19 not in the checkpoint: model.layers.0.input_layernorm.weight, " in error
    assert "19 only in the checkpoint: blocks.0.input_layernorm.weight, " in error
    assert "write checkpoint.rename=[old.:new.]" in error and "strict=false" in error
    sides = "1 not in the checkpoint: model.norm.weight; 1 only in the checkpoint: extra.weight"
    assert sides in listed.loaded.error
    assert "parameters 1 only in the checkpoint: extra.weight; write" in unused.loaded.error
    assert "parameters 1 not in the checkpoint: model.norm.weight; write" in missing.loaded.error
    # a shape is never loose
    assert "model.norm.weight is (64, 32) there and (32,) here" in kept.loaded.error
    assert "no name is the same" in nothing.loaded.error  # it would train from nothing
    assert "would both be model.layers.1.input_layernorm.weight" in twice.loaded.error
    assert "start_from=" in none.loaded.error and "/empty: no complete" in none.loaded.error
    for one in (refused, listed, unused, missing, kept, nothing, twice, none):
        assert one.loaded.step == -1 and not one.told
    assert loose.loaded.step == 0
    renamed = "blocks.0.input_layernorm.weight as model.layers.0."
    assert f"20 parameters loaded; 18 renamed: {renamed}" in loose.told
    assert sides in loose.told
    expected = weights_of(source, tmp_path)
    expected["model.norm.weight"] = torch.full((32,), -1.0)  # what it was
    assert same(loose.weights, expected)


def test_another_shape_is_named_on_every_rank(source: Path, tmp_path: Path) -> None:
    """Also by ranks that do not hold that parameter: none waits for the others in vain."""

    def change(found: dict[str, Any]) -> None:
        found["lm_head.weight"] = found["lm_head.weight"][:-1].clone()

    other = edited(source, tmp_path, change)
    config = replace(warm(tmp_path / "run", other, strict=False), pp=2)
    for [loaded] in run_world(load_each, config, tmp_path / "run", [config]):
        assert "lm_head.weight is (63, 32) there and (64, 32) here" in loaded.error


def test_the_first_rule_that_fits_renames_a_beginning() -> None:
    rules = ["a.b.:x.", "a.:y.", "c:"]
    names = [renamed(name, rules) for name in ("a.b.c", "a.c", "b.a.c", "cd")]
    assert names == ["x.c", "y.c", "b.a.c", "d"]
