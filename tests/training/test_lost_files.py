"""Files of a run: deleted, moved or replaced while it trains; and who may read them."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.commands import TINY
from support.launched import Launched
from support.models import tiny
from support.paths import ROOT
from support.waiting import until
from support.world import RankError, run_world
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.run_files import (
    _PAUSES,
    AppendedFile,
    Events,
    FailedWrite,
    LostFiles,
    RunFiles,
)
from titanlike.core.training import loop
from titanlike.core.training.loop import train


def _replace(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


def _move(path: Path) -> None:
    path.rename(f"{path}2")


def _by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


LOSSES = {  # -> (what of the run's directory, how, what is said)
    "metrics.jsonl deleted": ("metrics.jsonl", os.unlink, "deleted or moved"),
    "metrics.jsonl replaced": ("metrics.jsonl", _replace, "replaced"),
    "checkpoints moved": ("checkpoints", _move, "deleted or moved"),
    "run_dir moved": ("", _move, "deleted or moved"),
    "a file in place of run_dir": ("", _by_a_file, "replaced"),
}


@pytest.fixture
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is unavailable for a moment is waited for."""
    monkeypatch.setattr("titanlike.core.metrics.run_files._PAUSES", [0.0] * len(_PAUSES))


@pytest.mark.parametrize("name", LOSSES)
def test_a_lost_file_is_named(name: str, tmp_path: Path, in_no_time: None) -> None:
    inside, lose, what = LOSSES[name]
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("a line\n")
    files = RunFiles(run_dir)
    files.check()
    lose(run_dir / inside)
    with pytest.raises(LostFiles, match=f"{run_dir / inside} was {what} while the run wrote to it"):
        files.check()


def loses_metrics(config: Config, worker: Worker) -> None:
    """metrics.jsonl is deleted in the third step."""
    right = loop.forward_backward

    def forward_backward(run, config, step, stream):
        if step == 3 and worker.rank == 0:
            (worker.run_dir / "metrics.jsonl").unlink()
        return right(run, config, step, stream)

    loop.forward_backward = forward_backward
    train(config, worker)


def test_a_run_ends_when_its_next_record_would_be_lost(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"LostFiles: \S+metrics.jsonl was deleted"):
        run_world(loses_metrics, tiny(layers=2), tmp_path)


@pytest.mark.slow
def test_a_command_whose_folder_is_lost_ends_with_one_line_for_each_cause(tmp_path: Path) -> None:
    words = [
        *TINY,
        "model.num_hidden_layers=2",
        "pp=2",
        "steps=100000",
        "checkpoint.every=20",
        "run_dir=run",
    ]
    run, run_dir = Launched(*words, cwd=tmp_path, program=ROOT / "train.py"), tmp_path / "run"
    until((run_dir / "checkpoints" / "step-00000020" / "COMMITTED").exists)
    with run.paused():  # else it may leave result.json in a folder that is being deleted
        _by_a_file(run_dir)
    code, out, err = run.wait(timeout=60)
    assert code == 1 and str(run_dir) in err and "result.json could not be written" in err
    assert "Traceback" not in err and "training complete" not in out


def test_a_file_system_that_is_gone_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, gone = tmp_path / "run", tmp_path / "gone"
    run_dir.mkdir()
    files = RunFiles(run_dir)
    run_dir.rename(gone)
    monkeypatch.setattr(time, "sleep", lambda _: gone.rename(run_dir))
    files.check()


def test_files_that_come_or_grow_are_not_lost(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    for change in (
        (tmp_path / "metrics.jsonl").touch,
        lambda: (tmp_path / "metrics.jsonl").write_text("more"),
        (tmp_path / "checkpoints").mkdir,
    ):
        change()
        files.check()
    _replace(tmp_path / "metrics.jsonl")
    files.renew()  # as after a rollback, which rewrites it
    files.check()


def test_a_check_asks_once_for_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And opens none that it knows: it is made in each step."""
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).touch()
    files, calls = RunFiles(tmp_path), []
    for name in ("stat", "open"):
        call = getattr(os, name)
        counting = lambda *args, _name=name, _call=call: calls.append(_name) or _call(*args)  # noqa: E731
        monkeypatch.setattr(os, name, counting)
    files.check()
    assert sorted(calls) == ["open"] * 2 + ["stat"] * 3, "run_dir and two files; two are not there"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_is_named_with_the_file(tmp_path: Path, in_no_time: None) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    with pytest.raises(FailedWrite, match=r"metrics.jsonl could not .*No space left") as caught:
        AppendedFile(tmp_path / "metrics.jsonl").write("a line")
    assert caught.value.errno == errno.ENOSPC  # a restart may succeed
    with pytest.raises(FailedWrite, match=r"events.jsonl could not be written: No space left"):
        Events(tmp_path, print).log("resume", 1)


def test_a_write_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_no_time: None
) -> None:
    failures = iter([errno.ESTALE, errno.EIO])
    write = os.write

    def failing(fd: int, data: bytes) -> int:
        if (number := next(failures, None)) is not None:
            raise OSError(number, os.strerror(number))
        return write(fd, data[:3])  # and only a part at a time

    monkeypatch.setattr(os, "write", failing)
    file = AppendedFile(tmp_path / "metrics.jsonl")
    file.write("a line")
    file.close()
    assert (tmp_path / "metrics.jsonl").read_text() == "a line\n"


# --- and how they may be read --------------------------------------------------------------------

TRAIN = [*TINY, "model.num_hidden_layers=2", "steps=2", "validation.every=2", "checkpoint.every=2"]
WANDB = ["logger=wandb", "logger.mode=offline"]
TITANLIKE = [sys.executable, "-m", "titanlike"]
COMMANDS = {
    "train": [sys.executable, str(ROOT / "train.py"), *TRAIN, "run_dir=all/run"],
    "resume": [*TITANLIKE, "train", *TRAIN, "steps=4", "run_dir=all/run"],
    "sweep": [*TITANLIKE, "train", "-m", *TRAIN, *WANDB, "pp=2", "seed=1,2", "run_dir=all/sweep"],
    "verify": [sys.executable, str(ROOT / "tools/verify.py"), *TINY, "pp=2", "run_dir=all/verify"],
    "export": [*TITANLIKE, "checkpoint", "consolidate", "all/run", "all/model.safetensors"],
}


@pytest.mark.grid
def test_every_file_of_a_run_follows_the_umask_of_the_shell(tmp_path: Path) -> None:
    umask = 0o027  # of the three kinds of users each has other rights
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    settings = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 240}
    for words in COMMANDS.values():
        done = subprocess.run(words, umask=umask, **settings)
        assert done.returncode == 0, done.stderr
    written = [path for path in (tmp_path / "all").rglob("*") if not path.is_symlink()]
    assert {"metrics.jsonl", "COMMITTED", "state.json", "config.yaml", "result.json"} <= {
        path.name for path in written
    }
    wrong = [
        f"{path.stat().st_mode & 0o777:o} {path.relative_to(tmp_path)}"
        for path in written
        if path.stat().st_mode & 0o777 != (0o777 if path.is_dir() else 0o666) & ~umask
    ]
    shutil.rmtree(tmp_path / "all")
    assert not wrong
