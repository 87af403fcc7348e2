"""A request to stop the run, by a signal or by max_time, deferred to the next step boundary.

Within `deferred`, a first signal is only recorded: the run stops where all ranks agree to, with a
checkpoint. A second signal, or one outside, ends the process immediately. The same signal may
arrive twice (SLURM sends it to every process of a job, and torchrun or the driver forward theirs),
so a signal within a second of the first is not a second one.

The driver of a local job and its workers communicate by files in a shared folder: `deferred.PID` of
each worker that defers signals, `stop_code`, the driver's signal, and `stop_now`, once the driver
ends the job immediately.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

MAX_TIME = 1000  # a stop code that is no signal's number
_REPEAT = 1.0  # seconds in which a further signal counts as the same one


def stop_reason(code: int) -> str:
    """A stop code in words: "max_time", a signal's name, or "" for 0."""
    if code in (0, MAX_TIME):
        return "max_time" if code else ""
    return signal.Signals(code).name


class StopRequest:
    """This process' stop request. `folder`: shared by a worker of a local job with its driver."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._forwards = False
        self._deferred = False
        self._signum = 0  # the signal that this process received
        self._received_at = -inf
        self.started = time.time()  # of the job; restarts do not reset it
        self._peer_failed: Callable[[], bool] = lambda: False

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Within it, a first signal is recorded for the next step boundary."""
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
        """Within it, this process is the driver of workers and forwards its request to them."""
        self._folder, self._forwards = folder, True
        try:
            yield
        finally:
            self._folder, self._forwards = None, False

    def receive(self, signum: int) -> bool:
        """Record a signal; False if it must end the process immediately instead."""
        if self._signum and time.monotonic() - self._received_at < _REPEAT:
            return True
        if self._signum or not self._is_deferred() or self._file("stop_now"):
            if self._forwards and self._folder is not None:
                # before the agent's SIGTERM reaches the workers
                with contextlib.suppress(OSError):
                    (self._folder / "stop_now").touch()
            return False
        if self._forwards and self._folder is not None:
            try:
                unfinished = self._folder / "stop_code.tmp"
                unfinished.write_text(str(signum), encoding="utf-8")
                unfinished.replace(self._folder / "stop_code")
            except OSError:  # full disk: the workers would not see the request
                return False
        self._signum, self._received_at = signum, time.monotonic()
        self._print(signum)
        return True

    @property
    def received(self) -> bool:
        """Whether this process has recorded a signal."""
        return bool(self._signum)

    def code(self, max_time: float | None = None) -> int:
        """Why this run is to stop: a signal's number, MAX_TIME, or 0 = it is not.

        max_time: seconds that the job may run.
        """
        if self._signum:
            return self._signum
        if (path := self._file("stop_code")) is not None:
            return int(path.read_text(encoding="utf-8"))
        late = max_time is not None and time.time() - self.started >= max_time
        return MAX_TIME if late else 0

    def watch_peers(self, peer_failed: Callable[[], bool]) -> None:
        """Use `peer_failed` to find out whether another rank of the job ended too early."""
        self._peer_failed = peer_failed

    def has_peer_failed(self) -> bool:
        """Whether another rank of the job ended too early."""
        return self._peer_failed()

    def is_futile(self) -> bool:
        """Whether a signal was recorded, but the next step boundary cannot be reached.

        After a rank has failed, an elastic agent sends the remaining ones a SIGTERM, too.
        """
        return bool(self._signum) and self._deferred and self._peer_failed()

    def _is_deferred(self) -> bool:
        if self._forwards and self._folder is not None:
            return any(self._folder.glob("deferred.*"))
        return self._deferred

    def _file(self, name: str) -> Path | None:
        path = self._folder / name if self._folder is not None else None
        return path if path is not None and path.exists() else None

    def _print(self, signum: int) -> None:
        # not print(): the signal may interrupt the main thread inside the same buffer
        text = "stopping after the next step with a checkpoint; a second signal stops immediately"
        with contextlib.suppress(OSError):
            os.write(2, f"\n{signal.Signals(signum).name}: {text}\n".encode())
