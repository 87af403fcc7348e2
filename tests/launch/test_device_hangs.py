"""Where a device works behind Python's back, what hangs there is named, and nobody waits for it long.

No GPU is needed: `Device` stands in for the events in its queue. Processes, hangs and reports are
real.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from support.cells import slow
from support.models import tiny
from support.waiting import until
from support.world import RankError, run_world
from titanlike.config.schema import Config, Launch
from titanlike.launch import external, peer_failure
from titanlike.launch.device_queue import DeviceQueue
from titanlike.launch.failures import (
    Failure,
    PeerFailed,
    describe,
    peer_failed,
    root_cause,
    write_failure,
)
from titanlike.launch.watchdog import Watchdog
from titanlike.launch.worker import Worker

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


def train_on(config: Config, worker: Worker, stops: list[tuple[str, bool]]) -> None:
    """Training in which the ranks' devices stop in step 3, each in front of an action's mark, while
    Python goes on, until it waits for the device at the end of the schedule."""
    from titanlike.training import session
    from titanlike.training.train import train

    device = Device()
    session.device_queue = lambda _: DeviceQueue(device.event)
    queued, start = Watchdog.action_queued, Watchdog.start_action

    def action_queued(self, action, received):
        if self._step == 3 and (str(action), received) == stops[worker.rank]:
            device.stop()
            (worker.run_dir / f"stopped{worker.rank}").touch()
        queued(self, action, received)

    def wait_for_device(self, action):
        start(self, action)
        if self._step == 3 and action is None:
            time.sleep(60)

    Watchdog.action_queued, Watchdog.start_action = action_queued, wait_for_device
    train(config, worker)


def test_the_action_that_hangs_on_a_device_is_named_though_python_is_far_ahead(
    tmp_path: Path,
) -> None:
    """Rank 1's device hangs in 1F2; rank 0's waits for the gradient that comes of it."""
    stops = [("0B2", True), ("1F2", False)]
    config = replace(tiny(2, layers=2), launch=HANGS)
    with pytest.raises(RankError, match="died without a result"):
        run_world(train_on, config, tmp_path, stops, timeout=60)
    assert (tmp_path / "stopped0").exists() and (tmp_path / "stopped1").exists()
    failure = root_cause(tmp_path)
    assert failure is not None
    assert re.fullmatch(
        r"no progress for \d s in step 3 \(launch.step_timeout=2\): rank 1 has been in 1F2 \(forward "
        r"of stage 1, microbatch 2\) on its device for \d s, Python at test_device_hangs.py:\d+ in "
        r"wait_for_device; rank 0 waits in 0B2 \(backward of stage 0, microbatch 2\)",
        failure.error,
    ), failure.error


def test_a_device_that_works_through_its_queue_is_no_hang(tmp_path: Path) -> None:
    """Python waits longer than the timeout, for a device that does an action now and then."""
    worker = Worker(0, 1, 0, 1, tmp_path, None, [])
    device = Device()
    (tmp_path / "logs").mkdir()
    failures: list[Failure] = []
    settings = Launch(timeout=30, step_timeout=1, heartbeat=1)
    with Watchdog(worker, settings, failures.append, DeviceQueue(device.event)) as watchdog:
        watchdog.enter_phase(1, "data")
        device.stop()
        for number in range(4):
            watchdog.action_queued(f"0F{number}", False)
        for _ in range(4):
            time.sleep(0.4)
            device.stopped_at += 1
    assert not failures


def test_events_are_used_again() -> None:
    """As many as are in the queue at once are made, however long the run."""
    device = Device()
    queue = DeviceQueue(device.event)
    for step in range(200):
        for number in range(50):
            queue.mark(step, "data", f"0F{number}")
        assert queue.first_unfinished() is None
    assert len(device.events) == 1
    device.stop()
    for number in range(50):
        queue.mark(200, "data", f"0F{number}")
    mark = queue.first_unfinished()
    assert mark is not None and (mark.step, mark.action) == (200, "0F0")
    for number in range(20_000):  # the queue is not read: the oldest tell what hangs
        queue.mark(201, "data", f"0F{number}")
    assert len(device.events) < 10_000 and queue.first_unfinished() == mark


def test_an_action_that_ends_while_it_is_looked_at_is_not_taken_for_the_one_that_hangs() -> None:
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
    worker.stop_request.watch_peers(partial(peer_failed, worker.run_dir, 0))
    peer_failure._LEAVE_TIMEOUT = 1.0
    device, collective = Device(), threading.Lock()
    collective.acquire()
    device.stop()
    queue = DeviceQueue(device.event)
    abort = collective.release if comes_out else lambda: None
    try:
        with Watchdog(worker, replace(HANGS, step_timeout=8), None, queue, abort) as watchdog:
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
def test_a_rank_is_let_out_of_a_collective_whose_peer_has_failed(
    comes_out: bool, tmp_path: Path
) -> None:
    """Where it cannot be let out it ends. A rank that waits on would be named as one that hangs."""
    arguments = wait_for_a_failed_peer, tiny(2), tmp_path, comes_out
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

    from titanlike.parallel.mesh import open_mesh
    from titanlike.torch_private import process_groups

    aborts, found = [], []
    abort, real = process_groups.abort_groups, dist.get_backend_config
    process_groups.abort_groups = lambda: aborts.append(abort())
    for backends in ("cpu:gloo", "cpu:gloo,cuda:nccl"):
        dist.get_backend_config = real
        open_mesh(config, replace(worker, store=dist.PrefixStore(backends, worker.store)))
        dist.get_backend_config = lambda *_, backends=backends: backends
        found.append((external.leave_groups(10), len(aborts), dist.is_initialized()))
    return found


def test_a_failed_rank_aborts_the_groups_of_a_gpu(tmp_path: Path) -> None:
    assert run_world(leave, tiny(1, 2), tmp_path) == [[(True, 0, False), (True, 1, False)]] * 2
