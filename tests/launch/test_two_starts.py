"""The same run, or the same sweep, that is started again while it still runs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.cells import GRID, slow
from support.commands import TINY, command
from support.launched import Launched
from support.paths import ROOT
from support.waiting import until
from titanlike.core.checkpoint.integrity import delete_checkpoint
from titanlike.core.checkpoint.storage import Storage
from titanlike.core.launch import run_dir_lock
from titanlike.core.launch.failures import TakenOver
from titanlike.core.launch.run_dir_lock import OWNER, RunDirOwner, claim, lock_as_rank

TRAIN = ROOT / "train.py"
SAVING = [
    *TINY,
    "model.num_hidden_layers=2",
    "checkpoint.every=1",
    "checkpoint.keep=2",
    "run_dir=run",
]


@pytest.mark.parametrize(
    ("starts", "layout"),
    [
        *slow((4, ["pp=2", "steps=200"])),
        *slow((8, ["dp=2", "steps=400", "checkpoint.mode=sync"]), marks=GRID),
    ],
)
def test_the_newest_of_concurrent_launches_completes_and_the_others_say_why_they_end(
    starts: int, layout: list[str], tmp_path: Path
) -> None:
    rng = random.Random(starts)
    checkpoints = tmp_path / "run" / "checkpoints"
    runs = [Launched(*SAVING, *layout, cwd=tmp_path, program=TRAIN)]
    until(lambda: list(checkpoints.glob("*/COMMITTED")))
    for _ in range(starts - 1):
        runs.append(Launched(*SAVING, *layout, cwd=tmp_path, program=TRAIN))
        owner = (tmp_path / "run" / OWNER).read_text()
        if rng.random() < 0.5:  # else the next one comes before this one has taken over
            until(lambda owner=owner: (tmp_path / "run" / OWNER).read_text() != owner)
        time.sleep(rng.random())
    ends = [run.wait(timeout=200) for run in runs]
    assert ends[-1][0] == 0, ends[-1][2]
    for code, _, err in ends[:-1]:
        assert (code, "taken it over" in err) in ((0, False), (1, True)), err
        assert "Traceback" not in err and "Errno" not in err
    assert any(code == 1 for code, *_ in ends)
    steps = int(re.search(r"steps=(\d+)", " ".join(layout))[1])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, steps + 1))
    # the files of a run are those of the newest start
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"
    assert not list((tmp_path / "run" / "logs").glob("*.error.json"))


class Clock(SimpleNamespace):
    """Stands in for `time`: `polls` sleeps have passed, in which `after` is called."""

    def __init__(self, after: Callable[[int], None] = lambda polls: None) -> None:
        super().__init__(time=time.time, strftime=time.strftime, localtime=time.localtime)
        self.polls, self.after = 0, after

    def monotonic(self) -> float:
        return self.polls * 0.05

    def sleep(self, seconds: float) -> None:
        self.polls += 1
        assert self.polls < 1000, "it waits for ever"
        self.after(self.polls)


def test_an_earlier_launch_ends_once_a_later_one_owns_the_folder(tmp_path: Path) -> None:
    first = RunDirOwner(tmp_path)
    for _ in range(2):
        first.check()
    second = RunDirOwner(tmp_path)
    with pytest.raises(TakenOver, match=f"taken it over .*process {os.getpid()}.*another run_dir"):
        first.check()
    second.check()
    (tmp_path / OWNER).unlink()
    second.check()  # a file system that is gone for a moment


def test_a_second_launch_waits_for_every_rank_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with RunDirOwner(tmp_path).wait(5, said.append):
        assert not said
    with contextlib.ExitStack() as rank:
        clock = Clock(lambda polls: rank.close() if polls == 7 else None)
        monkeypatch.setattr(run_dir_lock, "time", clock)
        rank.enter_context(lock_as_rank(tmp_path))
        with RunDirOwner(tmp_path).wait(20, said.append):
            assert clock.polls == 7
    assert f"process {os.getpid()}" in said[0] and "since 20" in said[0] and len(said) == 1
    with lock_as_rank(tmp_path):
        # stopped by a debugger, for example: the wait is bounded
        monkeypatch.setattr(run_dir_lock, "time", clock := Clock())
        with RunDirOwner(tmp_path).wait(1, said.append):
            assert 20 <= clock.polls < 25
        # of another machine: nobody waits for it
        record = json.loads((tmp_path / OWNER).read_text()) | {"host": "elsewhere"}
        (tmp_path / OWNER).write_text(json.dumps(record))
        monkeypatch.setattr(run_dir_lock, "time", clock := Clock())
        with RunDirOwner(tmp_path).wait(60, said.append):
            assert clock.polls == 0


def test_of_two_launches_at_the_same_moment_the_newer_one_waits_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has seen a launch before itself."""
    first = RunDirOwner(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(RunDirOwner, "_read", lambda _: None)
        second = RunDirOwner(tmp_path)
    with contextlib.ExitStack() as rank:
        rank.enter_context(lock_as_rank(tmp_path))  # of the first
        clock = Clock(lambda polls: rank.close() if polls == 7 else None)
        monkeypatch.setattr(run_dir_lock, "time", clock)
        with second.wait(20, print):
            assert clock.polls == 7
            with pytest.raises(TakenOver):
                first.check()


def test_the_loser_of_two_claims_is_told_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = claim(tmp_path / "lock")
    assert file is not None
    other, who = claim(tmp_path / "lock")
    assert other is None and f"process {os.getpid()}" in who
    clock = Clock(lambda polls: file.close() if polls == 5 else None)
    monkeypatch.setattr(run_dir_lock, "time", clock)
    again, _ = claim(tmp_path / "lock", patience=20)
    assert again is not None and clock.polls == 5
    again.close()


@pytest.mark.parametrize("kind", ["adds", "deletes"])
def test_a_checkpoint_is_deleted_though_another_process_writes_there(
    kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    for number in range(300):
        (folder / str(number)).touch()

    def disturb(number: int) -> None:
        for at in range(200):  # a writer ends soon, as one does that is no longer the owner
            with contextlib.suppress(OSError):
                (folder / f"{number}-{at}").touch() if kind == "adds" else shutil.rmtree(folder)

    others = [threading.Thread(target=disturb, args=[number]) for number in range(3)]
    for other in others:
        other.start()
    delete_checkpoint(Storage(folder))
    for other in others:
        other.join()


@pytest.mark.slow
def test_a_second_launch_of_a_sweep_names_the_owner_unless_it_is_dead(tmp_path: Path) -> None:
    words = [
        "-m",
        *TINY,
        "model.num_hidden_layers=2",
        "seed=1,2",
        "sweep.resume=true",
        "run_dir=sweep",
    ]
    first = Launched(*words, "steps=100000", cwd=tmp_path, program=TRAIN)
    until((tmp_path / "sweep" / "0" / "metrics.jsonl").exists)
    second = command(*words, cwd=tmp_path)
    assert second.returncode == 2 and "Traceback" not in second.stderr
    assert f"process {first.process.pid}, since 20" in second.stderr and "host " in second.stderr
    first.process.send_signal(signal.SIGKILL)
    assert first.all_exit(within=30)
    third = command(*words, cwd=tmp_path)
    assert third.returncode == 0, third.stderr
