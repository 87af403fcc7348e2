"""Ownership of a run directory: of several starts of a run, only the newest may write to it.

Two may be alive at once, and would mix their metrics and checkpoints: a command that was started
twice by mistake, or an elastic job that was partitioned.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from titanlike.config import files

FILE = "owner.json"
LOCK = "logs/lead.lock"


class Owner:
    """This start as the owner of a run directory. Exists on rank 0 alone."""

    def __init__(self, run_dir: Path) -> None:
        """Take the directory over from an earlier start."""
        self._path = run_dir / FILE
        self._id = uuid.uuid4().hex
        self._checked: tuple[int, int] | None = None  # inode and mtime
        record = {"start": self._id, "host": socket.gethostname(), "pid": os.getpid()}
        files.atomic_write_text(self._path, files.dumps(record | {"time": time.time()}) + "\n")

    def check(self) -> None:
        """Raises ValueError if a later start has taken the directory over; a few microseconds."""
        try:
            now = os.stat(self._path)
            if (now.st_ino, now.st_mtime_ns) == self._checked:
                return
            other = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # deleted, or a file system that is unavailable
            return
        if other.get("start") == self._id:
            self._checked = now.st_ino, now.st_mtime_ns
            return
        raise ValueError(
            f"run_dir={self._path.parent}: another start of this run has taken it over "
            f"(host {other.get('host')}, process {other.get('pid')}); two would mix their metrics "
            "and checkpoints; write another run_dir"
        )


@contextlib.contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """Within it, a lock shows others that this process runs; however it ends, it is released."""
    path = run_dir / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system that has no locks, or is full
            file = stack.enter_context(path.open("a+", encoding="utf-8"))
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(socket.gethostname())
            file.flush()
        yield


def is_locked(run_dir: Path) -> bool | None:
    """Whether a process holds the lock; None if that cannot be seen from this machine."""
    try:
        with (run_dir / LOCK).open("r+", encoding="utf-8") as file:
            host = file.read()
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False if host == socket.gethostname() else None
    except OSError:
        return None
