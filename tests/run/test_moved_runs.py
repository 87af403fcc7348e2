"""A run's directory that was copied or moved: the folder that is named is the run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.command_lines import examined
from support.commands import TINY, command
from support.launched import Launched
from support.paths import ROOT
from support.records import numbers
from support.run_files import config_of, last_step
from support.waiting import until
from titanlike.core.checkpoint.discovery import select_resume
from titanlike.core.config.errors import Refused
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.config.schema import Config

RUN = [*TINY, "model.num_hidden_layers=1", "data=synthetic", "report=false", "steps=4"]
RUN += ["checkpoint.every=2", "checkpoint.last=true"]
NEW = ("checkpoint.folder=null",)  # of a run in another folder than that of the config


@dataclass
class Case:
    """What is done with the run in `src`, and the run that a command then continues."""

    prepare: Callable[[Path], object]
    named: str  # after --config-path
    words: tuple[str, ...] = ()
    run: str = ""  # that is written; "" = the one that is named
    step: int = 4  # from which it goes on
    says: str = ""


def copy(folder: Path, source: str = "src", to: str = "copied") -> None:
    shutil.copytree(folder / source, folder / to, symlinks=True)


def move(folder: Path, *places: str) -> None:
    for old, new in zip(places, places[1:], strict=False):
        (folder / new).parent.mkdir(exist_ok=True)
        shutil.move(folder / old, folder / new)


def from_elsewhere(folder: Path) -> None:
    """The same run, as another machine has it mounted."""
    copy(folder, to="here")
    path = folder / "here" / "config.yaml"
    path.write_text(path.read_text().replace(f"{folder}/src", "/mnt/of/another/run"))


def sweep(folder: Path) -> None:
    """The run as the job of a sweep, whose directory was moved."""
    move(folder, "src", "sweep/0")
    path = folder / "sweep/0" / "config.yaml"
    path.write_text(path.read_text().replace(f"{folder}/src", f"{folder}/sweep/0"))
    move(folder, "sweep", "moved")


CASES = {
    "copy": Case(copy, "copied", says="a copy of"),
    "move": Case(lambda f: move(f, "src", "moved"), "moved", says="which was in"),
    "rename of a parent": Case(lambda f: move(f, "src", "a/src", "b/src"), "b/src", says="was in"),
    "mount of another machine": Case(from_elsewhere, "here", says="/mnt/of/another/run"),
    "symlink": Case(lambda f: (f / "link").symlink_to("src"), "link", run="src"),
    "read-only copy": Case(
        copy, "copied", (*NEW, "run_dir=on", "checkpoint.resume=copied/saved"), run="on"
    ),
    "copy while the original trains": Case(copy, "copied", says="stays as it is"),
    "run_dir beside it": Case(lambda f: None, "src", (*NEW, "run_dir=new"), run="new", step=0),
    "job of a sweep": Case(sweep, "moved/0", says="which was in"),
    "two moves": Case(lambda f: move(f, "src", "once", "twice"), "twice", says="was in"),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `src` of four steps, whose checkpoints are in a folder of its own."""
    folder = tmp_path_factory.mktemp("original")
    done = command(*RUN, "run_dir=src", "checkpoint.folder=src/saved", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def place(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same in a folder of the test's own, with the paths that it would have there."""
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "src" / "config.yaml"
    path.write_text(path.read_text().replace(str(original), str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("name", CASES)
def test_a_moved_run_resumes_in_the_folder_it_is_given(name: str, place: Path) -> None:
    case = CASES[name]
    case.prepare(place)
    checked = examined("--config-path", case.named, *case.words)
    assert checked.problems == []
    config, run = checked.config, place / (case.run or case.named)
    assert Path(config.run_dir).absolute() == run
    if not case.words:  # what is inside of the run goes along
        assert os.path.samefile(config.checkpoint.folder, run / "saved")
        assert select_resume(config).path.name == "step-00000004"
    assert [case.says in note for note in checked.notes] == ([True] if case.says else [])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_moved_run_writes_only_to_its_new_folder(name: str, place: Path) -> None:
    case, run = CASES[name], place / (CASES[name].run or CASES[name].named)
    case.prepare(place)
    others = [p for p in place.iterdir() if not (run.is_relative_to(p) or p.is_symlink())]
    before = {path: contents(path) for path in others}
    line = ["--config-path", case.named, *case.words, "steps=6"]
    if name.startswith("read-only"):  # it is refused; the fix continues it elsewhere
        words = [sys.executable, str(ROOT / "train.py"), *line[:2]]
        mounts = 'mount --bind copied copied && mount -o remount,ro,bind copied && exec "$@"'
        inside = ["unshare", "--mount", "--map-root-user", "sh", "-c", mounts, "-", *words]
        refused = subprocess.run(inside, cwd=place, capture_output=True, text=True, timeout=100)
        if "unshare" in refused.stderr or "mount:" in refused.stderr:
            pytest.skip("no mount namespaces here")
        fix = f"write run_dir=outputs/NAME checkpoint.resume={place / 'copied'} {NEW[0]}"
        assert refused.returncode == 2 and fix in refused.stderr
    done = command(*line, cwd=place)
    assert done.returncode == 0, done.stderr
    assert case.says in done.stdout
    assert ("resuming from step 4" in done.stdout) == (case.step == 4)
    assert last_step(run) == 6 and Path(config_of(run).run_dir) == run
    assert {path: contents(path) for path in others} == before
    top = place / run.relative_to(place).parts[0]
    assert {p for p in place.iterdir() if not p.is_symlink()} == {*others, top}, "nothing else"
    assert (run / "saved").exists() or case.words


@pytest.mark.slow
def test_a_copied_run_resumes_while_the_original_trains(tmp_path: Path) -> None:
    words = [*RUN, "run_dir=src", "steps=80", "checkpoint.mode=sync"]
    training = Launched(*words, cwd=tmp_path, program=ROOT / "train.py")
    until(lambda: last_step(tmp_path / "src") > 3)
    with training.paused():
        copy(tmp_path)
    done = command("--config-path", "copied", cwd=tmp_path)
    assert done.returncode == 0 and "stays as it is" in done.stdout, done.stderr
    assert training.wait()[0] == 0
    once, twice = numbers(tmp_path / "src"), numbers(tmp_path / "copied")
    assert [step for step, *_ in twice] == [*range(1, 81)] and once == twice


def test_a_folder_of_checkpoints_elsewhere_is_continued_by_the_run_that_moved(
    original: Path, place: Path
) -> None:
    """And not by a copy of the run while that is still there, nor by a stranger."""
    saved = Checkpoint(folder=str(place / "src" / "saved"))
    copy(place)
    there, gone = original / "src", original / "gone"
    copied, other = Config(run_dir="copied", checkpoint=saved), Config(checkpoint=saved)
    with pytest.raises(Refused, match=f"of the run in {there}, of which {place}/copied is a copy"):
        select_resume(copied)
    there.rename(gone)
    try:
        assert select_resume(copied).path.name == "step-00000004"
        with pytest.raises(Refused, match=f"it has the checkpoints of the run in {there}; "):
            select_resume(other)
    finally:
        gone.rename(there)
