"""Mistakes on the command line: all at once, with what to write instead, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command_lines import examined
from support.launched import Launched


def test_mistakes_of_every_kind_are_reported_together(tmp_path: Path) -> None:
    """Key, choice, another choice's key, added key, syntax, type, and rules between keys."""
    mistakes = [
        "dpp=2",
        "schedule=1f1bb",
        "data=synthetic",
        "data.path=x",
        "+foo=1",
        "a b",
        "steps=x",
    ]
    launched = Launched("hello", *mistakes, "dp=2", "batch_size=7", f"run_dir={tmp_path / 'run'}")
    code, out, err = launched.wait()
    assert code == 2 and out == "" and "Traceback" not in err
    lines = err.splitlines()
    assert lines[0] == "7 errors in the config; nothing was started"
    for start, remedy in {
        "dpp=2:": "write dp=2",
        "schedule=1f1bb:": "write schedule=1f1b",
        "data.path=x:": "write data=text data.path=x",
        "foo=1:": "unknown key",
        "a b:": "no such key",
        "steps=x:": "write steps=300",
        "batch_size=7:": "write batch_size=8",
    }.items():
        (line,) = (line for line in lines if line.strip().startswith(start))
        assert remedy in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "override, fix",
    [
        ("sede=1", "seed=1"),
        ("microbatches=4", "schedule.microbatches=4"),
        ("lr=3e-4", "optimizer.lr=0.0003"),
        ("model=lama_tiny", "model=llama_tiny"),
        ("checkpoint.evry=5", "checkpoint.every=5"),
        ("hydra/launcher=basik", "hydra/launcher=basic"),
        ("schedule.stages_per_rank=4", "schedule=interleaved1f1b schedule.stages_per_rank=4"),
        ("+pp=2", "pp=2"),
        ("pp=1,2", "-m pp=1,2"),
        ("~logger", "logger=none"),
    ],
)
def test_the_nearest_right_thing_is_suggested(override: str, fix: str) -> None:
    (problem,) = examined(override).problems
    assert problem.fix == fix


@pytest.mark.parametrize("override", ["experiment=llama3_8b", "+experiment=llama3_8b"])
def test_an_experiment_may_be_written_with_and_without_plus(override: str) -> None:
    findings = examined(override, "dp=32")
    assert findings.problems == []
    assert findings.config is not None and findings.config.dp == 32
    assert findings.config.schedule.name == "interleaved1f1b"


def test_every_choice_of_a_sweep_is_checked_before_its_first_job() -> None:
    findings = examined("-m", "schedule=gpipe,1f1bb", "schedule.stages_per_rank=2", "pp=1,two")
    assert [problem.key for problem in findings.problems] == [
        "schedule",
        "schedule.stages_per_rank",
    ]
    assert examined("-m", "schedule=gpipe,1f1b", "seed=range(3)").problems == []


def test_a_folder_of_ones_own_adds_choices_and_must_exist(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: my.models.Mine\nwidth: 3\n")
    for arguments in (["--config-dir", str(tmp_path)], [f"hydra.searchpath=[{tmp_path}]"]):
        findings = examined(*arguments, "model=mine", "model.width=4", "+model.depth=2")
        assert findings.problems == []
        assert findings.config.model.args == {"width": 4, "depth": 2}
    (problem,) = examined("--config-dir", str(tmp_path / "none")).problems
    assert problem.key == "--config-dir"
