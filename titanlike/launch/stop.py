"""A wish to end the run, made by a signal or by the clock, kept until the next step boundary.

While a run is `armed`, a first signal is only noted: the run ends where all ranks agree to, with a
checkpoint. A second signal, or one outside, ends the process at once.

One signal may come twice: SLURM sends it to every process of a job, and torchrun or the driver pass
on theirs. So what comes within a second of the first is the same one.

The driver of a local job and its workers share a folder: `armed.PID` of each worker that is armed,
`wish`, the number of the driver's signal, and `now`, once the job is to end at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

TIME_IS_UP = 1000  # a wish that is no signal's number
_SAME = 1.0  # seconds in which a signal that comes again is the one that came before


def name_of_wish(wish: int) -> str:
    """What asked a run to end: max_time or a signal's name; "" for nothing."""
    if wish in (0, TIME_IS_UP):
        return "max_time" if wish else ""
    return signal.Signals(wish).name


class Stop:
    """The wish of this process. `folder`: what a worker of a local job shares with its driver."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._drives = False
        self._armed = False
        self._signum = 0  # that came to this process
        self._noted = -inf
        self.started = time.time()  # of the job, which restarts do not begin anew
        self._peer_gone: Callable[[], bool] = lambda: False

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Within it, a first signal is a wish."""
        sign = self._folder / f"armed.{os.getpid()}" if self._folder is not None else None
        if sign is not None:
            sign.touch()
        self._armed = True
        try:
            yield
        finally:
            self._armed = False
            if sign is not None:
                sign.unlink(missing_ok=True)

    @contextlib.contextmanager
    def driving(self, folder: Path) -> Iterator[None]:
        """Within it, this process is the driver of workers, and passes its wish on to them."""
        self._folder, self._drives = folder, True
        try:
            yield
        finally:
            self._folder, self._drives = None, False

    def request(self, signum: int) -> bool:
        """Note a signal; False where it is to end the process at once instead."""
        if self._signum and time.monotonic() - self._noted < _SAME:
            return True
        if self._signum or not self._is_armed() or self._file("now"):
            if self._drives and self._folder is not None:
                # before the agent's SIGTERM comes to the workers
                with contextlib.suppress(OSError):
                    (self._folder / "now").touch()
            return False
        if self._drives and self._folder is not None:
            try:
                unfinished = self._folder / "wish.tmp"
                unfinished.write_text(str(signum), encoding="utf-8")
                unfinished.replace(self._folder / "wish")
            except OSError:  # a full disk: the workers would never know
                return False
        self._signum, self._noted = signum, time.monotonic()
        self._say(signum)
        return True

    @property
    def asked(self) -> bool:
        """Whether a signal was noted."""
        return bool(self._signum)

    def wish(self, max_time: float | None = None) -> int:
        """What asks this run to end: a signal's number, TIME_IS_UP, or 0 for nothing.

        max_time: seconds that the job may run.
        """
        if self._signum:
            return self._signum
        if (path := self._file("wish")) is not None:
            return int(path.read_text(encoding="utf-8"))
        late = max_time is not None and time.time() - self.started >= max_time
        return TIME_IS_UP if late else 0

    def watch(self, peer_gone: Callable[[], bool]) -> None:
        """Let this process know whether another rank of its job has ended before its time."""
        self._peer_gone = peer_gone

    def in_vain(self) -> bool:
        """Whether a signal was noted, but the next step boundary will not come.

        An elastic agent ends the ranks that are left by a SIGTERM, too, after one has failed.
        """
        return bool(self._signum) and self._armed and self._peer_gone()

    def _is_armed(self) -> bool:
        if self._drives and self._folder is not None:
            return any(self._folder.glob("armed.*"))
        return self._armed

    def _file(self, name: str) -> Path | None:
        path = self._folder / name if self._folder is not None else None
        return path if path is not None and path.exists() else None

    def _say(self, signum: int) -> None:
        # not by print: a signal may come while the main thread is inside the same buffer
        name = signal.Signals(signum).name
        line = (
            f"\n{name}: stopping after this step, with a checkpoint; a second one stops at once\n"
        )
        with contextlib.suppress(OSError):
            os.write(2, line.encode())
