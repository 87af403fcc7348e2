"""A checkpoint that cannot be read for a moment is not damaged; a wrong mark can be lifted."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from support import saved_runs
from support.cells import GRID, slow
from support.saved_runs import a_run, checkpoint, events, numbers, train_all, train_each
from support.world import RankError, run_world
from titanlike.checkpoint import integrity, storage
from titanlike.checkpoint.commands import main
from titanlike.checkpoint.integrity import DAMAGED_MARKER, MARKER
from titanlike.checkpoint.storage import Storage, UnreadableFile
from titanlike.config.schema import Config
from titanlike.job import check
from titanlike.launch.worker import Worker

ERRORS = [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ETIMEDOUT]
QUICK = [errno.EIO, errno.ESTALE]
REST = slow(*(code for code in ERRORS if code not in QUICK), marks=GRID)
TENSORS = "step-00000006/__0_0.distcp"
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


def train_unreadable(config: Config, worker: Worker, rank: int, *fault: Any) -> list[str]:
    """`train_each`, where one rank cannot read a file."""
    if worker.rank != rank:
        return train_each(config, worker, [config])
    with unreadable(*fault):
        return train_each(config, worker, [config])


def train_with(config: Config, rank: int, *fault: Any) -> str:
    folder = Path(config.run_dir)
    return run_world(train_unreadable, config, folder, rank, *fault)[0][0]


@pytest.mark.parametrize("code", [*QUICK, *REST], ids=errno.errorcode.get)
def test_an_error_that_passes_is_tried_again(run: Config, code: int) -> None:
    folder = Path(run.run_dir)
    truth = numbers(folder)
    assert train_with(run, 0, TENSORS, code, 3) == ""
    assert [event["step"] for event in events(folder, "resume")] == [6]
    assert events(folder, "damaged") == [] and numbers(folder) == truth


@pytest.mark.parametrize(
    "name", ["__0_0.distcp", "state.json", *slow("files.json", MARKER, ".metadata", marks=GRID)]
)
def test_an_error_that_stays_names_file_and_reason_and_marks_nothing(
    run: Config, name: str
) -> None:
    """Also not the older checkpoint in its place; and the next start finds all as it was."""
    folder = Path(run.run_dir)
    kept = (folder / "metrics.jsonl").read_bytes()
    error = train_with(run, 0, f"step-00000006/{name}", errno.EIO)
    path = checkpoint(folder, 6)
    assert f"{path}/{name} cannot be read now: Input/output error" in error and "\n" not in error
    older = checkpoint(folder, 3)
    assert f"checkpoint.resume={older} run_dir=" in error, "how to go on if the steps may be lost"
    assert "step 0" not in error
    assert (path / MARKER).exists() and not (path / DAMAGED_MARKER).exists()
    assert (folder / "metrics.jsonl").read_bytes() == kept
    assert train_all(run) == [""]
    assert [event["step"] for event in events(folder, "resume")] == [6]


def test_a_single_checkpoint_that_cannot_be_read_is_not_lost(run: Config) -> None:
    folder = Path(run.run_dir)
    shutil.rmtree(checkpoint(folder, 3))
    error = train_with(run, 0, TENSORS, errno.EACCES)
    assert "Permission denied" in error and "run_dir=" not in error
    assert train_all(run) == [""]
    assert [event["step"] for event in events(folder, "resume")] == [6]


@pytest.mark.slow
def test_a_rank_that_cannot_read_its_part_is_no_verdict_either(tmp_path: Path) -> None:
    config = a_run(tmp_path / "run", 1, 2)
    assert train_all(config) == [""]
    with pytest.raises(RankError, match="cannot be read now: Stale file handle"):
        train_with(config, 1, "step-00000006/", errno.ESTALE)
    assert (checkpoint(tmp_path / "run", 6) / MARKER).exists()
    assert train_all(config) == [""]


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


def test_a_server_that_does_not_answer_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of a URL's file system have types of their own."""
    folder = Storage("memory://runs/step-00000001")
    state = {"step": 1, "progress": {}, "val_loss": None, "same": {}, "sequences": 1}
    folder.write(".metadata", b"")
    integrity.commit(folder, {".metadata": (0, integrity.checksum(b""))}, state)
    integrity.check_all(folder)
    original: Callable[..., Any] = MemoryFileSystem._open
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
    with pytest.raises(UnreadableFile, match=r"files.json cannot be read now: .*503: slow down"):
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


def test_a_wrong_mark_is_lifted_after_all_bytes_were_read(
    run: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(run.run_dir)
    path = checkpoint(folder, 6)
    integrity.mark_damaged(Storage(path), "it could not be read")
    assert main(["list", run.run_dir]) == 0
    command = f"checkpoint verify {path} --repair"
    assert command in " ".join(capsys.readouterr().out.split())
    assert main(["verify", run.run_dir]) == 1, "without --repair nothing changes"
    assert not (path / MARKER).exists()
    assert main(["verify", run.run_dir, "--repair"]) == 0
    assert "it was marked as damaged" in capsys.readouterr().out
    assert (path / MARKER).exists() and not (path / DAMAGED_MARKER).exists()
    assert train_all(run) == [""]
    assert [event["step"] for event in events(folder, "resume")] == [6]


@pytest.mark.parametrize("name", ["__0_0.distcp", "state.json", "files.json", ".metadata"])
def test_a_right_mark_stays(run: Config, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint(Path(run.run_dir), 6)
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)
    integrity.mark_damaged(Storage(path), f"{name} does not match")
    assert main(["verify", str(path), "--repair"]) == 1
    assert name in capsys.readouterr().out
    assert (path / DAMAGED_MARKER).exists() and not (path / MARKER).exists()


def test_a_run_that_passes_over_a_marked_checkpoint_says_so(run: Config) -> None:
    folder = Path(run.run_dir)
    path = checkpoint(folder, 6)
    integrity.mark_damaged(Storage(path), "it could not be read")
    assert train_all(run) == [""]
    [event] = events(folder, "passed_over")
    assert event["step"] == 6 and f"verify {path} --repair" in event["text"]
    assert [event["step"] for event in events(folder, "resume")] == [3]
