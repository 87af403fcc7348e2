"""Ensure that only the newest launch of a run writes to its directory.

Two launches may be alive at once, and would mix their metrics and checkpoints: a command that was
run twice by mistake, or an elastic job that was partitioned.

1. The later launch writes its id to owner.json. The earlier one reads that after its step, or
   before a save, and ends.
2. On one machine the later launch waits for that: each rank holds a shared lock until it ends.
3. Then it reads, deletes and writes checkpoints.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from titanlike.core.config import files
from titanlike.core.launch.failures import TakenOver

OWNER = "owner.json"
JOB_LOCK = "logs/lead.lock"  # held by the process that reports the job
_RANKS_LOCK = "logs/ranks.lock"
_POLL = 0.05  # seconds


class RunDirOwner:
    """This launch as the owner of a run directory. Exists only on rank 0."""

    def __init__(self, run_dir: Path) -> None:
        """Take over the directory from an earlier launch."""
        self._run_dir, self._path = run_dir, run_dir / OWNER
        self._id = uuid.uuid4().hex
        self._checked: tuple[int, int] | None = None  # inode and mtime
        self._earlier = self._read()
        files.atomic_write_text(self._path, files.dumps({"start": self._id, **_starter()}) + "\n")

    def check(self) -> None:
        """Raise TakenOver if a later launch has taken over the directory. A few microseconds."""
        try:
            now = os.stat(self._path)
        except OSError:  # deleted, or the file system is unavailable
            return
        if (now.st_ino, now.st_mtime_ns) == self._checked:
            return
        if (owner := self._read()) is None:
            return
        if owner.get("start") != self._id:
            raise TakenOver(
                f"run_dir={self._run_dir}: another start of this run has taken it over "
                f"({_describe_starter(owner)}); two would mix their metrics and checkpoints; write "
                "another run_dir"
            )
        self._checked = now.st_ino, now.st_mtime_ns

    def wait(
        self, patience: float, say: Callable[[str], None]
    ) -> contextlib.AbstractContextManager[object]:
        """Wait until the ranks of an earlier launch on this machine end; returns the ranks' lock.

        Gives up after `patience` seconds: the earlier launch writes no more checkpoints in any
        case. Raises TakenOver if a later launch arrives meanwhile.
        """
        # None = there was none a moment ago: who holds the lock is being launched, too
        here = self._earlier is None or self._earlier.get("host") == socket.gethostname()
        deadline = time.monotonic() + (patience if here else 0)
        lock = _open_lock(self._run_dir / _RANKS_LOCK)
        # changing exclusive to shared is not atomic: a later launch may take over in between
        for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
            while lock is not None and not try_lock(lock, kind) and time.monotonic() < deadline:
                self.check()
                if self._earlier is not None:  # print this once
                    who, self._earlier = _describe_starter(self._earlier), None
                    say(f"waiting until the start that runs this one ({who}) ends its step")
                time.sleep(_POLL)
        self.check()
        return lock or contextlib.nullcontext()

    def _read(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            return files.read_object(self._path)
        return None


def lock_as_rank(run_dir: Path) -> contextlib.AbstractContextManager[object]:
    """Hold the ranks' lock until closed, as a rank of the launch that owns the directory."""
    lock = _open_lock(run_dir / _RANKS_LOCK)
    if lock is not None:
        try_lock(lock, fcntl.LOCK_SH)
    return lock or contextlib.nullcontext()


@contextlib.contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """A context that holds a lock which shows that this process runs; the kernel releases it
    however the process ends."""
    with contextlib.ExitStack() as stack:
        if (file := _open_lock(run_dir / JOB_LOCK)) is not None:
            stack.enter_context(file)
            with contextlib.suppress(OSError):  # full disk
                if try_lock(file, fcntl.LOCK_SH):
                    _overwrite(file, socket.gethostname())
        yield


def is_locked(run_dir: Path) -> bool | None:
    """Whether a process holds the lock of `lock_run_dir`; None if this machine cannot tell."""
    try:
        with files.open_regular(run_dir / JOB_LOCK, "r+", encoding="utf-8") as file:
            host = file.read()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False if host == socket.gethostname() else None
    except BlockingIOError:
        return True
    except (OSError, UnicodeDecodeError):
        return None


def claim(path: Path, patience: float = 0.0) -> tuple[IO[str] | None, str]:
    """Lock a file until it is closed: (open file, ""), or (None, who holds the lock).

    patience: seconds to wait for the holder to end.
    """
    deadline = time.monotonic() + patience
    file = files.open_regular(path, "a+", encoding="utf-8")
    while not try_lock(file, fcntl.LOCK_EX):
        if time.monotonic() >= deadline:
            file.seek(0)
            with file, contextlib.suppress(ValueError):
                return None, _describe_starter(files.loads(file.read()))
            return None, "another process"  # it has not written its id yet
        time.sleep(_POLL)
    _overwrite(file, files.dumps(_starter()) + "\n")
    return file, ""


def _starter() -> dict[str, Any]:
    """This process' identity, for the messages of other processes."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}


def _describe_starter(record: dict[str, Any]) -> str:
    since = ""
    if isinstance(begun := record.get("time"), (int, float)) and 0 <= begun < 1e11:
        since = time.strftime(", since %Y-%m-%d %H:%M:%S", time.localtime(begun))
    return f"host {record.get('host')}, process {record.get('pid')}{since}"


def _open_lock(path: Path) -> IO[str] | None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        return files.open_regular(path, "a+", encoding="utf-8")
    return None


def try_lock(file: IO[Any], kind: int) -> bool:
    """Lock a file (LOCK_EX or LOCK_SH) until it is closed; False if a different process holds it.
    True if the file system has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _overwrite(file: IO[str], text: str) -> None:
    file.truncate(0)
    file.write(text)
    file.flush()
