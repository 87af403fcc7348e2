"""Ctrl-C, SIGTERM and dead parents: a run stops at the next step, or its processes exit soon,
report it, and leave no children. All commands handle signals by this module.

A request to stop, by a signal or by max_time, is deferred to the next step boundary: within
`StopRequest.deferred` a first signal is only recorded, and the run stops with a checkpoint where
all ranks agree to. A second signal, or a signal outside, ends the process immediately. The same
signal may arrive twice (SLURM sends it to every process of a job, and torchrun or the driver
forward theirs), so a signal within a second of the first does not count as a second one.

The driver of a local job and its workers communicate by files in a shared folder: `deferred.PID` of
each worker that defers signals, `stop_code` with the driver's signal, and `stop_now` once the
driver ends the job immediately.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from titanlike.core.config import files

STACKS = signal.SIGURG  # asks a rank to write its stacks to its log
MAX_TIME = 1000  # a stop code, not a signal's number
GRACE = 5.0  # seconds for the main thread to exit by itself after a signal
_AT_A_STEP = "stopping after the next step with a checkpoint"
_REPEAT = 1.0  # seconds within which a second signal counts as the same one
_POLL = 0.5  # seconds between checks whether a stop request is futile
_AGAIN = 0.2  # seconds until a signal that the main thread has not handled is sent again


def stop_reason(code: int) -> str:
    """A stop code in words: "max_time", a signal's name, or "" for 0."""
    if code in (0, MAX_TIME):
        return "max_time" if code else ""
    return signal.Signals(code).name


class StopRequest:
    """This process' stop request. `folder`: shared by a local job's worker and its driver."""

    def __init__(self, folder: Path | None = None, answer: str = _AT_A_STEP) -> None:
        """answer: printed when a signal is deferred."""
        self._answer = answer
        self.started = time.time()  # when the job started; restarts do not reset it
        self._clock = self.started - time.monotonic()  # the system's clock may be set meanwhile
        # whether a different rank of the job has failed
        self.peer_failed: Callable[[], bool] = lambda: False
        self._folder = folder
        self._workers: Path | None = None  # in the driver: the folder shared with its workers
        self._deferred = False
        self._signum = 0  # the signal that this process received
        self._received_at = -inf

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A context in which a first signal is only recorded, for the next step boundary."""
        marker = self._folder / f"deferred.{os.getpid()}" if self._folder is not None else None
        if marker is not None:
            marker.touch()
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
            if marker is not None:
                marker.unlink(missing_ok=True)

    @contextlib.contextmanager
    def forwarding(self, folder: Path) -> Iterator[None]:
        """A context in which this process, a driver, forwards its stop request to its workers."""
        self._workers = folder
        try:
            yield
        finally:
            self._workers = None

    def receive(self, signum: int) -> bool:
        """Record a signal. Returns False if it must end the process immediately instead."""
        if self._signum and time.monotonic() - self._received_at < _REPEAT:
            return True
        workers, shared = self._workers, self._workers or self._folder
        deferred = self._deferred if workers is None else any(workers.glob("deferred.*"))
        ended = shared is not None and (shared / "stop_now").exists()
        if self._signum or not deferred or ended:
            if workers is not None:  # before the SIGTERM that ends them
                with contextlib.suppress(OSError):
                    (workers / "stop_now").touch()
            return False
        if workers is not None:
            try:
                files.atomic_write_text(workers / "stop_code", str(signum), sync=False)
            except OSError:  # full disk: the request cannot reach the workers
                return False
        self._signum, self._received_at = signum, time.monotonic()
        # not print(): the signal may have interrupted a write to the same buffer
        text = f"{self._answer}; a second signal stops immediately"
        with contextlib.suppress(OSError):
            os.write(2, f"\n{signal.Signals(signum).name}: {text}\n".encode())
        return True

    @property
    def received(self) -> bool:
        """Whether this process has recorded a signal."""
        return bool(self._signum)

    def code(self, max_time: float | None = None) -> int:
        """Why this run must stop: a signal's number, or MAX_TIME; 0 = it continues.

        max_time: seconds that the job may run.
        """
        if self._signum:
            return self._signum
        if self._folder is not None and (path := self._folder / "stop_code").exists():
            return int(path.read_text(encoding="utf-8"))
        now = self._clock + time.monotonic()
        timed_out = max_time is not None and now - self.started >= max_time
        return MAX_TIME if timed_out else 0

    def is_futile(self) -> bool:
        """Whether a signal was recorded, but the next step boundary is out of reach: a rank failed.

        An elastic agent sends the remaining ranks a SIGTERM when one has failed.
        """
        return bool(self._signum) and self._deferred and self.peer_failed()


class Interrupted(KeyboardInterrupt):
    """A signal ends this process. No `except Exception` catches it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(f"interrupted by {signal.Signals(signum).name}")

    @property
    def exit_code(self) -> int:
        """The exit code as in shells: 130 for Ctrl-C, 143 for SIGTERM, 138 for SIGUSR1."""
        return 128 + self.signum


