"""Ends a run that hangs, and says where each rank was.

1. The training thread notes what it begins: a phase of the job, an action of the schedule.
2. One thread writes that to this rank's heartbeat file, another looks whether it changes.
3. Where it has not for nearly `patience` seconds, all threads' stacks go to the rank's log, and for
   a moment all heartbeats are watched, so that a rank that does not answer is told from one that is
   stuck and from those that wait.
4. The failure is written and this process ends; whoever started the ranks ends the others.

It ends a little before `patience`, so that a collective whose own timeout is the same does not
come first with an error that names nobody. Time in which this process was stopped as a whole
(Ctrl-Z, a suspended job, gdb) does not count, nor does a prompt of pdb. What it cannot see is a
call in C that keeps the interpreter's lock for good, on every rank at once: then no thread runs.
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
from time import monotonic
from types import TracebackType
from typing import Any, TextIO

from titanlike.config.schema import Launch
from titanlike.launch.failures import Failure, write_failure
from titanlike.launch.hang_report import AFTER, explain, silent
from titanlike.launch.heartbeat import Beat, Heartbeat, in_debugger, innermost, read_beats
from titanlike.launch.rank_log import log_path
from titanlike.launch.signals import exit_now
from titanlike.launch.worker import Worker

_OVERSLEPT = 2.0  # seconds that a thread may wake late; later, the process had been stopped
_LEAVE = 2.0  # seconds that a thread gets to end
_LAST_WORDS = 15.0  # seconds to write down the failure; then the process ends as it is
# which key sets the patience of a phase that has its own
_KEYS = {"load": "checkpoint.timeout", "save": "checkpoint.timeout"}


class Watchdog:
    """Watches this rank's progress while it is entered, by the thread that enters it."""

    def __init__(
        self,
        worker: Worker,
        settings: Launch,
        report_failure: Callable[[Failure], None] | None = None,
    ) -> None:
        """report_failure: in the process that reports the job, called before it ends itself."""
        self._worker, self._settings, self._report_failure = worker, settings, report_failure
        limits = [limit for limit in (settings.step_timeout, settings.timeout) if limit > 0]
        self._shortest = min(limits, default=math.inf)
        # the same on all ranks: who has not beaten in twice the interval does not answer
        self._interval = max(0.05, min(settings.heartbeat, self._shortest / 10))
        self._moment = 2 * self._interval
        self._tick = min(1.0, self._shortest / 20)
        self._thread_id = 0
        self._ended = threading.Event()
        self._awake_since = -math.inf
        self._host = socket.gethostname()
        self._set(0, "build", None)

    def enter_phase(self, step: int, doing: str, patience: float | None = None) -> None:
        """This rank begins something else; it may take `patience` seconds (step_timeout).

        A patience of 0 has no end. It holds until the next call; each action starts it anew. It is
        at least four heartbeats: in less, a rank that does not answer cannot be told.
        """
        self._set(step, doing, patience)

    def start_action(self, action: Any) -> None:
        """This rank begins an action of the schedule; None: all are done.

        Takes a tenth of a microsecond: the action's text is made only where it is shown.
        """
        self._action = action
        self._since = monotonic()

    def _set(self, step: int, doing: str, patience: float | None) -> None:
        # the clock first: `_age` must never hold an old clock against a new, shorter patience
        self._since = monotonic()
        self._action: Any = ""
        self._limit = (self._settings.step_timeout if patience is None else patience) or math.inf
        own = _KEYS.get(doing, "launch.timeout")
        self._key = "launch.step_timeout" if patience is None else own
        self._step, self._doing = step, doing

    def __enter__(self) -> Watchdog:
        self._thread_id = threading.get_ident()
        worker = self._worker
        self._heartbeat = Heartbeat(worker.run_dir, worker.rank, self._interval, self._look)
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
        self._watcher.join(_LEAVE)

    def _last_progress(self) -> float:
        return max(self._since, self._awake_since)

    def _look(self) -> Beat:
        """What this rank does now."""
        since, action = self._since, self._action
        age = monotonic() - self._last_progress()
        frames, at, waits = "", "", False
        if age > min(self._limit, self._shortest) / 2:
            frames, at, waits = innermost(self._thread_id)
        now = time.time()
        return Beat(
            rank=self._worker.rank,
            number=0,
            time=now,
            host=self._host,
            pid=os.getpid(),
            step=self._step,
            doing=self._doing,
            action=AFTER if action is None else str(action),
            since=now - (monotonic() - since),
            seconds=age,
            frames=frames,
            at=at,
            waits=waits,
        )

    def _watch(self) -> None:
        while self._sleep(self._tick):
            limit = max(self._limit, 2 * self._moment)
            early = self._moment + min(1.0, limit / 20)
            since = self._last_progress()
            if monotonic() - since > limit - early:
                self._suspect(since)

    def _sleep(self, seconds: float) -> bool:
        """False once the run is over. Notes where the whole process was stopped meanwhile."""
        start = monotonic()
        over = self._ended.wait(seconds)
        if monotonic() - start > seconds + _OVERSLEPT:
            self._awake_since = monotonic()
        return not over

    def _suspect(self, since: float) -> None:
        """Nearly out of patience: look at all for a moment; if nothing moves here, end."""
        before: dict[int, Beat] = {}
        # in a thread: a file server that is gone must not hold the watchdog, too
        threading.Thread(target=self._first_look, args=(since, before), daemon=True).start()
        if not self._sleep(self._moment):
            return
        if in_debugger(self._thread_id):
            self._awake_since = monotonic()
        if self._last_progress() == since:
            self._give_up(dict(before))

    def _first_look(self, since: float, before: dict[int, Beat]) -> None:
        """All threads' stacks into the log, all ranks' beats into `before`."""
        with contextlib.suppress(OSError), self._open_log() as log:
            seconds = monotonic() - since
            print(f"no progress for {seconds:.0f} s; all threads:", file=log, flush=True)
            faulthandler.dump_traceback(log)
        before.update(self._beats())

    def _give_up(self, before: dict[int, Beat]) -> None:
        """Say why, and end this process; in any case, whatever else is stuck, too."""
        last = threading.Timer(_LAST_WORDS, os._exit, [1])
        last.daemon = True
        last.start()
        try:
            own, now = self._look(), self._beats()
            size = self._worker.world_size
            text, frames = explain(own, before, now, size, f"{self._key}={self._limit:g}")
            failure = Failure(self._worker.rank, text, frames, False, time.time())
            try:
                write_failure(self._worker.run_dir, failure)
            except OSError as problem:  # a full disk: what is printed is all that is left
                text = f"{text}\n{problem}"
            with contextlib.suppress(OSError), self._open_log() as log:
                print(text, file=log, flush=True)
            self._heartbeat.end("no progress")
            self._wake(silent(before, now, own.rank))
            if self._report_failure is not None:
                self._report_failure(failure)
            elif size == 1:
                print(f"\n{text}\n{frames}", file=sys.__stderr__, flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            exit_now(1)

    def _wake(self, others: list[Beat]) -> None:
        """Let processes of this machine that were stopped go on: the launcher is to end them.

        A stopped one takes no SIGTERM, and the launcher would wait for it for half a minute.
        """
        for beat in others:
            if beat.host == self._host and parent(beat.pid) == os.getppid():
                with contextlib.suppress(OSError):
                    os.kill(beat.pid, signal.SIGCONT)

    def _beats(self) -> dict[int, Beat]:
        return read_beats(self._worker.run_dir, self._worker.world_size)

    def _open_log(self) -> contextlib.AbstractContextManager[TextIO]:
        """The rank's log, or where there is none, what stderr was at the start."""
        try:
            return open(log_path(self._worker.run_dir, self._worker.rank), "a", encoding="utf-8")
        except OSError:
            return contextlib.nullcontext(sys.__stderr__ or sys.stderr)


def parent(pid: int) -> int | None:
    """A process' parent; None where this machine has no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return None
