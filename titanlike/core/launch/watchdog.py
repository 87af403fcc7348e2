"""End a run that hangs, and report the position of each rank.

1. The training thread records what it begins: a phase of the job, an action of the schedule.
2. One thread writes that to this rank's heartbeat file, a second one watches for progress.
3. After nearly `timeout` seconds without progress, all threads' stacks go to the rank's log and
   torch's record of collectives to logs/flight_recorder. Ranks 0 and 1 read the heartbeats of all
   ranks twice, to distinguish ranks that do not respond, are stuck, or wait; a thousand ranks doing
   so would overload a file server. The other ranks do it only if neither of the two responds.
4. The failure is written and this process exits; the launcher ends the other ranks.

A rank's phase may have a longer limit than that of the peer it waits for: e.g. a save, while the
peer has stopped in the step before. So ranks 0 and 1 check all heartbeats meanwhile, and the first
two ranks of a machine check those of its ranks. A peer that does not respond is judged by the limit
of its own phase; on the same machine by that of a step if it also does no I/O, since even a long
phase keeps its threads running.

On a GPU the queue's progress counts as well, and a rank's position is the first action that has not
completed there (`DeviceQueue`). A rank that hangs because a peer has failed is released from its
collective, since NCCL does not raise an error.

It exits slightly before the timeout, so that a collective with the same timeout does not fail first
with an error that names no rank. Time in which the whole process was stopped (Ctrl-Z, a suspended
job, gdb) or in pdb does not count. A C call on every rank that never releases the GIL is not
detected.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from titanlike.core.config.groups.jobs import Launch
from titanlike.core.launch import failures
from titanlike.core.launch.heartbeat import AFTER, Beat, Heartbeat, innermost_frames, read_beats
from titanlike.core.launch.signals import exit_now
from titanlike.core.launch.worker import Worker

if TYPE_CHECKING:
    from titanlike.core.launch.device_queue import DeviceQueue, Mark

_WAKE_DELAY = 2.0  # seconds a thread may wake late; beyond that the process was stopped
_JOIN_TIMEOUT = 2.0  # seconds for the watching thread to end
_RECORD_TIMEOUT = 5.0  # seconds to write the record of collectives, included in:
_REPORT_TIMEOUT = 60.0  # seconds to write and report the failure before the process exits,
_REPORT_OF_RANK = 0.02  # plus seconds per rank to read heartbeats
_LEAVE_TIMEOUT = 15.0  # seconds for the training thread to leave the job once a peer has failed
_PATIENCE = 5.0  # seconds without progress on a device until peers' errors are checked,
_PEER_INTERVAL = 2.0  # and between two checks
_REPORTERS = 2  # ranks that report a hang: one of them may hang itself
_MOST_BEATS = 200.0  # limit of heartbeats per second, of all ranks, on a file server
# what a rank does step by step on purpose -> phases in which it may do that for long
READING = ("data", "load", "evaluation")  # reads a stream's samples forward
MOVING = ("load", "save", "export")  # reads, hashes, writes a checkpoint
# keys of the timeouts of phases, for the error text; others: launch.timeout
_KEYS = dict.fromkeys(("load", "save", "export"), "checkpoint.timeout")


class Watchdog:
    """A context that watches the progress of the thread that entered it."""

    def __init__(
        self,
        worker: Worker,
        settings: Launch,
        abort: Callable[[], object] = lambda: None,
    ) -> None:
        """abort: aborts collectives on the device."""
        self._worker, self._settings = worker, settings
        self._queue: DeviceQueue | None = None
        self._abort = abort
        self._unfinished: Mark | None = None  # the first unfinished in the queue, when last read
        self._device_since = -math.inf  # since when it is the first
        limits = [limit for limit in (settings.step_timeout, settings.timeout) if limit > 0]
        self._shortest = min(limits, default=math.inf)
        # equal on all ranks: a rank without a new beat in `_response_time` does not respond
        rank, size, here = worker.rank, worker.world_size, worker.local_world_size
        interval = max(settings.heartbeat, size / _MOST_BEATS)
        self._interval = max(0.05, min(interval, self._shortest / 10))
        self._response_time = 2 * self._interval
        self._reports = rank < _REPORTERS
        first_here = rank - worker.local_rank
        self._looked_at = range(size) if self._reports else range(first_here, first_here + here)
        self._report_timeout = _REPORT_TIMEOUT + _REPORT_OF_RANK * size
        self._thread_id = 0
        self._ended = threading.Event()
        self._awake_since = -math.inf
        self._next_look = -math.inf  # time of the next check whether a peer has failed
        self._looking = threading.Thread()
        # peer -> ((number of its beat, bytes read and written), since when they are unchanged)
        self._seen: dict[int, tuple[tuple[int, str], float]] = {}
        # a peer did not respond for too long: (the limit, all beats at that time)
        self._lost: tuple[str, dict[int, Beat]] | None = None
        self._host = socket.gethostname()
        self._steps: list[tuple[Callable[[], int], Collection[str]]] = []
        self._recording = threading.Thread()
        self._step, self._phase, self._action = 0, "start", ""
        self.enter_phase(0, "start")

    def watch_device(self, queue: DeviceQueue | None) -> None:
        """From now on the progress of a device's queue counts as well; None = it has none."""
        self._queue = queue

    def watch_steps(self, count: Callable[[], int], phases: Collection[str]) -> None:
        """From now on, in these phases, what `count` counts is progress. It is called in a
        different thread."""
        self._steps.append((count, phases))

    def enter_phase(self, step: int, phase: str, timeout: float | None = None) -> None:
        """Record that this rank begins a phase, in which each action may take `timeout` seconds.

        timeout: None = launch.step_timeout, 0 = unlimited; at least four heartbeats, the time to
        recognize a rank that does not respond.
        """
        if self._queue is not None and self._thread_id:
            self._queue.mark(self._step, self._phase, self._action)
        # set the time first: the watching thread must not compare the old one with a shorter limit
        self._since = monotonic()
        self._action = ""
        self._limit = (self._settings.step_timeout if timeout is None else timeout) or math.inf
        key = _KEYS.get(phase, "launch.timeout")
        self._key = "launch.step_timeout" if timeout is None else key
        self._step, self._phase = step, phase

    def begin(self, phase: str) -> None:
        """Called when a part of a step begins: the limit is for the whole step."""

    def start_action(self, action: Any) -> None:
        """Record that this rank begins an action of the schedule; None: all are done.

        Takes 0.1 us: the action is only formatted when shown.
        """
        self._action = action
        self._since = monotonic()

    def action_queued(self, action: Any, received: bool) -> None:
        """Record that an action is queued on the device; received: only the receive of its input."""
        if self._queue is not None:
            self._queue.mark(self._step, self._phase, action, received)

    def __enter__(self) -> Watchdog:
        self._thread_id = threading.get_ident()
        worker = self._worker
        self._heartbeat = Heartbeat(worker.run_dir, worker.rank, self._interval, self._observe)
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self._heartbeat.end(kind.__name__ if kind else "done")
        self._watcher.join(_JOIN_TIMEOUT)

    def _last_progress(self) -> float:
        return max(self._since, self._awake_since, self._device_since)

    def _observe(self) -> Beat:
        """Return what this rank is doing now; `Heartbeat` sets the beat's number."""
        step, phase, action = self._step, self._phase, self._action
        if (mark := self._unfinished) is not None:
            step, phase, action = mark.step, mark.phase, mark.action
        age = monotonic() - self._last_progress()
        frames, position, waits = "", "", False
        if age > min(self._limit, self._shortest) / 2:
            frames, position, waits = innermost_frames(self._thread_id)
            waits = waits if mark is None else mark.received
        return Beat(
            rank=self._worker.rank,
            number=0,
            time=time.time(),
            host=self._host,
            pid=os.getpid(),
            step=step,
            doing=phase,
            action=AFTER if action is None else str(action),
            seconds=age,
            frames=frames,
            at=position,
            waits=waits,
            on_device=mark is not None,
            limit=0.0 if math.isinf(self._limit) else self._limit,
            limit_key=self._key,
        )

    def _watch(self) -> None:
        # two ranks check their peers, as one may be stopped itself
        looks = self._worker.world_size > 1 and self._worker.local_rank < _REPORTERS
        looks, entered = looks or self._reports, None
        reading = self._worker.world_size / 1000  # seconds for all heartbeats, before a collective
        counted: list[int] = []
        while self._sleep(min(1.0, self._shortest / 20)):
            before, counted = counted, [count() for count, _ in self._steps]
            for last, now, (_, phases) in zip(before, counted, self._steps, strict=False):
                if last != now and self._phase in phases:
                    self._since = monotonic()
            if self._queue is not entered and self._queue is not None:
                self._queue.enter_thread()
                entered = self._queue
            if self._queue is not None and self._waits_for_failed_peer(self._queue):
                self._let_out()
                return
            limit = max(self._limit, 2 * self._response_time + reading)
            early = self._response_time + min(1.0, limit / 20) + reading
            since = self._last_progress()
            if monotonic() - since > limit - early:
                self._suspect(since)
            elif not looks or limit <= self._shortest:
                self._seen, self._lost = {}, None
            elif not self._looking.is_alive():
                if self._lost is not None:
                    limit_text, before = self._lost
                    self._give_up(before, limit_text)
                # in a thread, as in `_suspect`
                self._looking = threading.Thread(target=self._look_at_peers, daemon=True)
                self._looking.start()

    def _sleep(self, seconds: float) -> bool:
        """Sleep; False once the run is over. Notices if the whole process was stopped meanwhile."""
        start = monotonic()
        over = self._ended.wait(seconds)
        if monotonic() - start > seconds + _WAKE_DELAY:
            self._awake_since = monotonic()
        return not over

    def _waits_for_failed_peer(self, queue: DeviceQueue) -> bool:
        """Update the device's progress; return whether it makes none and a peer has failed."""
        before, mark = self._unfinished, queue.first_unfinished()
        if (mark and mark.number) != (before and before.number):
            self._device_since = monotonic()
        self._unfinished = mark
        now, shortest = monotonic(), self._shortest / 4
        if now < self._last_progress() + min(_PATIENCE, shortest) or now < self._next_look:
            return False
        self._next_look = now + min(_PEER_INTERVAL, shortest)
        return self._worker.stop_request.peer_failed()

    def _let_out(self) -> None:
        """Release the training thread from a GPU's collective after a peer has failed.

        A rank that fails under gloo closes its connections, and its peers' collectives raise. Under
        NCCL the thread blocks in a call that waits for the GPU, and the GPU waits for the peer. So
        1. PeerFailed is raised asynchronously in the training thread, which takes effect when that
           call returns, before its result, which may be garbage, is used;
        2. the collectives are aborted, and the call returns;
        3. the thread leaves the job as after any error. If it does not, the process ends.
        """

        def give_up() -> None:
            if not self._ended.is_set():
                run_dir, rank = self._worker.run_dir, self._worker.rank
                text = f"{failures.PeerFailed()}, and this one waited on for {_LEAVE_TIMEOUT:.0f} s"
                failure = failures.Failure(rank, text, "", True, time.time())
                with contextlib.suppress(OSError):
                    failures.write_failure(run_dir, failure)
                exit_now(1)

        _call_later(_LEAVE_TIMEOUT, give_up)
        thread, error = ctypes.c_ulong(self._thread_id), ctypes.py_object(failures.PeerFailed)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
        try:
            self._abort()
        except Exception:  # e.g. the thread is closing the group itself
            traceback.print_exc()
        self._ended.wait(_LEAVE_TIMEOUT)

    def _look_at_peers(self) -> None:
        """Find a peer that has written no heartbeat for too long."""
        seen, start = self._seen, monotonic()
        if self._ended.wait(self._response_time):  # each live rank writes a new beat meanwhile
            return
        if monotonic() - start > self._response_time + _WAKE_DELAY:
            seen.clear()  # this machine's processes were stopped
            return
        beats = read_beats(self._worker.run_dir, self._looked_at)
        key = "timeout" if self._shortest == self._settings.timeout else "step_timeout"
        for rank, beat in beats.items():
            here = _transferred(beat.pid) if beat.host == self._host else ""
            before, since = seen.get(rank, (None, 0.0))
            if (beat.number, here) != before or beat.ended or rank == self._worker.rank:
                seen[rank] = (beat.number, here), monotonic()
                continue
            silent = monotonic() - max(since, self._awake_since)
            limit, text = beat.limit or math.inf, beat.limit_key
            if here and self._shortest < limit:
                limit, text = self._shortest, f"launch.{key}"
            if silent > max(limit, self._response_time):
                if not self._ended.wait(self._response_time):
                    self._lost = f"{text}={limit:g}", beats
                return

    def _suspect(self, since: float) -> None:
        """Handle a timeout that is near: read all beats twice; exit if this rank makes no progress
        meanwhile and no other rank reports the hang."""
        before: dict[int, Beat] = {}

        def record() -> None:
            with contextlib.suppress(OSError), self._open_log() as log:
                seconds = monotonic() - since
                print(f"no progress for {seconds:.0f} s; all threads:", file=log, flush=True)
                faulthandler.dump_traceback(log)
            before.update(self._beats(all_ranks=self._reports))
            if "torch.distributed" in sys.modules:  # else there is no record, and importing is slow
                from titanlike.core.torch_private.flight_recorder import write_records

                folder = self._worker.run_dir / "logs" / "flight_recorder"
                with contextlib.suppress(OSError, RuntimeError):
                    write_records(folder, self._worker.rank)

        # in a thread: an unavailable file server must not block the watchdog, too
        self._recording = threading.Thread(target=record, daemon=True)
        self._recording.start()
        if not self._sleep(self._response_time):
            return
        frame = sys._current_frames().get(self._thread_id)
        for inner, _ in traceback.walk_stack(frame) if frame else ():
            name = Path(inner.f_code.co_filename).name
            if name == "bdb.py" or name.startswith("pydevd"):  # in pdb or an editor's debugger
                self._awake_since = monotonic()
        if self._last_progress() == since and not self._is_reported(since, dict(before)):
            self._give_up(dict(before))

    def _is_reported(self, since: float, before: dict[int, Beat]) -> bool:
        """Whether rank 0 or 1 responds and reports the hang, or it is over. before: their beats."""
        from titanlike.core.launch.hang import unresponsive

        deadline, now = monotonic() + self._report_timeout, self._beats(all_ranks=False)
        silent = {beat.rank for beat in unresponsive(before, now, self._worker.rank)}
        if self._reports or before.keys() <= silent:
            return False
        while self._last_progress() == since and monotonic() < deadline:
            if not self._sleep(1.0):
                return True
        return self._last_progress() != since

    def _give_up(self, before: dict[int, Beat], limit: str = "") -> None:
        """Report the hang and exit, at the latest after `_report_timeout`.

        before: beats of an earlier read; limit: the exceeded key=seconds, "" = this rank's own.
        """
        _call_later(self._report_timeout, lambda: os._exit(1))
        try:
            self._worker.stop_request.peer_failed()  # records ranks that ended instead of hanging
            from titanlike.core.launch.hang import explain, unresponsive

            own, now = self._observe(), self._beats()
            size = self._worker.world_size
            limit = limit or f"{self._key}={self._limit:g}"
            text, frames = explain(own, before, now, size, limit)
            rank = self._worker.rank
            failure = failures.Failure(rank, text, frames, False, time.time(), names_rank=True)
            try:
                failures.write_failure(self._worker.run_dir, failure)
            except OSError as problem:  # full disk: the text is only printed
                text = f"{text}\n{problem}"
            with contextlib.suppress(OSError), self._open_log() as log:
                print(text, file=log, flush=True)
            failures.record_for_torchrun(text)
            self._heartbeat.end("no progress")
            if self._recording.is_alive():
                self._recording.join(_RECORD_TIMEOUT)
            for beat in unresponsive(before, now, own.rank):
                # a stopped process handles no SIGTERM, and torchrun would wait half a minute for it
                if beat.host == self._host:
                    with contextlib.suppress(OSError):
                        os.kill(beat.pid, signal.SIGCONT)
            if self._worker.report_failure is not None:
                self._worker.report_failure(failure)
            elif size == 1:
                print(f"\n{text}\n{frames}", file=sys.__stderr__, flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            exit_now(1)

    def _beats(self, all_ranks: bool = True) -> dict[int, Beat]:
        """Read the beats of all ranks, or only of those that report."""
        size = self._worker.world_size
        return read_beats(self._worker.run_dir, range(size if all_ranks else min(_REPORTERS, size)))

    def _open_log(self) -> contextlib.AbstractContextManager[TextIO]:
        """Open the rank's log; if that fails, return the original stderr."""
        path = failures.log_path(self._worker.run_dir, self._worker.rank)
        try:
            return open(path, "a", encoding="utf-8")
        except OSError:
            return contextlib.nullcontext(sys.__stderr__ or sys.stderr)


def _call_later(seconds: float, function: Callable[[], object]) -> None:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()


def _transferred(pid: int) -> str:
    """I/O counters of a process on this machine, as text to compare; "" = unknown."""
    try:
        with open(f"/proc/{pid}/io", encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
