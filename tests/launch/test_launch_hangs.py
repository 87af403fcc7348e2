"""A rank that hangs, or its device, ends the run within the timeout and is named; a slow one does
not.

No GPU is needed: `Device` stands in for the events in its queue. Processes, hangs and reports are
real.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.cells import slow
from support.models import tiny
from support.run_files import result
from support.waiting import until
from support.world import RankError, run_world
from titanlike.core.checkpoint.storage import Storage
from titanlike.core.config.groups.jobs import Launch
from titanlike.core.config.schema import Config
from titanlike.core.launch import torchrun
from titanlike.core.launch import watchdog as watchdogs
from titanlike.core.launch.device_queue import DeviceQueue
from titanlike.core.launch.failures import (
    Failure,
    PeerFailed,
    describe,
    peer_failed,
    root_cause,
    write_failure,
)
from titanlike.core.launch.hang import explain
from titanlike.core.launch.heartbeat import Beat, heartbeat_path
from titanlike.core.launch.rendezvous import barrier
from titanlike.core.launch.watchdog import Watchdog
from titanlike.core.launch.worker import Worker
from titanlike.core.training.session import watch_long_steps
from titanlike.run.job import ResultReporter

HANGS = Launch(timeout=60, step_timeout=2, heartbeat=1)


@dataclass
class Device:
    """Does what is put into its queue at once, until it stops."""

    recorded: int = 0
    stopped_at: float = float("inf")
    events: list[StandIn] = field(default_factory=list)

    def stop(self) -> None:
        self.stopped_at = min(self.stopped_at, self.recorded)

    def event(self) -> StandIn:
        self.events.append(StandIn(self))
        return self.events[-1]


class StandIn:
    """As torch.Event."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self._at = self._device.recorded
        self._device.recorded += 1

    def query(self) -> bool:
        return self._at < self._device.stopped_at


def hang_in_data(config: Config, worker: Worker, hang: str) -> None:
    """Training in which rank 1 hangs when it takes the batch of step 3."""
    from titanlike.core.training import loop
    from titanlike.core.training.loop import train

    take = loop.batches_from

    def stops(*args):
        for number, batch in enumerate(take(*args), start=1):
            if worker.rank == 1 and number == 3:
                if hang == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                    (worker.run_dir / "woken").touch()
                time.sleep(60)
            yield batch

    loop.batches_from = stops
    train(config, worker)


def hang_on_device(config: Config, worker: Worker, _: str) -> None:
    """Training in which the ranks' devices stop in step 3, each in front of an action's mark, while
    Python goes on, until it waits for the device at the end of the schedule."""
    from titanlike.core.training import session
    from titanlike.core.training.loop import train

    device, stops = Device(), [("0B2", True), ("1F2", False)]
    session.device_queue = lambda _: DeviceQueue(device.event)
    queued, start = Watchdog.action_queued, Watchdog.start_action

    def action_queued(self, action, received):
        if self._step == 3 and (str(action), received) == stops[worker.rank]:
            device.stop()
        queued(self, action, received)

    def wait_for_device(self, action):
        start(self, action)
        if self._step == 3 and action is None:
            time.sleep(60)

    Watchdog.action_queued, Watchdog.start_action = action_queued, wait_for_device
    train(config, worker)


# how rank 1 hangs, and what is said of the ranks; of a device that is far behind Python rank 0's
# waits for the gradient that comes of what hangs
HUNG = {
    "stop": r"rank 1 \(.*, pid \d+\) has not responded for \d+ s, last .*; rank 0 waits before .*",
    "device": r"rank 1 has been in 1F2 \(forward of stage 1, microbatch 2\) on its device for \d+ s, "
    r"Python at test_launch_hangs.py:\d+ in wait_for_device; rank 0 waits in 0B2 \(backward of stage 0, "
    r"microbatch 2\)",
    "sleep": r"rank 1 has been in data for \d+ s, at test_launch_hangs.py:\d+ in stops; rank 0 waits before .*",
}


