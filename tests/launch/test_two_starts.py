"""The same run, or the same sweep, that is started again while it still runs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from support.commands import TINY, command
from support.launched import Launched
from support.paths import ROOT
from support.waiting import until
from titanlike.checkpoint.integrity import delete_checkpoint
from titanlike.checkpoint.storage import Storage
from titanlike.launch.failures import Failure, root_cause, write_failure
from titanlike.launch.run_dir_owner import FILE, Owner, claim, held

TRAIN = ROOT / "train.py"
SAVING = [*TINY, "model.layers=2", "checkpoint.every=1", "checkpoint.keep=2", "run_dir=run"]


def test_what_fails_beside_a_takeover_is_not_its_cause(tmp_path: Path) -> None:
    """A start that takes over removes files of the other's unfinished save."""
    write_failure(tmp_path, Failure(1, "FileNotFoundError: step-00000007", "frames", False, 1.0))
    write_failure(tmp_path, Failure(0, "taken over", "", False, 2.0, taken_over=True))
    cause = root_cause(tmp_path)
    assert cause is not None and cause.rank == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("starts", "layout"),
    [
        (2, ["steps=100"]),
        (4, ["pp=2", "steps=200"]),
        (8, ["dp=2", "steps=400", "checkpoint.mode=sync"]),
        (8, ["steps=600"]),
    ],
)
def test_of_many_starts_during_saves_the_newest_completes_and_the_others_say_why_they_end(
    starts: int, layout: list[str], tmp_path: Path
) -> None:
    rng = random.Random(starts)
    checkpoints = tmp_path / "run" / "checkpoints"
    runs = [Launched(*SAVING, *layout, cwd=tmp_path, program=TRAIN)]
    until(lambda: list(checkpoints.glob("*/COMMITTED")))
    for _ in range(starts - 1):
        runs.append(Launched(*SAVING, *layout, cwd=tmp_path, program=TRAIN))
        owner = (tmp_path / "run" / FILE).read_text()
        if rng.random() < 0.5:  # else the next one comes before this one has taken over
            until(lambda owner=owner: (tmp_path / "run" / FILE).read_text() != owner)
        time.sleep(rng.random())
    ends = [run.wait(timeout=200) for run in runs]
    assert ends[-1][0] == 0, ends[-1][2]
    for code, _, err in ends[:-1]:
        assert (code, "taken it over" in err) in ((0, False), (1, True)), err
        assert "Traceback" not in err
        assert "Errno" not in err
    assert any(code == 1 for code, *_ in ends)
    steps = int(re.search(r"steps=(\d+)", " ".join(layout))[1])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, steps + 1))
    # the files of a run are those of the newest start
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"
    assert not list((tmp_path / "run" / "logs").glob("*.error.json"))


def test_a_second_start_waits_until_every_rank_of_the_first_has_ended(tmp_path: Path) -> None:
    said: list[str] = []
    with Owner(tmp_path).wait(5, said.append):
        assert not said
    with contextlib.ExitStack() as rank:
        rank.enter_context(held(tmp_path))
        threading.Timer(1.0, rank.close).start()
        begin = time.monotonic()
        with Owner(tmp_path).wait(20, said.append):
            assert 0.5 < time.monotonic() - begin < 10
    assert f"process {os.getpid()}" in said[0] and "since 20" in said[0]
    with held(tmp_path):  # stopped by a debugger, for example: the wait is bounded
        begin = time.monotonic()
        with Owner(tmp_path).wait(1, said.append):
            assert time.monotonic() - begin < 10


def test_a_start_does_not_wait_for_one_of_another_machine(tmp_path: Path) -> None:
    Owner(tmp_path)
    record = json.loads((tmp_path / FILE).read_text()) | {"host": "elsewhere"}
    (tmp_path / FILE).write_text(json.dumps(record))
    with held(tmp_path):
        begin = time.monotonic()
        with Owner(tmp_path).wait(60, print):
            assert time.monotonic() - begin < 5


@pytest.mark.parametrize("kind", ["adds", "deletes"])
def test_a_checkpoint_is_deleted_though_another_process_writes_there(
    kind: str, tmp_path: Path
) -> None:
    ended = threading.Event()
    errors = []

    def disturb(number: int) -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                if kind == "adds":
                    (tmp_path / "step-00000001" / f"{number}-{time.monotonic_ns()}").touch()
                    time.sleep(0.001)
                else:
                    shutil.rmtree(tmp_path / "step-00000001")

    def delete() -> None:
        try:
            delete_checkpoint(Storage(tmp_path / "step-00000001"))
        except OSError as error:
            errors.append(error)

    for _ in range(6):
        (tmp_path / "step-00000001").mkdir()
        for number in range(300):
            (tmp_path / "step-00000001" / str(number)).touch()
        ended.clear()
        others = [threading.Thread(target=disturb, args=[number]) for number in range(3)]
        for other in others:
            other.start()
        # a writer ends soon, as one does that is no longer the owner
        threading.Timer(0.2, ended.set).start()
        delete()
        ended.set()
        for other in others:
            other.join()
        shutil.rmtree(tmp_path / "step-00000001", ignore_errors=True)
    assert not errors, {errno.errorcode.get(error.errno or 0) for error in errors}


@pytest.mark.slow
def test_a_second_start_of_a_sweep_says_who_runs_it_and_a_dead_one_does_not_block(
    tmp_path: Path,
) -> None:
    words = ["-m", *TINY, "model.layers=2", "seed=1,2", "sweep.resume=true", "run_dir=sweep"]
    first = Launched(*words, "steps=100000", cwd=tmp_path, program=TRAIN)
    until((tmp_path / "sweep" / "0" / "metrics.jsonl").exists)
    second = command(*words, cwd=tmp_path)
    assert second.returncode == 2 and "Traceback" not in second.stderr
    assert f"process {first.process.pid}, since 20" in second.stderr and "host " in second.stderr
    # a task of a job array that has a share of its own may run beside it
    share = command(*words, "sweep.share=1/2", "steps=1", cwd=tmp_path)
    assert share.returncode == 0, share.stderr
    first.process.send_signal(signal.SIGKILL)
    assert first.all_exit(within=30)
    third = command(*words, cwd=tmp_path)
    assert third.returncode == 0, third.stderr


def test_of_two_claims_one_is_told_who_has_the_other(tmp_path: Path) -> None:
    file, _ = claim(tmp_path / "lock")
    assert file is not None
    other, who = claim(tmp_path / "lock")
    assert other is None and f"process {os.getpid()}" in who
    threading.Timer(0.5, file.close).start()
    again, _ = claim(tmp_path / "lock", patience=20)
    assert again is not None
    again.close()
