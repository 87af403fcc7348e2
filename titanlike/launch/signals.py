"""Ctrl-C, SIGTERM and dead parents: a process exits soon, reports it, and leaves no children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from titanlike.launch.stop_request import StopRequest

GRACE = 5.0  # seconds that the main thread gets to exit by itself after a signal
_POLL = 0.5  # seconds between checks whether a stop request is futile
_AGAIN = 0.2  # seconds until a signal that the main thread has not seen is given to it again


class Interrupted(BaseException):
    """A signal ends this process. A BaseException, so that no `except Exception` catches it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(f"interrupted by {signal.Signals(signum).name}")

    @property
    def exit_code(self) -> int:
        """As in shells: 130 for Ctrl-C, 143 for SIGTERM, 138 for SIGUSR1."""
        return 128 + self.signum


def handled_signals() -> list[signal.Signals]:
    """The signals that end a run, except those that are ignored (SIGHUP under nohup)."""
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return [signum for signum in wanted if signal.getsignal(signum) is not signal.SIG_IGN]


@contextlib.contextmanager
def interruptible(
    report: Callable[[Interrupted], None] | None = None,
    stop: StopRequest | None = None,
    grace: float = GRACE,
) -> Iterator[None]:
    """Within it, a signal that `stop` does not defer raises Interrupted in the main thread.

    A main thread inside a C call (a collective whose peer is gone) would raise it late or never:
    after `grace` seconds a watcher thread calls `report` and ends the process. It also does so if a
    signal was deferred, but another rank has failed. A handler that the code inside installs for
    a signal replaces this one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # a sweep's launcher may run jobs in threads, where Python allows no handlers
        return
    watcher = _SignalWatcher(report, stop, grace)
    watcher.install()
    try:
        yield
    finally:
        watcher.uninstall()
    if signum := watcher.unseen():
        raise Interrupted(signum)


class _SignalWatcher:
    """Signal handlers, and a thread that ends the process where they cannot run.

    The thread learns of signals by the bytes that Python's wakeup descriptor writes to a pipe.
    """

    def __init__(
        self,
        report: Callable[[Interrupted], None] | None,
        stop: StopRequest | None,
        grace: float,
    ) -> None:
        self._report, self._stop, self._grace = report, stop, grace
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: a handler may interrupt a handler
        self._uninstalled, self._raised = threading.Event(), threading.Event()
        self._main = threading.get_ident()
        self._fatal = 0  # the signal that ends this process
        self._unraisable = sys.unraisablehook
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._handler = self._handle  # one object, for comparison with getsignal()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="signals")

    def install(self) -> None:
        self._previous = {signum: signal.getsignal(signum) for signum in handled_signals()}
        self._thread.start()
        for signum in self._previous:
            signal.signal(signum, self._handler)
        self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        sys.unraisablehook = self._ignored

    def uninstall(self) -> None:
        self._uninstalled.set()
        self._wake()
        self._thread.join(timeout=1)  # first: the previous handler is not for what it sends
        sys.unraisablehook = self._unraisable
        signal.set_wakeup_fd(self._previous_fd)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        os.close(self._writer)
        os.close(self._reader)

    def unseen(self) -> int:
        """The signal that ends this process, if the code inside has come to its end without it."""
        return 0 if self._raised.is_set() else self._fatal

    def _handle(self, signum: int, _: Any) -> None:
        if os.getpid() != self._pid:  # a forked child (a data loader's): the pipe is its parent's
            return
        fatal = self._process_signals()
        self._wake()  # this may have taken the byte that was to wake the thread
        if fatal and not self._raised.is_set() and not self._uninstalled.is_set():
            self._raised.set()  # once: further signals must not interrupt the cleanup
            raise Interrupted(fatal)

    def _ignored(self, unraisable: Any) -> None:
        """Python has ignored an exception, as in a finalizer (`__del__`): the signal's is raised
        again after it."""
        if unraisable.exc_type is Interrupted:
            self._raised.clear()
        else:
            self._unraisable(unraisable)

    def _process_signals(self) -> int:
        """Read the signals from the pipe; the one that ends this process, or 0."""
        with self._lock, contextlib.suppress(BlockingIOError):
            while signums := os.read(self._reader, 1):
                signum = signums[0]
                if signum == 0 or signal.getsignal(signum) is not self._handler or self._fatal:
                    continue
                if self._stop is None or not self._stop.receive(signum):
                    self._fatal = signum
        return self._fatal

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is awake
            os.write(self._writer, b"\0")

    def _watch(self) -> None:
        """The thread: end the process if the main thread does not."""
        stop = self._stop
        poll = select.poll()  # not select(): a process may have more than 1024 open files
        poll.register(self._reader, select.POLLIN)
        while not self._uninstalled.is_set():
            poll.poll(_POLL * 1000 if stop is not None and stop.received else None)
            if self._uninstalled.is_set():
                return
            if fatal := self._process_signals():
                self._insist(fatal)
                self._end_process(fatal, 0)
            elif stop is not None and stop.is_futile():
                self._end_process(stop.code(), GRACE)

    def _insist(self, signum: int) -> None:
        """Wait as long as the main thread may take. Its handler may have run before the signal's
        byte was in the pipe, or what it raised was ignored."""
        deadline = time.monotonic() + self._grace
        while (left := deadline - time.monotonic()) > 0:
            if self._uninstalled.wait(min(_AGAIN, left)):
                return
            if not self._raised.is_set() and signal.getsignal(signum) is self._handler:
                signal.pthread_kill(self._main, signum)  # also ends a sleep, unlike interrupt_main

    def _end_process(self, signum: int, grace: float) -> None:
        if not self._uninstalled.wait(grace):
            if self._report is not None:
                self._report(Interrupted(signum))
            exit_now(128 + signum)


def exit_now(code: int) -> None:
    """Exit without cleanup, which could wait for dead peers; kills child processes."""
    if "multiprocessing" in sys.modules:  # data loader workers
        import multiprocessing

        for child in multiprocessing.active_children():
            child.kill()
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
    if os.getppid() != parent:  # it died before the call
        os._exit(128 + signum)
