"""Ctrl-C, SIGTERM and dead parents: a process ends soon, says so, and leaves nobody behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

GRACE = 5.0  # seconds that the main thread gets to end by itself after a signal


class Interrupted(BaseException):
    """A signal asked this process to end. A BaseException, so that no `except Exception` eats it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(f"interrupted by {signal.Signals(signum).name}")

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM: what shells expect."""
        return 128 + self.signum


def handled_signals() -> list[signal.Signals]:
    """The signals that end a run; one that is ignored (SIGHUP under nohup) stays ignored."""
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [signum for signum in wanted if signal.getsignal(signum) is not signal.SIG_IGN]


@contextlib.contextmanager
def interruptible(last_words: Callable[[Interrupted], None] | None = None) -> Iterator[None]:
    """Within it, a signal raises Interrupted in the main thread.

    A main thread inside a C call (a collective whose peer is gone) would get to it late or never:
    after GRACE seconds a second thread calls `last_words` and ends the process. A handler that
    the code inside installs for itself takes its signal out of this hand.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # a sweep's launcher may run jobs in threads; Python allows no handlers there
        return

    def handler(signum: int, _: Any) -> None:
        raise Interrupted(signum)

    ended = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while signums := os.read(reader, 1):
            signum = signums[0]
            if signal.getsignal(signum) is handler and not ended.wait(GRACE):
                if last_words is not None:
                    last_words(Interrupted(signum))
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
        os.close(writer)
        watcher.join(timeout=1)
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
