"""A temporary folder of a driver and its workers, which no other user can read, write or replace:
the workers run what it says.

A driver that is killed with SIGKILL cannot remove its folder; the next driver does. Each driver
holds a lock in its folder, so a folder whose lock is free has no driver.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from titanlike.config.errors import ConfigError, Problem

_PREFIX, _LOCK = "titanlike-", "driver.lock"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder of mode 0700, removed at the end. Raises ConfigError where none is private."""
    parent = _parent()
    _remove_abandoned(parent)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent) as name:
        unlocked = Path(name) / "unlocked"
        with unlocked.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unlocked.rename(Path(name) / _LOCK)  # exists only once it is locked
            yield Path(name)


def _parent() -> Path:
    """TMPDIR, or another folder if all users may rename what is in that."""
    wanted = tempfile.gettempdir()
    for folder in map(Path, (wanted, "/tmp", "/var/tmp", "/dev/shm")):
        if os.access(folder, os.W_OK) and not _replaceable(folder.resolve()):
            return folder
    reason = "every user of this machine may rename the folders there"
    raise ConfigError([Problem("TMPDIR", wanted, reason, "TMPDIR=$HOME")])


def _replaceable(folder: Path) -> bool:
    modes = [path.stat().st_mode for path in (folder, *folder.parents)]
    return any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in modes)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), path.open("r+") as lock:  # locked, or another user's
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.parent.lstat().st_uid == os.getuid():
                shutil.rmtree(path.parent, ignore_errors=True)