@pytest.mark.parametrize("hang", ["device", *slow("stop", "sleep")])
def test_a_rank_that_hangs_is_named_with_what_it_does_and_who_waits(
    hang: str, tmp_path: Path
) -> None:
    config = replace(tiny(pp=2, layers=2), launch=HANGS)
    function = hang_on_device if hang == "device" else hang_in_data
    with pytest.raises(RankError, match="died without a result"):
        run_world(function, config, tmp_path, hang, timeout=60)
    failure = root_cause(tmp_path)
    assert failure is not None and not failure.transport
    said = r"no progress for \d+ s in step 3 \(launch.step_timeout=2\): " + HUNG[hang]
    assert re.fullmatch(said, failure.error), failure.error
    assert (tmp_path / "logs/flight_recorder/gloo_rank0").stat().st_size > 1000
    if hang == "stop":  # a stopped process does not handle SIGTERM
        assert (tmp_path / "woken").exists()
    else:
        assert failure.frames.startswith("rank 1:\n") and "time.sleep(60)" in failure.frames
    ResultReporter(tmp_path, [], 2).failed(failure)
    assert result(tmp_path)["status"] == "failed" and failure.error in result(tmp_path)["error"]


def stop_before_a_save(config: Config, worker: Worker, stopped: int) -> None:
    """One rank stops in a step; the others have begun a save, which may take half an hour."""
    with Watchdog(worker, HANGS) as watchdog:
        watchdog.enter_phase(8, "data")
        if worker.rank == stopped:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGSTOP)
        watchdog.enter_phase(8, "save", 1800)
        time.sleep(60)


@pytest.mark.parametrize("stopped", slow(0, 1))
def test_each_phase_has_its_own_hang_timeout(stopped: int, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="died without a result"):
        run_world(stop_before_a_save, tiny(pp=2), tmp_path, stopped, timeout=40)
    failure = root_cause(tmp_path)
    assert failure is not None
    said = rf"no progress for \d+ s in save at step 8 \(launch.step_timeout=2\): rank {stopped} \("
    assert re.match(said + r".*\) has not responded for \d+ s, last in data", failure.error), (
        failure
    )


def hang_among_four(config: Config, worker: Worker, stopped: int) -> None:
    """The last rank hangs, or the first are stopped; notes whose heartbeats a rank reads."""
    read = watchdogs.read_beats

    def noted(run_dir: Path, ranks: range) -> dict[int, Beat]:
        with (run_dir / f"read{worker.rank}").open("a") as file:
            file.write(f"{len(ranks)}\n")
        return read(run_dir, ranks)

    watchdogs.read_beats = noted
    with Watchdog(worker, HANGS) as watchdog:
        watchdog.enter_phase(3, "data")
        if worker.rank < stopped:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)


@pytest.mark.parametrize("stopped", [0, *slow(2)])
def test_of_many_ranks_that_hang_two_read_all_heartbeats_and_report(
    stopped: int, tmp_path: Path
) -> None:
    """A file server answers not a thousand ranks that read a thousand files each. Where both are
    stopped the others report."""
    with pytest.raises(RankError, match="died without a result"):
        run_world(hang_among_four, tiny(pp=2, dp=2), tmp_path, stopped, timeout=40)
    reads = {path.name: {*path.read_text().split()} for path in tmp_path.glob("read?")}
    told = {int(path.name[4]) for path in (tmp_path / "logs").glob("rank*.error.json")}
    failure = root_cause(tmp_path)
    assert failure is not None and told
    if stopped:
        assert failure.rank >= 2 and "rank 0 (" in failure.error and "rank 1 (" in failure.error
    else:
        assert told <= {0, 1} and "4" in reads["read0"] | reads["read1"]
        assert reads["read2"] | reads["read3"] == {"2"}


