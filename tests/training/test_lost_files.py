"""Files of a run that are deleted, moved or replaced while it trains."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commands import TINY
from support.launched import Launched
from support.paths import ROOT
from support.waiting import until
from titanlike.metrics.events import Events
from titanlike.metrics.run_files import AppendedFile, FailedWrite, LostFiles, RunFiles


def _replace(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


def _by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


LOSSES = {
    "metrics.jsonl deleted": ("metrics.jsonl", os.unlink, "deleted"),
    "metrics.jsonl replaced": ("metrics.jsonl", _replace, "replaced"),
    "events.jsonl deleted": ("events.jsonl", os.unlink, "deleted"),
    "checkpoints moved": ("checkpoints", lambda path: path.rename(f"{path}2"), "deleted or moved"),
    "run_dir moved": ("", lambda path: path.rename(f"{path}2"), ""),
    "run_dir deleted": ("", shutil.rmtree, ""),
    "a file in place of run_dir": ("", _by_a_file, ""),
}
QUICK = {("metrics.jsonl deleted", "pp=2")}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[pytest.mark.slow] * ((name, layout) not in QUICK))
        for name in LOSSES
        for layout in ("dp=1", "pp=2")
    ],
)
def test_a_run_whose_files_are_lost_ends_soon_and_says_which(
    name: str, layout: str, tmp_path: Path
) -> None:
    inside, lose, what = LOSSES[name]
    words = [*TINY, "model.layers=2", layout, "steps=100000", "checkpoint.every=20"]
    run = Launched(
        *words, "run_dir=run", "launch.heartbeat=1", cwd=tmp_path, program=ROOT / "train.py"
    )
    # the run has seen every file of its own by then
    until((tmp_path / "run" / "checkpoints" / "step-00000060" / "COMMITTED").exists)
    with run.paused():  # else it may leave result.json in a folder that is being deleted
        lose(tmp_path / "run" / inside)
    begin = time.monotonic()
    code, out, err = run.wait(timeout=60)
    assert time.monotonic() - begin < 40
    assert code == 1
    assert str(tmp_path / "run" / inside) in err
    reasons = f"{what}.* while the run wrote to it|could not be written: (Not a d|No such f)"
    assert re.search(reasons, err), err
    assert "Traceback" not in err and "training complete" not in out
    result = tmp_path / "run" / "result.json"
    if result.exists():
        assert str(tmp_path / "run" / inside) in json.loads(result.read_text())["error"]
    else:
        assert "result.json could not be written" in err


@pytest.mark.slow
def test_a_file_system_that_is_gone_for_a_moment_does_not_end_the_run(tmp_path: Path) -> None:
    words = [*TINY, "model.layers=2", "steps=400", "launch.heartbeat=30", "run_dir=run"]
    run = Launched(*words, cwd=tmp_path, program=ROOT / "train.py")
    until((tmp_path / "run" / "metrics.jsonl").exists)
    (tmp_path / "run").rename(tmp_path / "gone")
    time.sleep(1)
    (tmp_path / "gone").rename(tmp_path / "run")
    code, _, err = run.wait()
    assert code == 0, err
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 401))


def _is_lost(files: RunFiles, lose: Callable[[], object]) -> bool:
    files.check()
    lose()
    try:
        files.check()
    except LostFiles:
        return True
    return False


def test_files_that_come_or_grow_are_not_lost(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert not _is_lost(files, (tmp_path / "metrics.jsonl").touch)
    assert not _is_lost(files, lambda: (tmp_path / "metrics.jsonl").write_text("more"))
    assert not _is_lost(files, (tmp_path / "checkpoints").mkdir)
    assert _is_lost(files, lambda: _replace(tmp_path / "metrics.jsonl"))
    files.renew()
    assert _is_lost(files, (tmp_path / "checkpoints").rmdir)


def test_a_check_costs_next_to_nothing(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    begin = time.perf_counter()
    for _ in range(1000):
        files.check()
    assert time.perf_counter() - begin < 1  # 1 ms each, on a machine that is busy


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_is_named_with_the_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("titanlike.metrics.run_files._PAUSES", (0.01,))
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    with pytest.raises(FailedWrite, match=r"metrics.jsonl could not .*No space left") as caught:
        AppendedFile(tmp_path / "metrics.jsonl").write("a line")
    assert caught.value.errno == errno.ENOSPC  # a restart may succeed
    with pytest.raises(FailedWrite, match=r"events.jsonl could not be written: No space left"):
        Events(tmp_path, print).log("resume", 1)


def test_a_write_is_tried_again(tmp_path: Path, monkeypatch) -> None:
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
