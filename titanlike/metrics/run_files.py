"""The files that a run writes to until its end: they must stay where they are.

A file that was deleted or replaced takes what is written to it without an error, and nobody can read
it. A file system that is unavailable for a moment is waited for.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from titanlike.config.files import NotRegularFile, regular_fd

_PAUSES = (0.1, 0.4, 1.5, 4.0)  # seconds before another attempt
_Result = TypeVar("_Result")


class LostFiles(OSError):
    """A file or folder of the run was deleted or replaced while the run used it."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            f"{path} was {what} while the run wrote to it; what it writes would be lost, so it ends. "
            "The same command resumes from the newest checkpoint that is left"
        )


class FailedWrite(OSError):
    """A file could not be written; the error names it."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path} could not be written: {error.strerror or error}")
        self.errno = error.errno


class AppendedFile:
    """Lines are appended, each in the file when `write` returns. Raises FailedWrite."""

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._fd = self._retry(lambda: regular_fd(path, flags))

    def write(self, line: str) -> None:
        left = f"{line}\n".encode()
        while left:
            left = left[self._retry(partial(os.write, self._fd, left)) :]

    def sync(self) -> None:
        """Make what was written durable."""
        self._retry(partial(os.fsync, self._fd))

    def close(self) -> None:
        os.close(self._fd)

    def _retry(self, attempt: Callable[[], _Result]) -> _Result:
        try:
            return _retried(attempt, final=NotRegularFile)
        except OSError as error:
            raise FailedWrite(self._path, error) from None


def append_line(path: Path, line: str) -> None:
    """Raises FailedWrite."""
    with contextlib.closing(AppendedFile(path)) as file:
        file.write(line)


class RunFiles:
    """Finds out whether a run's directory and what is in it are still the same."""

    def __init__(self, run_dir: Path) -> None:
        names = ("metrics.jsonl", "events.jsonl", "checkpoints", "logs")
        self._paths = [run_dir, *(run_dir / name for name in names)]
        # inodes, and descriptors that keep their numbers from being used for other files
        self._seen: dict[Path, tuple[int, int]] = {}
        self.renew()

    def renew(self) -> None:
        """Take the files that there are now as the run's; those that come later are added."""
        self.close()
        self.check()

    def close(self) -> None:
        for _, descriptor in self._seen.values():
            os.close(descriptor)
        self._seen.clear()

    def check(self) -> None:
        """Raises LostFiles; a few microseconds."""
        for path in self._paths:
            if path not in self._seen:
                with contextlib.suppress(OSError):  # not there yet
                    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    self._seen[path] = os.fstat(descriptor).st_ino, descriptor
            elif self._inode(path) != self._seen[path][0]:
                raise LostFiles(path, "replaced")

    def _inode(self, path: Path) -> int:
        # only a whole directory may be gone for a moment, with its file system
        final = () if path == self._paths[0] else FileNotFoundError
        try:
            return _retried(partial(os.stat, path), final).st_ino
        except OSError as error:
            missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
            what = "deleted or moved" if missing else f"lost ({error.strerror})"
            raise LostFiles(path, what) from None


def _retried(attempt: Callable[[], _Result], final: type[OSError] | tuple[()]) -> _Result:
    """final: errors that another attempt would repeat."""
    for pause in _PAUSES:
        try:
            return attempt()
        except final:
            raise
        except OSError:
            time.sleep(pause)
    return attempt()