def handled_signals() -> list[signal.Signals]:
    """The signals that end a run, except ignored ones (SIGHUP under nohup)."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return [signum for signum in signals if signal.getsignal(signum) is not signal.SIG_IGN]


@contextlib.contextmanager
def interruptible(
    report: Callable[[Interrupted], None] | None = None,
    stop: StopRequest | None = None,
    grace: float = GRACE,
) -> Iterator[Callable[[], int]]:
    """A context in which a signal that `stop` does not defer raises Interrupted in the main thread.

    Yields a function that returns that signal, 0 = none came.

    A main thread inside a C call (a collective whose peer is gone) would raise it late or never:
    after `grace` seconds, or at the next signal, a watcher thread calls `report` and ends the
    process. It also does so if a signal was deferred, but a different rank has failed. Handlers
    that the code inside installs replace this one.
    """
    # a sweep's launcher may run jobs in threads, where Python allows no handlers
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    with _SignalWatcher(report, stop or StopRequest(), grace) as watcher:
        yield lambda: watcher.fatal
    if watcher.fatal and not watcher.raised.is_set():  # the body ended before it was raised
        raise Interrupted(watcher.fatal)


class _SignalWatcher:
    """Signal handlers, and a thread that ends the process if they cannot run.

    Python's wakeup descriptor writes each signal's number to a pipe, which the thread reads.
    """

    def __init__(
        self, report: Callable[[Interrupted], None] | None, stop: StopRequest, grace: float
    ) -> None:
        self._report, self._stop, self._grace = report, stop, grace
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: a handler may interrupt a handler
        self._uninstalled, self.raised = threading.Event(), threading.Event()
        self._main = threading.get_ident()
        self.fatal = 0  # the signal that ends this process
        self._fatal_at, self._resent, self._again = inf, 0, False  # again: a further signal came
        self._unraisable = sys.unraisablehook
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._handler = self._handle  # one object, for comparison with getsignal()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="signals")

    def __enter__(self) -> _SignalWatcher:
        self._previous = {signum: signal.getsignal(signum) for signum in handled_signals()}
        self._thread.start()
        for signum in self._previous:
            signal.signal(signum, self._handler)
        self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        sys.unraisablehook = self._ignored
        return self

    def __exit__(self, *error: object) -> None:
        self._uninstalled.set()
        self._wake()
        self._thread.join(timeout=1)  # it may still send a signal, which needs this handler
        sys.unraisablehook = self._unraisable
        signal.set_wakeup_fd(self._previous_fd)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        os.close(self._writer)
        os.close(self._reader)

    def _handle(self, signum: int, _: Any) -> None:
        if os.getpid() != self._pid:  # a forked child (data loader), which shares its parent's pipe
            return
        fatal = self._process_signals()
        self._wake()  # this handler may have read the byte that was to wake the thread
        if fatal and not self.raised.is_set() and not self._uninstalled.is_set():
            self.raised.set()  # raise once: further signals must not interrupt the cleanup
            raise Interrupted(fatal)

    def _ignored(self, unraisable: Any) -> None:
        """Raise an Interrupted that Python ignored (e.g. in `__del__`) again later."""
        if unraisable.exc_type is Interrupted:
            self.raised.clear()
        else:
            self._unraisable(unraisable)

    def _process_signals(self) -> int:
        """Read signals from the pipe. Returns the signal that ends this process, or 0."""
        with self._lock, contextlib.suppress(BlockingIOError):
            while signums := os.read(self._reader, 1):
                signum = signums[0]
                if signum == 0 or signal.getsignal(signum) is not self._handler:
                    continue
                if self.fatal and self._resent:  # by this thread
                    self._resent -= 1
                elif self.fatal:
                    self._again |= time.monotonic() - self._fatal_at > _REPEAT
                elif not self._stop.receive(signum):
                    self.fatal, self._fatal_at = signum, time.monotonic()
        return self.fatal

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the thread will wake anyway
            os.write(self._writer, b"\0")

    def _watch(self) -> None:
        """The thread's function: end the process if the main thread does not."""
        poll = select.poll()  # not select(): a process may have more than 1024 open files
        poll.register(self._reader, select.POLLIN)
        while not self._uninstalled.is_set():
            poll.poll(_POLL * 1000 if self._stop.received else None)
            if self._uninstalled.is_set():
                return
            if fatal := self._process_signals():
                self._insist(fatal)
                self._end_process(fatal, 0)
            elif self._stop.is_futile():
                self._end_process(self._stop.code(), GRACE)

    def _insist(self, signum: int) -> None:
        """Wait up to `grace` seconds, or until a further signal, for the main thread to exit,
        sending the signal again if it raised nothing: its handler may have run before the byte was
        in the pipe, or Python ignored the exception."""
        deadline = time.monotonic() + self._grace
        while (remaining := deadline - time.monotonic()) > 0 and not self._again:
            if self._uninstalled.wait(min(_AGAIN, remaining)):
                return
            self._process_signals()
            if not self.raised.is_set() and signal.getsignal(signum) is self._handler:
                self._resent += 1
                signal.pthread_kill(self._main, signum)  # also ends a sleep, unlike interrupt_main

    def _end_process(self, signum: int, grace: float) -> None:
        if not self._uninstalled.wait(grace):
            if self._report is not None:
                self._report(Interrupted(signum))
            exit_now(128 + signum)


def exit_now(code: int) -> NoReturn:
    """Exit without cleanup, which could wait for dead peers; kills child processes."""
    if "multiprocessing" in sys.modules:  # data loader workers
        import multiprocessing

        for child in multiprocessing.active_children():
            child.kill()
        # of the sockets that their tensors come by; Python removes it at a normal exit alone, and a
        # child of multiprocessing has its parent's
        if multiprocessing.parent_process() is None:
            folder = getattr(multiprocessing.current_process(), "_config", {}).get("tempdir")
            shutil.rmtree(folder or "", ignore_errors=True)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def die_with_parent(parent: int, signum: signal.Signals) -> None:
    """Ask Linux to send this process `signum` when its parent (process id `parent`) dies."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signum))
    if os.getppid() != parent:  # the parent died before the call
        os._exit(128 + signum)
