"""A rank that hangs ends the run within the timeout and is named; a slow one does not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from support.cells import slow
from support.commands import command
from support.models import tiny
from support.world import RankError, run_world
from titanlike.config.schema import Config, Launch
from titanlike.launch.failures import Failure, root_cause
from titanlike.launch.hang_report import explain
from titanlike.launch.heartbeat import Beat, heartbeat_path
from titanlike.launch.watchdog import Watchdog
from titanlike.launch.worker import Worker

HANGS = Launch(timeout=60, step_timeout=2, heartbeat=1)


def train_until(config: Config, worker: Worker, hang: str) -> None:
    """Training in which rank 1 hangs when it takes the batch of step 3."""
    from titanlike.training import loop
    from titanlike.training.train import train

    take = loop.batches_from

    def stops(*args):
        for number, batch in enumerate(take(*args), start=1):
            if worker.rank == 1 and number == 3:
                (worker.run_dir / "hung").touch()
                if hang == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                    (worker.run_dir / "woken").touch()
                time.sleep(60)
            yield batch

    loop.batches_from = stops
    train(config, worker)


@pytest.mark.parametrize("hang", ["stop", *slow("sleep")])
def test_a_rank_that_hangs_in_its_data_or_does_not_respond_is_named(
    hang: str, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match="died without a result"):
        run_world(train_until, replace(tiny(2), launch=HANGS), tmp_path, hang, timeout=40)
    failure = root_cause(tmp_path)
    assert failure is not None and not failure.transport
    beat = json.loads(heartbeat_path(tmp_path, 1).read_text())
    where = {
        "sleep": r"rank 1 has been in data for \d s, at test_launch_hangs.py:\d+ in stops",
        "stop": rf"rank 1 \({beat['host']}, pid {beat['pid']}\) has not responded for \d s, last .*",
    }
    said = r"no progress for \d s in step 3 \(launch.step_timeout=2\): "
    said += where[hang] + "; rank 0 waits before the first action"
    assert re.fullmatch(said, failure.error), failure.error
    assert (tmp_path / "logs/flight_recorder/gloo_rank0").stat().st_size > 1000
    if hang == "sleep":
        assert failure.frames.startswith("rank 1:\n") and "time.sleep(60)" in failure.frames
    else:
        assert (tmp_path / "woken").exists()  # a stopped process does not handle SIGTERM


@pytest.mark.slow
def test_a_command_whose_model_hangs_says_where(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(
        "import os, time\n"
        "from titanlike.models.llama import Block, Llama\n"
        "class HangingBlock(Block):\n"
        "    calls = 0\n"
        "    def forward(self, x, *others):\n"
        "        if not x.is_meta:\n"
        "            self.calls += 1\n"
        "            if self.calls == 4 * 2 + 3:\n"
        "                time.sleep(100)\n"
        "        return super().forward(x, *others)\n"
        "def hanging(*, vocab_size: int, dim: int, **sizes):\n"
        "    model = Llama(vocab_size=vocab_size, dim=dim, **sizes)\n"
        "    model.layers[3].__class__ = HangingBlock\n"
        "    return model\n"
    )
    words = "pp=2 schedule.microbatches=4 model.name=hanging.hanging model.dim=32 model.ffn_dim=64 "
    words += "model.layers=4 seq_len=16 batch_size=8 data=synthetic validation.every=0 logger=none "
    words += "launch.step_timeout=2 run_dir=run checkpoint.last=false steps=5 mixes_samples=true"
    done = command(*words.split(), cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    said = (
        "no progress for 2 s in step 3 (launch.step_timeout=2): rank 1 has been in 1F2 (forward of "
        "stage 1, microbatch 2) for 2 s, at hanging.py:9 in forward; rank 0 waits in "
    )
    assert said in done.stderr and "Traceback" not in done.stderr
    assert "time.sleep(100)" in done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "failed" and said in result["error"]
    assert 'hanging.py", line 9 in forward' in (tmp_path / "run/logs/rank1.log").read_text()


def slow_phases(config: Config, worker: Worker) -> tuple[str, list[str]]:
    """Rank 0 is slow within its timeouts; rank 1 is stopped for a while, as by Ctrl-Z."""
    with Watchdog(worker, Launch(timeout=30, step_timeout=1, heartbeat=1)) as watchdog:
        if worker.rank == 1:
            watchdog.enter_phase(7, "data")
            subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.7)
        else:
            for doing in ("build", "data", "save"):
                watchdog.enter_phase(1, doing, 30)
                time.sleep(1.3)
            watchdog.enter_phase(1, "validation")
            for number in range(5):
                watchdog.start_action(f"0F{number}")
                time.sleep(0.3)
            watchdog.enter_phase(1, "load", 0)
            time.sleep(1.3)
    return heartbeat_path(worker.run_dir, worker.rank).read_text(), [
        thread.name for thread in threading.enumerate()
    ]


@pytest.mark.slow
def test_slow_phases_and_a_stopped_job_are_no_hang_and_nothing_is_left(tmp_path: Path) -> None:
    for beat, threads in run_world(slow_phases, tiny(2), tmp_path, timeout=30):
        assert json.loads(beat)["ended"] == "done"
        assert threads == ["MainThread"]


def alone(config: Config, worker: Worker) -> None:
    told: list[Failure] = []
    settings = Launch(timeout=1, step_timeout=0, heartbeat=10)

    def report_failure(failure: Failure) -> None:
        told.append(failure)
        (worker.run_dir / "told").write_text(told[0].error)

    with Watchdog(worker, settings, report_failure) as watchdog:
        (worker.run_dir / "logs").rename(worker.run_dir / "moved")
        (worker.run_dir / "logs").write_text("no folder any more")
        watchdog.enter_phase(0, "build", settings.timeout)
        time.sleep(30)


def test_a_process_alone_ends_even_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="died without a result"):
        run_world(alone, tiny(1), tmp_path, timeout=20)
    said = "no progress for 1 s in build (launch.timeout=1): rank 0 has been in build for 1 s, at "
    assert (tmp_path / "told").read_text().startswith(said + "test_launch_hangs.py:")
    assert said in (tmp_path / "rank0.out").read_text()


def beats(count: int, **changes) -> dict[int, Beat]:
    start = Beat(0, 5, time.time(), "n1", 10, 12, "data", "0B2", 0.0, 30.0, "frames", "f.py", True)
    return {rank: replace(start, rank=rank, pid=10 + rank, **changes) for rank in range(count)}


def test_of_thousands_of_ranks_a_few_are_named_and_the_rest_counted() -> None:
    before, now = beats(2000), beats(2000, number=6)
    now[77] = replace(now[77], number=5)
    now[1500] = replace(now[1500], waits=False, action="3F1", at="model.py:12 in forward")
    del now[3]
    text, frames = explain(now[9], before, now, 2000, "launch.step_timeout=30")
    assert "rank 77 (n1, pid 87) has not responded for 0 s, last in 0B2" in text
    assert "rank 3 has written no heartbeat" in text
    assert "rank 1500 has been in 3F1 (forward of stage 3, microbatch 1) for 30 s" in text
    assert text.endswith("; 1993 more wait") and len(text) < 1200
    assert frames == "rank 77:\nframes"


def test_if_all_ranks_wait_none_is_blamed() -> None:
    before, now = beats(2), beats(2, number=6)
    text, _ = explain(now[0], before, now, 2, "launch.step_timeout=30")
    assert "no rank is known to be stuck, all wait for each other; rank 0 waits in 0B2" in text
