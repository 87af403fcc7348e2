"""Ends a run that hangs, with the position of each rank.

1. The training thread records what it begins: a phase of the job, an action of the schedule.
2. One thread writes that to this rank's heartbeat file, another watches for progress.
3. After nearly `timeout` seconds without any, all threads' stacks go to the rank's log, torch's
   record of collectives to logs/flight_recorder, and the heartbeats of all ranks are read twice, to distinguish ranks that do not respond, are stuck, or
   wait.
4. The failure is written and this process exits; the launcher ends the other ranks.

A phase of a rank may have a longer limit than that of a peer which it waits for: a save, while the
peer has stopped in the step before. So ranks 0 and 1 look at all heartbeats meanwhile, and a peer
that does not respond is judged by the limit of its own phase.

On a GPU "progress" is that of its queue, too, and a rank's position is the first action there that
has not ended (`device_queue`). A rank that stands still because another one has failed is let out of
its collective (`peer_failure`), since there it learns of that by no error.

It exits slightly before the timeout, so that a collective with the same timeout does not fail first
with an error that names no rank. Time in which the whole process was stopped (Ctrl-Z, a suspended
job, gdb) or in pdb does not count. A C call on every rank that never releases the GIL is not
detected.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, TextIO

from titanlike.config.schema import Launch
from titanlike.launch.device_queue import DeviceQueue, Mark
from titanlike.launch.failures import Failure, write_failure
from titanlike.launch.hang_report import AFTER, explain, unresponsive
from titanlike.launch.heartbeat import Beat, Heartbeat, in_debugger, innermost_frames, read_beats
from titanlike.launch.peer_failure import let_out
from titanlike.launch.rank_log import log_path
from titanlike.launch.signals import exit_now
from titanlike.launch.worker import Worker

_WAKE_DELAY = 2.0  # seconds that a thread may wake late; beyond that, the process was stopped
_JOIN_TIMEOUT = 2.0  # seconds for the watching thread to end
_RECORD_TIMEOUT = 5.0  # seconds to write the record of collectives, which take part of:
_REPORT_TIMEOUT = 15.0  # seconds to write and report the failure before the process exits
_PATIENCE = 5.0  # seconds without progress on a device after which peers are looked at,
_PEER_INTERVAL = 2.0  # and then between two looks
# keys of the timeouts of phases, for the error text; others: launch.timeout
_KEYS = {"load": "checkpoint.timeout", "save": "checkpoint.timeout"}


class Watchdog:
    """Within it, watches the progress of the thread that entered it."""

    def __init__(
        self,
        worker: Worker,
        settings: Launch,
        report_failure: Callable[[Failure], None] | None = None,
        queue: DeviceQueue | None = None,
        abort: Callable[[], object] = lambda: None,
    ) -> None:
        """report_failure: in the process that reports the job, called before it exits. queue: of the
        device, where it has one; abort: ends what waits in it for other ranks."""
        self._worker, self._settings, self._report_failure = worker, settings, report_failure
        self._queue, self._abort = queue, abort
        self._unfinished: Mark | None = None  # the first in the queue, when it was last looked at
        self._device_since = -math.inf  # since when it has been that
        limits = [limit for limit in (settings.step_timeout, settings.timeout) if limit > 0]
        self._shortest = min(limits, default=math.inf)
        # the same on all ranks: one without a new beat in `_response_time` does not respond
        self._interval = max(0.05, min(settings.heartbeat, self._shortest / 10))
        self._response_time = 2 * self._interval
        self._poll = min(1.0, self._shortest / 20)
        self._thread_id = 0
        self._ended = threading.Event()
        self._awake_since = -math.inf
        self._peers_looked_at = -math.inf
        self._judges = worker.world_size > 1 and worker.rank < 2  # one, should the other be stopped
        self._looking = threading.Thread()
        self._seen: dict[int, tuple[int, float]] = {}  # number of a peer's beat, and since when
        # of a peer that has not responded for its own limit: its beat, and all of that time
        self._lost: tuple[Beat, dict[int, Beat]] | None = None
        self._host = socket.gethostname()
        self._recording = threading.Thread()
        self._step, self._phase, self._action = 0, "build", ""
        self.enter_phase(0, "build")

    def enter_phase(self, step: int, phase: str, timeout: float | None = None) -> None:
        """This rank begins a phase, in which each action may take `timeout` seconds.

        timeout: None = launch.step_timeout, 0 = unlimited; at least four heartbeats, the time in
        which a rank that does not respond is recognized.
        """
        if self._queue is not None and self._thread_id:
            self._queue.mark(self._step, self._phase, self._action)
        # the clock first: the watching thread must not compare the old time with a shorter limit
        self._since = monotonic()
        self._action = ""
        self._limit = (self._settings.step_timeout if timeout is None else timeout) or math.inf
        key = _KEYS.get(phase, "launch.timeout")
        self._key = "launch.step_timeout" if timeout is None else key
        self._step, self._phase = step, phase

    def start_action(self, action: Any) -> None:
        """This rank begins an action of the schedule; None: all are done.

        Takes 0.1 us: the action is formatted only where it is shown.
        """
        self._action = action
        self._since = monotonic()

    def action_queued(self, action: Any, received: bool) -> None:
        """An action of the schedule is in the device's queue; received: what it waits for is."""
        if self._queue is not None:
            self._queue.mark(self._step, self._phase, action, received)

    def __enter__(self) -> Watchdog:
        self._thread_id = threading.get_ident()
        worker = self._worker
        self._heartbeat = Heartbeat(worker.run_dir, worker.rank, self._interval, self._observe)
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._watcher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._heartbeat.end(kind.__name__ if kind else "done")
        self._watcher.join(_JOIN_TIMEOUT)

    def _last_progress(self) -> float:
        return max(self._since, self._awake_since, self._device_since)

    def _observe(self) -> Beat:
        """What this rank is doing now."""
        since, step, phase, action = self._since, self._step, self._phase, self._action
        if (mark := self._unfinished) is not None:
            since, step, phase, action = self._device_since, mark.step, mark.phase, mark.action
        age = monotonic() - self._last_progress()
        frames, at, waits = "", "", False
        if age > min(self._limit, self._shortest) / 2:
            frames, at, waits = innermost_frames(self._thread_id)
            waits = waits if mark is None else mark.received
        now = time.time()
        return Beat(
            rank=self._worker.rank,
            number=0,
            time=now,
            host=self._host,
            pid=os.getpid(),
            step=step,
            doing=phase,
            action=AFTER if action is None else str(action),
            since=now - (monotonic() - since),
            seconds=age,
            frames=frames,
            at=at,
            waits=waits,
            on_device=mark is not None,
            limit=0.0 if math.isinf(self._limit) else self._limit,
            limit_key=self._key,
        )

    def _watch(self) -> None:
        if self._queue is not None:
            self._queue.enter_thread()
        while self._sleep(self._poll):
            if self._queue is not None and self._look_at_device(self._queue):
                return
            limit = max(self._limit, 2 * self._response_time)
            early = self._response_time + min(1.0, limit / 20)
            since = self._last_progress()
            if monotonic() - since > limit - early:
                self._suspect(since)
            elif not self._judges or limit <= self._shortest:
                self._seen, self._lost = {}, None
            elif not self._looking.is_alive():
                if self._lost is not None:
                    beat, before = self._lost
                    self._give_up(before, f"{beat.limit_key}={beat.limit:g}")
                # in a thread, as below
                self._looking = threading.Thread(target=self._look_at_peers, daemon=True)
                self._looking.start()

    def _look_at_device(self, queue: DeviceQueue) -> bool:
        """How far the device is; True once the training thread was let out, as a peer has failed."""
        before, mark = self._unfinished, queue.first_unfinished()
        if (mark and mark.number) != (before and before.number):
            self._device_since = monotonic()
        self._unfinished = mark
        now = monotonic()
        if now - self._last_progress() < min(_PATIENCE, self._shortest / 4):
            return False
        if now - self._peers_looked_at < min(_PEER_INTERVAL, self._shortest / 4):
            return False
        self._peers_looked_at = now
        if not self._worker.stop_request.has_peer_failed():
            return False
        let_out(self._thread_id, self._abort, self._ended, self._worker)
        return True

    def _look_at_peers(self) -> None:
        """Find one that has written no beat for as long as its phase may last."""
        seen, start = self._seen, monotonic()
        if self._ended.wait(self._response_time):  # in which each that responds writes a new one
            return
        if monotonic() - start > self._response_time + _WAKE_DELAY:
            seen.clear()  # all were stopped
            return
        beats = self._beats()
        for rank, beat in beats.items():
            number, since = seen.get(rank, (-1, 0.0))
            if number != beat.number or beat.ended or rank == self._worker.rank:
                seen[rank] = beat.number, monotonic()
                continue
            silent = monotonic() - max(since, self._awake_since)
            if beat.limit and silent > max(beat.limit, self._response_time):
                if not self._ended.wait(self._response_time):
                    self._lost = beat, beats
                return

    def _sleep(self, seconds: float) -> bool:
        """False once the run is over. Records if the whole process was stopped meanwhile."""
        start = monotonic()
        over = self._ended.wait(seconds)
        if monotonic() - start > seconds + _WAKE_DELAY:
            self._awake_since = monotonic()
        return not over

    def _suspect(self, since: float) -> None:
        """Nearly timed out: read all beats twice; exit if this rank makes no progress meanwhile."""
        before: dict[int, Beat] = {}
        # in a thread: an unavailable file server must not block the watchdog, too
        self._recording = threading.Thread(target=self._record, args=(since, before), daemon=True)
        self._recording.start()
        if not self._sleep(self._response_time):
            return
        if in_debugger(self._thread_id):
            self._awake_since = monotonic()
        if self._last_progress() == since:
            self._give_up(dict(before))

    def _record(self, since: float, before: dict[int, Beat]) -> None:
        """Write all threads' stacks to the log, all ranks' beats to `before`, and what collectives
        torch has recorded to a file."""
        with contextlib.suppress(OSError), self._open_log() as log:
            seconds = monotonic() - since
            print(f"no progress for {seconds:.0f} s; all threads:", file=log, flush=True)
            faulthandler.dump_traceback(log)
        before.update(self._beats())
        if (
            "torch.distributed" in sys.modules
        ):  # else there are none, and it takes seconds to import
            from titanlike.torch_private.process_groups import write_records

            with contextlib.suppress(OSError, RuntimeError):
                write_records(record_folder(self._worker.run_dir), self._worker.rank)

    def _give_up(self, before: dict[int, Beat], limit: str = "") -> None:
        """Report the hang and exit; at the latest after `_REPORT_TIMEOUT`.

        limit: the key=seconds that was exceeded, "" = this rank's own.
        """
        deadline = threading.Timer(_REPORT_TIMEOUT, os._exit, [1])
        deadline.daemon = True
        deadline.start()
        try:
            own, now = self._observe(), self._beats()
            size = self._worker.world_size
            limit = limit or f"{self._key}={self._limit:g}"
            text, frames = explain(own, before, now, size, limit)
            failure = Failure(self._worker.rank, text, frames, False, time.time())
            try:
                write_failure(self._worker.run_dir, failure)
            except OSError as problem:  # full disk: the text is only printed
                text = f"{text}\n{problem}"
            with contextlib.suppress(OSError), self._open_log() as log:
                print(text, file=log, flush=True)
            self._heartbeat.end("no progress")
            self._recording.join(_RECORD_TIMEOUT)
            self._resume_stopped(unresponsive(before, now, own.rank))
            if self._report_failure is not None:
                self._report_failure(failure)
            elif size == 1:
                print(f"\n{text}\n{frames}", file=sys.__stderr__, flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            exit_now(1)

    def _resume_stopped(self, others: list[Beat]) -> None:
        """Send SIGCONT to unresponsive ranks of this launcher.

        A stopped process does not handle SIGTERM: the launcher would wait half a minute for it.
        """
        for beat in others:
            if beat.host == self._host and _parent(beat.pid) == os.getppid():
                with contextlib.suppress(OSError):
                    os.kill(beat.pid, signal.SIGCONT)

    def _beats(self) -> dict[int, Beat]:
        return read_beats(self._worker.run_dir, self._worker.world_size)

    def _open_log(self) -> contextlib.AbstractContextManager[TextIO]:
        """The rank's log, or if it cannot be opened, the original stderr."""
        try:
            return open(log_path(self._worker.run_dir, self._worker.rank), "a", encoding="utf-8")
        except OSError:
            return contextlib.nullcontext(sys.__stderr__ or sys.stderr)


def record_folder(run_dir: Path) -> Path:
    """Where the ranks write what collectives torch has recorded, as its analyzer reads them."""
    return run_dir / "logs" / "flight_recorder"


def _parent(pid: int) -> int | None:
    """The parent of a process; None if there is no such process on this machine."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return None