def slow_phases(config: Config, worker: Worker) -> list[str]:
    """Both are stopped for a while, as by Ctrl-Z; then rank 0 is slow within its timeouts."""
    with Watchdog(worker, Launch(timeout=30, step_timeout=1, heartbeat=1)) as watchdog:
        if worker.rank == 1:
            watchdog.enter_phase(7, "data")
        else:
            watchdog.enter_phase(1, "build", 30)
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        if worker.rank == 1:
            time.sleep(0.7)
        else:
            for doing, timeout in (("build", 30), ("data", 30), ("load", 0)):
                watchdog.enter_phase(1, doing, timeout)
                time.sleep(1.3)
    assert json.loads(heartbeat_path(worker.run_dir, worker.rank).read_text())["ended"] == "done"
    return [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
def test_slow_phases_and_a_stopped_job_are_not_hangs(tmp_path: Path) -> None:
    assert run_world(slow_phases, tiny(pp=2), tmp_path, timeout=30) == [["MainThread"]] * 2


def test_a_busy_device_queue_is_not_a_hang(tmp_path: Path) -> None:
    """Python waits longer than the timeout, for a device that does an action now and then."""
    device, failures = Device(), []
    worker = Worker(0, 1, 0, 1, tmp_path, None, [], report_failure=failures.append)
    (tmp_path / "logs").mkdir()
    settings = Launch(timeout=30, step_timeout=1, heartbeat=1)
    with Watchdog(worker, settings) as watchdog:
        watchdog.watch_device(DeviceQueue(device.event))
        watchdog.enter_phase(1, "data")
        device.stop()
        for number in range(4):
            watchdog.action_queued(f"0F{number}", False)
        for _ in range(4):
            time.sleep(0.4)
            device.stopped_at += 1
    assert not failures


def test_a_checkpoint_that_is_read_part_by_part_is_not_a_hang(tmp_path: Path) -> None:
    """A load takes longer than its limit, with a part of a file now and then."""
    failures = list[Failure]()
    worker = Worker(0, 1, 0, 1, tmp_path, None, [], report_failure=failures.append)
    (tmp_path / "logs").mkdir()
    (tmp_path / "part").write_bytes(b"x")
    data: Any = SimpleNamespace(train=None)
    settings = Launch(timeout=30, step_timeout=1, heartbeat=1)
    with Watchdog(worker, settings) as watchdog:
        folder = Storage(tmp_path, watch_long_steps(watchdog, data))
        watchdog.enter_phase(1, "load", 1)
        with folder.reader("part") as read_into:
            for _ in range(10):
                time.sleep(0.4)
                read_into(0, bytearray(1))
    assert not failures


def alone(config: Config, worker: Worker) -> None:
    def report_failure(failure: Failure) -> None:
        (worker.run_dir / "told").write_text(failure.error)

    settings = Launch(timeout=1, step_timeout=0, heartbeat=10)
    with Watchdog(replace(worker, report_failure=report_failure), settings) as watchdog:
        logs = worker.run_dir / "logs"
        while not logs.is_file():  # a heartbeat makes the folder, and may do so again in between
            with contextlib.suppress(FileNotFoundError):
                logs.rename(worker.run_dir / f"moved at {time.time()}")
            with contextlib.suppress(IsADirectoryError):
                logs.write_text("no folder any more")
        watchdog.enter_phase(0, "build", settings.timeout)
        time.sleep(30)


def test_a_process_alone_ends_even_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="died without a result"):
        run_world(alone, tiny(), tmp_path)
    said = r"no progress for \d+ s in build \(launch.timeout=1\): rank 0 has been in build for \d+ s, at "
    assert re.match(said + r"test_launch_hangs.py:\d+", (tmp_path / "told").read_text())
    assert re.search(said, (tmp_path / "rank0.out").read_text())


def beats(count: int, **changes) -> dict[int, Beat]:
    start = Beat(0, 5, time.time(), "n1", 10, 12, "data", "0B2", 30.0, "frames", "f.py", True)
    return {rank: replace(start, rank=rank, pid=10 + rank, **changes) for rank in range(count)}


def test_of_thousands_of_ranks_a_few_are_named_and_the_rest_counted() -> None:
    before, now = beats(2000), beats(2000, number=6)
    now[77] = replace(now[77], number=5)
    now[1500] = replace(now[1500], waits=False, action="3F1", at="model.py:12 in forward")
    del now[3]
    text, frames = explain(now[9], before, now, 2000, "launch.step_timeout=30")
    assert re.search(r"rank 77 \(n1, pid 87\) has not responded for \d+ s, last in 0B2", text)
    assert "rank 3 has written no heartbeat" in text
    assert "rank 1500 has been in 3F1 (forward of stage 3, microbatch 1) for 30 s" in text
    assert text.endswith("; 1993 more wait") and len(text) < 1200
    assert frames == "rank 77:\nframes"
    text, _ = explain(now[0], beats(2), beats(2, number=6), 2, "launch.step_timeout=30")
    assert "no rank is known to be stuck, all wait for each other; rank 0 waits in 0B2" in text


