"""A wish to end the run, made by a signal or from outside, kept until the next step boundary.

While a run is `armed`, a first signal is only noted: the run ends where all ranks agree to, with a
checkpoint. A second signal, or one outside, ends the process at once.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

TIME_IS_UP = 1000  # a wish that is no signal's number


def name_of_wish(wish: int) -> str:
    """What asked a run to end: max_time or a signal's name; "" for nothing."""
    if wish in (0, TIME_IS_UP):
        return "max_time" if wish else ""
    return signal.Signals(wish).name


class Stop:
    """The wish of this process. `file`: where the driver of a local job leaves a signal's number."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._armed = False
        self._signum = 0
        self._start = time.monotonic()

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Within it, a first signal is a wish."""
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def request(self, signum: int) -> bool:
        """Note a signal; False where it is to end the process at once instead."""
        if not self._armed or self._signum:
            return False
        self._signum = signum
        return True

    def wish(self, max_time: float | None = None) -> int:
        """What asks this run to end: a signal's number, TIME_IS_UP, or 0 for nothing.

        max_time: seconds that the process may run.
        """
        if not self._signum and self._file is not None and self._file.exists():
            self._signum = int(self._file.read_text(encoding="utf-8"))
        if self._signum:
            return self._signum
        late = max_time is not None and time.monotonic() - self._start >= max_time
        return TIME_IS_UP if late else 0
