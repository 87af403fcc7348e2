"""A run is launched again from its folder, with other choices of a group."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from support.cells import slow
from support.command_lines import examined
from support.commands import TINY, command
from titanlike.config.parse import to_plain
from titanlike.config.schema import Config, DecayLr, LoopedSchedule
from titanlike.config.write import write_config


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    schedule = LoopedSchedule(microbatches=8, stages_per_rank=4)
    config = Config(run_dir=str(tmp_path), seed=7, schedule=schedule, lr=DecayLr(final=0.5))
    write_config(config, tmp_path)
    return tmp_path


def test_a_choice_replaces_the_groups_keys_and_leaves_the_rest(run_folder: Path) -> None:
    words = ["schedule=gpipe", "logger=none", "optimizer=sgd", "optimizer.momentum=0.5"]
    checked = examined("--config-path", str(run_folder), *words)
    assert checked.problems == []
    config = checked.config
    assert to_plain(config.schedule) == {"name": "gpipe", "microbatches": None}
    assert (config.logger.name, config.optimizer.momentum) == ("none", 0.5)
    assert (config.seed, config.lr) == (7, DecayLr(final=0.5))
    assert config.run_dir == str(run_folder)


def test_the_keys_of_the_run_are_kept_without_a_choice(run_folder: Path) -> None:
    checked = examined("--config-path", str(run_folder), "schedule.microbatches=4")
    assert checked.problems == []
    assert checked.config.schedule == LoopedSchedule(microbatches=4, stages_per_rank=4)


def test_the_folder_is_named_where_a_file_or_another_folder_is_given(run_folder: Path) -> None:
    (run_folder / "checkpoints").mkdir()
    for part in ("config.yaml", "checkpoints"):
        (problem,) = examined("--config-path", str(run_folder / part)).problems
        assert problem.fix == f"give --config-path {run_folder}"
    (problem,) = examined("--config-path", str(run_folder / "nothing")).problems
    assert "no such folder" in str(problem)


def test_a_wrong_choice_is_an_error(run_folder: Path) -> None:
    words = ["schedule=gpipee", "experiment=gpt2_124m"]
    nearest, experiment = examined("--config-path", str(run_folder), *words).problems
    assert "write schedule=gpipe" in str(nearest)
    assert "complete config of a run" in str(experiment)


@pytest.mark.parametrize("how", ["", *slow("-m")])
def test_a_run_goes_on_with_another_schedule(tmp_path: Path, how: str) -> None:
    first = [*TINY, "run_dir=run", "steps=1", "data=synthetic", "checkpoint.last=true"]
    done = command(*first, "model.layers=2", "schedule=interleaved1f1b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = ["--config-path", "run", "schedule=gpipe", "optimizer.lr=1e-4", "steps=2"]
    if how == "-m":
        words = [*words, "schedule=gpipe,1f1b", "-m", "run_dir=sweep"]
        words.remove("schedule=gpipe")
    again = command(*words, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    folders = ["sweep/0", "sweep/1"] if how == "-m" else ["run"]
    saved = [yaml.safe_load((tmp_path / run / "config.yaml").read_text()) for run in folders]
    for config, name in zip(saved, ["gpipe", "1f1b"], strict=False):
        assert config["schedule"] == {"name": name, "microbatches": None}
    if how != "-m":
        assert "resuming from step 1" in again.stdout