def test_cuda_events_are_reused() -> None:
    """As many as are in the queue at once are made, however long the run."""
    device = Device()
    queue = DeviceQueue(device.event)
    for step in range(200):
        for number in range(50):
            queue.mark(step, "data", f"0F{number}")
        assert queue.first_unfinished() is None
    assert len(device.events) == 1
    device.stop()
    for number in range(20_000):  # the queue is not read: the oldest tell what hangs
        queue.mark(200, "data", f"0F{number}")
    mark = queue.first_unfinished()
    assert mark is not None and (mark.step, mark.action) == (200, "0F0")
    assert len(device.events) < 10_000


def test_an_action_that_ends_during_the_check_is_not_named() -> None:
    """Its event may stand for a later action by then."""
    device = Device()
    queue = DeviceQueue(device.event)
    device.stop()
    queue.mark(1, "data", "0F0")
    [event] = device.events
    query = event.query

    def training_goes_on_first() -> bool:
        event.query = query
        device.stopped_at += 1
        queue.mark(1, "data", "0F1")
        return query()

    event.query = training_goes_on_first
    mark = queue.first_unfinished()
    assert device.events == [event] and mark is not None and mark.action == "0F1"


def wait_for_a_failed_peer(config: Config, worker: Worker, comes_out: bool) -> bool:
    """Rank 1 fails in its own work; rank 0 waits for it, in a call that is no Python code."""
    if worker.rank == 1:
        until((worker.run_dir / "waits").exists)
        write_failure(worker.run_dir, describe(1, RuntimeError("CUDA out of memory")))
        return False
    worker.stop_request.peer_failed = partial(peer_failed, worker.run_dir, 0)
    watchdogs._LEAVE_TIMEOUT = 1.0
    device, collective = Device(), threading.Lock()
    collective.acquire()
    device.stop()
    queue = DeviceQueue(device.event)
    abort = collective.release if comes_out else lambda: None
    try:
        with Watchdog(worker, replace(HANGS, step_timeout=8), abort) as watchdog:
            watchdog.watch_device(queue)
            watchdog.enter_phase(1, "data")
            watchdog.action_queued("0F0", False)
            (worker.run_dir / "waits").touch()
            collective.acquire()
            (worker.run_dir / "used").touch()  # what it returned
    except PeerFailed as error:
        failure = describe(0, error)
        write_failure(worker.run_dir, failure)
        return failure.transport
    return False


@pytest.mark.parametrize("comes_out", [True, *slow(False)])
def test_a_collective_is_aborted_when_a_peer_has_failed(comes_out: bool, tmp_path: Path) -> None:
    """Where it cannot be let out it ends. A rank that waits on would be named as one that hangs."""
    arguments = wait_for_a_failed_peer, tiny(pp=2), tmp_path, comes_out
    if comes_out:
        assert run_world(*arguments, timeout=30) == [True, False]
    else:
        with pytest.raises(RankError, match="rank 0 died without a result"):
            run_world(*arguments, timeout=30)
    assert "another rank has failed" in (tmp_path / "logs" / "rank0.error.json").read_text()
    assert not (tmp_path / "used").exists()
    failure = root_cause(tmp_path)
    assert failure is not None and "CUDA out of memory" in failure.error


def leave(config: Config, worker: Worker) -> list[tuple[bool, int, bool]]:
    """Whether a rank has left its groups, by how many aborts, and whether it has groups still: of a
    CPU, and as if they were a GPU's."""
    import torch.distributed as dist

    from titanlike.core.distributed.mesh import open_mesh
    from titanlike.core.torch_private import process_groups

    aborts, found = [], []
    abort, real = process_groups.abort_groups, dist.get_backend_config
    process_groups.abort_groups = lambda: aborts.append(abort())
    for backends in ("cpu:gloo", "cpu:gloo,cuda:nccl"):
        dist.get_backend_config = real
        open_mesh(config, replace(worker, store=dist.PrefixStore(backends, worker.store)))
        barrier(worker, backends, 30)  # a peer that still connects would fail by an abort
        dist.get_backend_config = lambda *_, backends=backends: backends
        found.append((torchrun.leave_groups(10), len(aborts), dist.is_initialized()))
    return found


def test_a_failed_rank_aborts_the_groups_of_a_gpu(tmp_path: Path) -> None:
    assert run_world(leave, tiny(dp=2), tmp_path) == [[(True, 0, False), (True, 1, False)]] * 2
