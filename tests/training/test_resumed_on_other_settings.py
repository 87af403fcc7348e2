"""A resume on other data is refused, and one with other settings is not silent."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.commands import TINY, command
from support.paths import ROOT
from support.saved_runs import a_run, checkpoint, events, numbers, reseal, train_all
from titanlike.config.schema import Config, TokenData
from titanlike.metrics import starts
from titanlike.metrics.sinks import read_jsonl


def token_data(path: Path, seed: int = 0, more: int = 0) -> TokenData:
    tokens = np.random.default_rng(seed).integers(0, 200, 5000)
    np.append(tokens, tokens[:more]).astype("<u2").tofile(path)
    return TokenData(path=str(path), vocab_size=256)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run on a token file, cut off after step 8, with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("saved")
    config = replace(a_run(folder / "run"), data=token_data(folder / "a.bin"))
    assert train_all(config) == [""]
    return config


@pytest.fixture
def run(saved: Config, tmp_path: Path) -> Config:
    subprocess.run(["cp", "-r", saved.run_dir, str(tmp_path / "run")], check=True)
    return replace(saved, run_dir=str(tmp_path / "run"))


def logged_starts(run_dir: Path) -> list[dict[str, Any]]:
    return read_jsonl(run_dir / starts.FILE)


@pytest.mark.slow
def test_other_data_are_refused_unless_they_are_meant(run: Config, tmp_path: Path) -> None:
    folder = Path(run.run_dir)
    kept = {name: (folder / name).read_bytes() for name in ("config.yaml", "metrics.jsonl")}
    for name, keys in {"b.bin": {"seed": 1}, "longer.bin": {"more": 5}}.items():
        data = token_data(tmp_path / name, **keys)
        [error] = train_all(replace(run, data=data))
        assert error.startswith("ConfigError"), "invalid: exit code 2"
        assert "data.changed=true" in error and str(checkpoint(folder, 6)) in error, error
        assert "training" in error and "\n" not in error
    assert {name: (folder / name).read_bytes() for name in kept} == kept
    meant = replace(run, data=replace(data, changed=True), steps=9)
    assert train_all(replace(meant, checkpoint=replace(run.checkpoint, last=True))) == [""]
    [event] = events(folder, "data_changed")
    assert event["step"] == 6
    assert "changed: true" not in (folder / "config.yaml").read_text(), "for one start"
    assert train_all(replace(run, data=data, steps=10)) == [""], "the new data are saved"
    [error] = train_all(replace(run, steps=11))
    assert "data.changed=true" in error


def test_the_same_data_elsewhere_and_in_another_layout_go_on_without_a_word(
    run: Config, tmp_path: Path
) -> None:
    moved = replace(run, data=token_data(tmp_path / "moved.bin"), pp=2)
    assert train_all(moved) == [""]
    folder = Path(run.run_dir)
    assert [event["step"] for event in events(folder, "resume")] == [6]
    assert events(folder, "data_changed") == []


def test_a_checkpoint_of_an_older_version_says_that_its_data_were_not_compared(run: Config) -> None:
    folder = Path(run.run_dir)
    truth = numbers(folder)
    path = checkpoint(folder, 6)
    state = json.loads((path / "state.json").read_text())
    del state["data"], state["config"]
    (path / "state.json").write_text(json.dumps(state))
    reseal(path)
    assert train_all(run) == [""]
    [event] = events(folder, "data_not_compared")
    assert str(path) in event["text"]
    assert numbers(folder) == truth


def test_every_changed_key_is_printed_and_is_an_event(run: Config) -> None:
    folder = Path(run.run_dir)
    optimizer = replace(run.optimizer, lr=0.5, betas=[0.8, 0.9])
    launch = replace(run.launch, heartbeat=1.0)
    assert train_all(replace(run, optimizer=optimizer, launch=launch, pp=2)) == [""]
    [event] = events(folder, "changed")
    assert event["step"] == 6
    changed = {change.split()[0]: change for change in event["changes"]}
    before = run.optimizer
    assert changed["optimizer.lr"] == f"optimizer.lr {before.lr} -> 0.5"
    assert changed["optimizer.betas"].endswith("-> [0.8,0.9]")
    assert {"pp", "launch.heartbeat", "run_dir"} == changed.keys() - {
        "optimizer.lr",
        "optimizer.betas",
    }
    output = (folder / "rank0.out").read_text()
    assert "changed since the checkpoint of step 6:" in output
    assert all(change in output for change in event["changes"])


def test_a_resume_without_changes_says_nothing(run: Config) -> None:
    assert train_all(run) == train_all(run) == [""]
    folder = Path(run.run_dir)
    changed = [change for event in events(folder, "changed") for change in event["changes"]]
    assert {change.split()[0] for change in changed} == {"run_dir"}, "that of the copy"


def test_each_start_and_the_time_of_each_step_are_kept(run: Config) -> None:
    folder = Path(run.run_dir)
    assert train_all(replace(run, pp=2, steps=9)) == [""]
    first, second = logged_starts(folder)
    assert (first["step"], second["step"]) == (0, 6)
    assert (first["config"]["pp"], second["config"]["pp"]) == (1, 2)
    assert first["time"] < second["time"]
    assert {"torch", "python", "titanlike"} <= second["versions"].keys()
    times = [record["time"] for record in read_jsonl(folder / "metrics.jsonl")]
    assert len(times) == 9 and times == sorted(times)
    assert first["time"] < times[0] and times[5] < second["time"] < times[6]


def test_a_start_names_the_commit_of_the_code_and_writes_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    monkeypatch.chdir(tmp_path)
    assert "git" not in starts.versions()
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "model.py").write_text("one\n")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    clean = starts.versions()
    assert len(clean["git"]) == 40 and clean["git_dirty"] is False
    (tmp_path / "model.py").write_text("two\n")
    assert starts.versions() == {**clean, "git_dirty": True}
    secret = "hunter2-and-more"
    starts.log_start(tmp_path, 0, [f"data.password={secret}"], {"data": {"password": secret}}, {})
    assert secret not in (tmp_path / starts.FILE).read_text()


def test_the_way_on_that_the_refusal_names_is_a_valid_override(tmp_path: Path) -> None:
    """Also for data whose file does not list the key."""
    own = ["--config-dir", str(ROOT / "examples" / "my_models" / "conf"), "data=echo"]
    for data in (["data=synthetic"], own):
        words = ["--check", *data, *TINY, "data.changed=true", f"run_dir={tmp_path / 'run'}"]
        done = command(*words, cwd=ROOT / "examples")
        assert done.returncode == 0, done.stderr
