"""What a run's config names is used without asking if this user has launched the run as it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from support.models import tiny
from titanlike.core.config.files import atomic_write_text
from titanlike.core.config.groups.data import TextData
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.parse import write_config
from titanlike.core.config.received import Consent, named_outside, note_launch, read_run

Change = Callable[[Path, pytest.MonkeyPatch], object]


def copied(run: Path, _: pytest.MonkeyPatch) -> Path:
    return Path(shutil.copytree(run, run.parent / "copied"))


def moved_code(run: Path, patch: pytest.MonkeyPatch) -> None:
    (run.parent / "theirs").mkdir()
    patch.chdir(run.parent / "theirs")


CHANGES: dict[str, Change] = {
    "a copy": copied,
    "another config": lambda run, _: (run / "config.yaml").open("a").write("# \n"),
    "a folder that others can write": lambda run, _: run.chmod(0o777),
    "a checkpoint that others can write": lambda run, _: (run / "checkpoints/step-1").chmod(0o777),
    "a folder that others can replace": lambda run, _: run.parent.chmod(0o777),
    "code of another folder": moved_code,
    "a home that was not written": lambda _, patch: patch.setenv("XDG_STATE_HOME", "/dev/null"),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a model and a tokenizer outside of it, as it is noted at its launch."""
    folder = tmp_path / "project" / "run"
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    tokenizer = tmp_path / "tokenizer.json"
    atomic_write_text(tokenizer, "{}")
    data = TextData(tokenizer=str(tokenizer))
    config = replace(tiny(), model=Custom("mine.Model"), data=data, run_dir=str(folder))
    write_config(config, folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(folder.parent)
    note_launch(folder)
    return folder


def asks(run: Path, **more: str) -> bool:
    named = named_outside(read_run(run), run) | more
    assert {"model.name", "data.tokenizer"} <= named.keys()
    try:
        for place in (run / "config.yaml", run / "checkpoints" / "step-1"):
            Consent().check(place, named)
    except ValueError as error:
        assert "--trust-code" in str(error)
        return True
    return False


def test_a_run_is_known_to_who_has_launched_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not asks(run)
    assert "imports mine.Model (model.name), from the working directory" in capsys.readouterr().err
    assert asks(run, **{"model.name": "theirs.Model"}) and asks(run, **{"model.path": "/elsewhere"})


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_of_anybody_else_asks(
    change: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = CHANGES[change](run, monkeypatch)
    assert asks(changed if isinstance(changed, Path) else run)
