"""A folder on a file system that fsspec supports: a local path, or a URL such as s3://bucket/runs/a.

No torch, so that a config can be checked with it.
"""

from __future__ import annotations

import contextlib
import os
from datetime import datetime
from pathlib import Path
from typing import IO

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from titanlike.config.files import atomic_write_bytes


class Storage:
    """A folder; `str()` is its location as the user wrote it.

    Written data is durable when a method returns: on a local file system through fsync of the
    file and of its folder, elsewhere through closing the object.
    """

    def __init__(self, location: str | Path) -> None:
        """Raises ValueError for an unknown protocol, ImportError naming a missing package."""
        text = str(location)
        if "://" not in text:
            text = str(Path(text).expanduser().absolute())
        self._location = text.rstrip("/")
        self._fs, self._root = url_to_fs(self._location)
        self.local = isinstance(self._fs, LocalFileSystem)
        self.process_local = isinstance(self._fs, MemoryFileSystem)  # other ranks do not see it

    def __str__(self) -> str:
        return self._location

    @property
    def name(self) -> str:
        return self._location.rpartition("/")[2]

    @property
    def parent(self) -> Storage:
        return Storage(self._location.rpartition("/")[0])

    def at(self, name: str) -> Storage:
        """A subfolder."""
        return Storage(f"{self._location}/{name}")

    def names(self) -> list[str]:
        """Names of the files and folders in it, sorted; [] where it does not exist."""
        self._fs.invalidate_cache()  # other processes write here
        try:
            found = self._fs.ls(self._root, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {path.rstrip("/").rpartition("/")[2] for path in found}
        return sorted(names - {"", self.name})

    def exists(self, name: str) -> bool:
        self._fs.invalidate_cache()
        return self._fs.exists(self._path(name))

    def size(self, name: str) -> int:
        """In bytes. Raises FileNotFoundError."""
        return self._fs.size(self._path(name))

    def modified(self, name: str) -> datetime | None:
        """Time of the last write, in UTC; None where the file system has none."""
        try:
            return self._fs.modified(self._path(name))
        except (NotImplementedError, FileNotFoundError):
            return None

    def open(self, name: str, mode: str) -> IO[bytes]:
        return self._fs.open(self._path(name), mode)

    def read(self, name: str) -> bytes:
        return self._fs.cat_file(self._path(name))

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        if not self.local:
            self._fs.pipe_file(self._path(name), data)
            return
        atomic_write_bytes(Path(self._path(name)), data)
        self.sync()

    def make(self) -> None:
        """Create the folder and its parents."""
        self._fs.makedirs(self._root, exist_ok=True)
        if self.local:
            self.parent.sync()

    def sync(self) -> None:
        """Make the folder's entries durable."""
        if self.local:
            handle = os.open(self._root, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        if self.exists(name):
            self._fs.rm_file(self._path(name))
            self.sync()

    def remove_all(self) -> None:
        """Remove the folder and everything in it."""
        self._fs.invalidate_cache()
        if self._fs.exists(self._root):
            self._fs.rm(self._root, recursive=True)

    def free(self) -> int | None:
        """Free bytes; None where unknown."""
        with contextlib.suppress(OSError):
            stats = os.statvfs(self._root) if self.local else None
            return stats and stats.f_bavail * stats.f_frsize
        return None

    def check_writable(self) -> None:
        """Create the folder, write a file and remove it. Raises what the file system raises."""
        self._fs.makedirs(self._root, exist_ok=True)
        probe = f".writable-{os.getpid()}"
        self._fs.pipe_file(self._path(probe), b"titanlike")
        self._fs.rm_file(self._path(probe))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
