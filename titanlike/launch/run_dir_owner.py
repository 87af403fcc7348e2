"""Who is at work on a run. One start at a time writes to a run directory: the newest.

Two may be alive at once: a command that was started twice by mistake, or two worlds of an elastic
job that have lost sight of each other. Their metrics and checkpoints would be mixed up.
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
    """This start's hold on a run directory. Rank 0 alone has one."""

    def __init__(self, run_dir: Path) -> None:
        """Take the directory over from whoever has it."""
        self._path = run_dir / FILE
        self._name = uuid.uuid4().hex
        self._seen: tuple[int, int] | None = None
        mine = {"start": self._name, "host": socket.gethostname(), "pid": os.getpid()}
        files.atomic_write_text(self._path, files.dumps(mine | {"time": time.time()}) + "\n")

    def check(self) -> None:
        """Raises ValueError where a later start has taken the directory over; a few microseconds."""
        try:
            now = os.stat(self._path)
            if (now.st_ino, now.st_mtime_ns) == self._seen:
                return
            other = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # removed by somebody, or a file system that is away
            return
        if other.get("start") == self._name:
            self._seen = now.st_ino, now.st_mtime_ns
            return
        raise ValueError(
            f"run_dir={self._path.parent}: another start of this run has taken it over "
            f"(host {other.get('host')}, process {other.get('pid')}); two would mix their metrics and "
            "checkpoints; write another run_dir"
        )


@contextlib.contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """Within it, others can see that this process is at work on a run; however it dies."""
    path = run_dir / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without locks, or one that is full
            file = stack.enter_context(path.open("a+", encoding="utf-8"))
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(socket.gethostname())
            file.flush()
        yield


def is_locked(run_dir: Path) -> bool | None:
    """Whether a process is at work on a run; None where another machine would have to be asked."""
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
