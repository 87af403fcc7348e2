"""A resume on other data is refused, and one with other settings is not silent."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import saved_runs
from support.command_lines import examined, problems_of
from support.mixing import Net
from support.paths import ROOT
from support.records import numbers
from support.saved_runs import a_run, checkpoint, events, train_all
from titanlike.core.config.groups.data import TokenData
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.data.registry import DataError, open_data
from titanlike.core.metrics import run_files
from titanlike.core.metrics.sinks import read_jsonl


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


run = saved_runs.run


def test_different_data_on_a_resume_are_refused_unless_allowed(run: Config, tmp_path: Path) -> None:
    folder = Path(run.run_dir)
    kept = {name: (folder / name).read_bytes() for name in ("config.yaml", "metrics.jsonl")}
    data, longer = token_data(tmp_path / "b.bin", seed=1), token_data(tmp_path / "c.bin", more=5)
    for error in train_all(replace(run, data=data), replace(run, data=longer)):
        assert error.startswith("ConfigError"), "invalid: exit code 2"
        assert "data.changed=true" in error and str(checkpoint(folder, 6)) in error, error
        assert "training" in error and "\n" not in error
    assert {name: (folder / name).read_bytes() for name in kept} == kept
    meant = replace(run, data=replace(data, changed=True), steps=9)
    meant = replace(meant, checkpoint=replace(run.checkpoint, last=True))
    once, then, back = train_all(meant, replace(run, data=data, steps=10), replace(run, steps=11))
    assert (once, then) == ("", ""), "the new data are saved"
    assert "data.changed=true" in back
    [event] = events(folder, "data_changed")
    assert event["step"] == 6
    assert "changed: true" not in (folder / "config.yaml").read_text(), "for one start"


def test_a_checkpoint_of_another_model_optimizer_or_seed_is_refused_with_the_saved_value(
    run: Config,
) -> None:
    deeper = replace(run.model, args=run.model.args | {"num_hidden_layers": 3})
    changed = replace(run, optimizer=Sgd()), replace(run, seed=7), replace(run, model=deeper)
    optimizer, seed, model = train_all(*changed)
    assert re.search(r"optimizer=sgd: .*saved with adamw.*write optimizer=adamw", optimizer)
    assert re.search(r"seed=7: .*write seed=0", seed)
    assert re.search(r"num_hidden_layers=3: .*write model.num_hidden_layers=2", model)


def test_changed_settings_are_printed_on_a_resume_and_moved_data_are_not(
    run: Config, tmp_path: Path
) -> None:
    folder, before = Path(run.run_dir), run.optimizer
    other = replace(
        run,
        data=token_data(tmp_path / "moved.bin"),
        optimizer=replace(before, lr=0.5, betas=[0.8, 0.9]),
        launch=replace(run.launch, heartbeat=1.0),
        pp=2,
    )
    assert train_all(other) == [""]
    assert [event["step"] for event in events(folder, "resume")] == [6]
    assert events(folder, "data_changed") == []
    [event] = events(folder, "changed")
    assert event["step"] == 6
    changed = {change.split()[0]: change for change in event["changes"]}
    assert changed["optimizer.lr"] == f"optimizer.lr {before.lr} -> 0.5"
    assert changed["optimizer.betas"].endswith("-> [0.8,0.9]")
    others = {"pp", "launch.heartbeat", "run_dir", "data.path"}
    assert changed.keys() == others | {"optimizer.lr", "optimizer.betas"}
    output = (folder / "rank0.out").read_text()
    assert "changed since the checkpoint of step 6:" in output
    assert all(change in output for change in event["changes"])

    first, second = read_jsonl(folder / run_files.STARTS)
    assert [(start["step"], start["config"]["pp"]) for start in (first, second)] == [(0, 1), (6, 2)]
    assert {"torch", "python", "titanlike"} <= second["versions"].keys()
    times = [record["time"] for record in read_jsonl(folder / "metrics.jsonl")]
    times[6:6] = [second["time"]]
    assert [first["time"], *times] == sorted([first["time"], *times]) and len(times) == 9


class Shared(Net):
    def __init__(self, share: float = 1.0, **others: float) -> None:
        super().__init__(block="Centered", share=share)


def test_an_omitted_model_argument_equals_its_default(tmp_path: Path) -> None:
    """Of a run that was saved with it, and of one that was saved without."""

    def of(name: str, **arguments: Any) -> Config:
        model = Custom(f"{__name__}.Shared", arguments)
        return replace(a_run(tmp_path / name, steps=1, every=1), model=model, mixes_samples=True)

    saved = [of("without"), of("with", share=0.1), of("default", share=1.0)]
    again = [of("without", share=1.0), of("with", share=0.1), of("default")]
    other = [of("without", share=0.1), of("with"), of("default", share=0.1), of("with", share=1.0)]
    was = ["1.0", "0.1", "1.0", "0.1"]
    unknown = of("without", more=2)
    *found, error = train_all(*saved, *again, *other, unknown)
    assert found[:6] == [""] * 6
    for told, value in zip(found[6:], was, strict=True):
        assert f"was saved with {value}, so this" in told and f"model.share={value}, or" in told
    assert (
        "model.more=2" in error and "was saved without it, so" in error and "leave it out" in error
    )


@pytest.mark.slow
def test_a_resume_without_changes_prints_no_difference(run: Config) -> None:
    folder = Path(run.run_dir)
    truth = numbers(folder)
    assert train_all(run) == [""]
    changed = [change for event in events(folder, "changed") for change in event["changes"]]
    assert {change.split()[0] for change in changed} == {"run_dir"}, "that of the copy"
    assert numbers(folder) == truth


def test_a_start_names_the_commit_of_the_code_and_writes_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, "-C", str(tmp_path), *words], check=True)

    monkeypatch.chdir(tmp_path)
    assert "git" not in run_files.versions()
    git("init", "-q")
    (tmp_path / "model.py").write_text("one\n")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    clean = run_files.versions()
    assert len(clean["git"]) == 40 and clean["git_dirty"] is False
    (tmp_path / "model.py").write_text("two\n")
    assert run_files.versions() == {**clean, "git_dirty": True}
    secret = "hunter2-and-more"
    run_files.log_start(
        tmp_path, 0, [f"data.password={secret}"], {"data": {"password": secret}}, {}
    )
    assert secret not in (tmp_path / run_files.STARTS).read_text()


def test_the_fix_of_the_refusal_works_for_data_without_that_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    words = ["--config-dir", str(ROOT / "examples" / "my_models" / "conf"), "data=echo"]
    assert problems_of([*words, "data.changed=true"]) == []
    config = examined(*words, "data.chnged=true").config
    assert config is not None
    with pytest.raises(
        DataError, match="chnged=true: .* no such argument; write data.changed=true"
    ):
        open_data(config)
