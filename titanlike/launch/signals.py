"""Ctrl-C, SIGTERM and dead parents: a process ends soon, says so, and leaves nobody behind."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from titanlike.launch.stop_request import StopRequest

GRACE = 5.0  # seconds that the main thread gets to end by itself after a signal
_LOOK = 0.5  # seconds between looks whether a wish is in vain


class Interrupted(BaseException):
    """A signal asked this process to end. A BaseException, so that no `except Exception` eats it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(f"interrupted by {signal.Signals(signum).name}")

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM, 138 for SIGUSR1: what shells expect."""
        return 128 + self.signum


def handled_signals() -> list[signal.Signals]:
    """The signals that end a run; one that is ignored (SIGHUP under nohup) stays ignored."""
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return [signum for signum in wanted if signal.getsignal(signum) is not signal.SIG_IGN]


@contextlib.contextmanager
def interruptible(
    report_failure: Callable[[Interrupted], None] | None = None,
    stop: StopRequest | None = None,
    grace: float = GRACE,
) -> Iterator[None]:
    """Within it, a signal that `stop` does not take as a wish raises Interrupted in the main thread.

    A main thread inside a C call (a collective whose peer is gone) would get to it late or never:
    after `grace` seconds a second thread calls `report_failure` and ends the process. So it does where
    a wish was taken, but another rank has ended. A handler that the code inside installs for itself
    takes its signal out of this hand.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # a sweep's launcher may run jobs in threads; Python allows no handlers there
        return

    owner = os.getpid()
    lock = threading.RLock()  # reentrant: a handler may interrupt a handler
    ended, raised = threading.Event(), threading.Event()
    ending: list[int] = []  # the signal that ends this process
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)

    def judge() -> int:
        """Take note of the signals that have come; the one that ends this process, or 0."""
        with lock, contextlib.suppress(BlockingIOError):
            while signums := os.read(reader, 1):
                signum = signums[0]
                if signum == 0 or signal.getsignal(signum) is not handler or ending:
                    continue
                if stop is None or not stop.receive(signum):
                    ending.append(signum)
        return ending[0] if ending else 0

    def handler(signum: int, _: Any) -> None:
        if os.getpid() != owner:  # a forked child (a data loader's): the pipe is its parent's
            return
        by = judge()
        wake()  # the watcher sleeps on if the signal's byte is gone before it looks
        if by and not raised.is_set():
            raised.set()  # once: what ends in order must not be interrupted by impatience
            raise Interrupted(by)

    def wake() -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is awake
            os.write(writer, b"\0")

    def watch() -> None:
        poll = select.poll()  # not select: a process may have more than 1024 files
        poll.register(reader, select.POLLIN)
        while not ended.is_set():
            poll.poll(_LOOK * 1000 if stop is not None and stop.received else None)
            if ended.is_set():
                return
            if by := judge():
                if grace and not raised.wait(0.2):  # the handler came before its signal's byte
                    _thread.interrupt_main(by)
                give_up(by, grace)
            elif stop is not None and stop.is_futile():
                give_up(stop.code(), GRACE)

    def give_up(signum: int, patience: float) -> None:
        if not ended.wait(patience):
            if report_failure is not None:
                report_failure(Interrupted(signum))
            exit_now(128 + signum)

    before = {signum: signal.getsignal(signum) for signum in handled_signals()}
    watcher = threading.Thread(target=watch, daemon=True, name="signals")
    watcher.start()
    for signum in before:
        signal.signal(signum, handler)
    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(wakeup_before)
        for signum, old in before.items():
            signal.signal(signum, old)
        wake()
        watcher.join(timeout=1)
        os.close(writer)
        os.close(reader)


def exit_now(code: int) -> None:
    """End this process without teardown, which could wait for dead peers; its children with it."""
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
    if os.getppid() != parent:  # it died before we asked
        os._exit(128 + signum)
