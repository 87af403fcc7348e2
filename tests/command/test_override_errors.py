"""Mistakes on the command line: all at once, with what to write instead, before anything starts."""

from __future__ import annotations

from pathlib import Path

from support.command_lines import examined
from support.launched import Launched


def test_mistakes_of_every_kind_are_reported_together(tmp_path: Path) -> None:
    """Key, choice, another choice's key, added key, syntax, type, and rules between keys."""
    mistakes = ["dpp=2", "schedule=1f1bb", "data=synthetic", "data.path=x", "+foo=1", "a b"]
    mistakes += ["steps=x"]
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


def test_an_experiment_may_be_written_with_a_plus() -> None:
    findings = examined("+experiment=llama3_8b", "dp=32")
    assert findings.problems == []
    assert findings.config is not None and findings.config.dp == 32
    assert findings.config.schedule.name == "interleaved1f1b"


def test_every_choice_of_a_sweep_is_checked_before_its_first_job() -> None:
    findings = examined("-m", "schedule=gpipe,1f1bb", "schedule.stages_per_rank=2", "pp=1,two")
    keys = ["schedule", "schedule.stages_per_rank"]
    assert [problem.key for problem in findings.problems] == keys
    findings = examined("-m", "schedule=interleaved1f1b,gpipe", "schedule.stages_per_rank=2")
    assert [problem.key for problem in findings.problems] == ["schedule.stages_per_rank"]
    assert examined("-m", "schedule=gpipe,1f1b", "seed=range(3)").problems == []


def test_a_folder_of_ones_own_adds_choices_and_must_exist(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: my.models.Mine\nwidth: 3\n")
    words = ["model=mine", "model.width=4", "+model.depth=2"]
    for arguments in (["--config-dir", str(tmp_path)], [f"hydra.searchpath=[{tmp_path}]"]):
        findings = examined(*arguments, *words)
        assert findings.problems == []
        assert findings.config.model.args == {"width": 4, "depth": 2}
    (problem,) = examined("--config-dir", str(tmp_path / "none")).problems
    assert problem.key == "--config-dir"
