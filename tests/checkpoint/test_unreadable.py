"""A checkpoint that cannot be read for a moment is not damaged; a wrong mark can be lifted."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from support import saved_runs
from support.saved_runs import checkpoint, events, flip
from support.saved_state import Loaded, going_on, load, load_each, opened
from support.world import run_world
from titanlike.core.checkpoint import integrity, storage
from titanlike.core.checkpoint.storage import DAMAGED_MARKER, MARKER, Storage, UnreadableFile
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.run import checks as check
from titanlike.use.checkpoint_commands import main

Fault = tuple[int, str, int, int]  # rank, part of a path, errno, how many times
TENSORS = "step-00000006/rank-00000.safetensors"
saved, run = saved_runs.saved, saved_runs.run


@contextmanager
def unreadable(part: str, code: int, times: int = 1_000_000) -> Iterator[None]:
    """Opening a local file with `part` in its path fails so many times."""
    original, left = storage.open_regular, [times]

    def fails(path: str, *args: Any) -> Any:
        if part in str(path) and left[0] > 0:
            left[0] -= 1
            raise OSError(code, os.strerror(code), path)
        return original(path, *args)

    no_pauses = (0.0,) * len(storage._PAUSES)
    with mock.patch.multiple(storage, open_regular=fails, _PAUSES=no_pauses):
        yield


def load_with_faults(
    config: Config, worker: Worker, runs: list[tuple[Config, Fault]]
) -> list[Loaded]:
    """What is loaded where one rank cannot read a file; and then, where it can."""
    built, _ = opened(config, worker)
    found = []
    for one, (rank, *fault) in runs:
        with unreadable(*(fault if worker.rank == rank else ("nowhere", 0))):
            found.append(load(built, one, worker.rank))
        found.append(load(built, one, worker.rank))
    return found


@pytest.mark.slow
def test_a_transient_read_error_is_retried_and_a_lasting_one_marks_no_damage(
    saved: Config, tmp_path: Path
) -> None:
    """It names file, reason and the older checkpoint, which is not loaded in its place; the next
    start finds all as it was."""
    many = 1_000_000
    faults: dict[str, Fault] = {
        "passes": (0, TENSORS, errno.EIO, 3),
        "Input/output error": (0, TENSORS, errno.EIO, many),
        "Stale file handle": (0, "step-00000006/state.json", errno.ESTALE, many),
        "Too many open files": (0, "step-00000006/index.json", errno.EMFILE, many),
        "Permission denied": (0, TENSORS, errno.EACCES, many),
    }
    runs = {}
    for says in faults:
        shutil.copytree(saved.run_dir, tmp_path / says)
        (tmp_path / says / "events.jsonl").unlink()
        runs[says] = going_on(saved, tmp_path / says)
    shutil.rmtree(checkpoint(tmp_path / "Permission denied", 3))
    pairs = list(zip(runs.values(), faults.values(), strict=True))
    loaded = iter(run_world(load_with_faults, saved, tmp_path / "one", pairs)[0])
    for says, (_, part, *_) in faults.items():
        first, then = next(loaded), next(loaded)
        assert (then.step, then.error) == (6, ""), says
        if says == "passes":
            assert (first.step, first.error, first.state) == (6, "", then.state)
        else:
            path = tmp_path / says / "checkpoints" / part
            assert f"{path} cannot be read now: {says}" in first.error, first
            assert "step 0" not in first.error
            older = checkpoint(tmp_path / says, 3)
            how = f"checkpoint.resume={older} run_dir="  # if the steps may be lost
            assert (how in first.error) == older.exists()
        assert events(tmp_path / says, "damaged") == events(tmp_path / says, "leftover") == []
        step = checkpoint(tmp_path / says, 6)
        assert (step / MARKER).exists() and not (step / DAMAGED_MARKER).exists()


def test_an_unreadable_shard_marks_no_damage(saved: Config, tmp_path: Path) -> None:
    """Every rank ends with its reason."""
    config = going_on(saved, Path(shutil.copytree(saved.run_dir, tmp_path / "run")))
    two = [(config, (1, "step-00000006/", errno.ESTALE, 1_000_000))]
    for first, then in run_world(load_with_faults, replace(config, dp=2), tmp_path / "two", two):
        assert "cannot be read now: Stale file handle" in first.error and then.step == 6
    assert (checkpoint(tmp_path / "run", 6) / MARKER).exists()


def test_a_folder_that_cannot_be_searched_is_neither_empty_nor_a_leftover(
    run: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system's `exists` says no to any error; what a killed save left is deleted."""
    monkeypatch.setattr(storage, "_PAUSES", (0.0,))
    path = checkpoint(Path(run.run_dir), 6)
    original = os.stat

    def stat(name: Any, **options: Any) -> os.stat_result:
        if str(name).startswith(f"{path}/"):
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return original(name, **options)

    monkeypatch.setattr(os, "stat", stat)
    [problem] = check.problems(run)
    assert f"{path}/{MARKER} cannot be read now: Permission denied" in str(problem)
    assert path.is_dir()


def test_an_unreachable_server_marks_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of a URL's file system have types of their own."""
    folder = Storage("memory://runs/step-00000001")
    state = {"step": 1, "progress": {}, "val_loss": None, "same": {}}
    integrity.commit(folder, [], state)
    original = MemoryFileSystem._open
    errors: list[Exception] = [TimeoutError("no answer"), RuntimeError("503: slow down")]

    def fails(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return original(*args, **options)

    monkeypatch.setattr(storage, "_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(MemoryFileSystem, "_open", fails)
    integrity.check_all(folder)
    assert not errors
    errors += [RuntimeError("503: slow down")] * 3
    with pytest.raises(UnreadableFile, match=r"COMMITTED cannot be read now: .*503: slow down"):
        integrity.check_all(folder)


def test_list_and_verify_say_unreadable_and_not_damaged(
    run: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    with unreadable("step-00000006/state.json", errno.EIO):
        assert main(["list", run.run_dir]) == 0
        assert "step-00000006  unreadable" in capsys.readouterr().out
        assert main(["verify", run.run_dir]) == 2
    out, err = capsys.readouterr()
    assert "step-00000006: unreadable" in out and "Input/output error" in err
    assert "damaged" not in out


def test_a_damage_mark_is_lifted_by_renaming_it_once_all_bytes_verify(
    run: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(run.run_dir)
    path = checkpoint(folder, 6)
    integrity.mark_damaged(Storage(path), "it could not be read")
    assert main(["list", run.run_dir]) == 0
    how = f"checkpoint verify {path}; if its bytes are right, rename DAMAGED to COMMITTED"
    assert how in " ".join(capsys.readouterr().out.split())
    [[loaded]] = run_world(load_each, run, tmp_path / "ranks", [run])
    assert loaded.step == 3
    [event] = events(folder, "passed_over")
    assert event["step"] == 6 and how.partition(" ")[2] in event["text"]
    for name in ("rank-00000.safetensors", "state.json", "index.json"):
        flip(path / name)
        capsys.readouterr()
        assert main(["verify", str(path)]) == 1
        out = capsys.readouterr().out
        assert name in out and "are right" not in out
        flip(path / name)
    assert main(["verify", run.run_dir]) == 1
    assert "its bytes are right: rename DAMAGED to COMMITTED" in capsys.readouterr().out
    (path / DAMAGED_MARKER).rename(path / MARKER)
    assert main(["verify", run.run_dir]) == 0
    integrity.check_all(Storage(path))
