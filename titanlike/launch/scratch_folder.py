"""A temporary folder of a driver and its workers.

A driver that is killed with SIGKILL cannot remove its folder; the next driver does. Each driver
holds a lock in its folder, so a folder whose lock is free has no driver.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX, _LOCK = "titanlike-", "driver.lock"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, removed at the end."""
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        unlocked = Path(name) / "unlocked"
        with unlocked.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unlocked.rename(Path(name) / _LOCK)  # exists only once it is locked
            yield Path(name)


def _remove_abandoned() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), path.open("r+") as lock:  # locked, or another user's
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
