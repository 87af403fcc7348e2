"""A folder on any file system that fsspec knows: a local path, or a URL such as s3://bucket/runs/a.

No torch, so that a config can be checked with it.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import IO

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from titanlike.config.files import atomic_write_bytes


class Storage:
    """A folder and what is done in it. `str()` gives the location that was written.

    What is written is durable when a method returns: on a local file system through fsync of the
    file and of its folder, elsewhere through closing the object.
    """

    def __init__(self, location: str | Path) -> None:
        """Raises ValueError where fsspec does not know the URL's protocol, ImportError naming the
        package where it does but the package is missing."""
        text = str(location)
        if "://" not in text:
            text = str(Path(text).expanduser().absolute())
        self._location = text.rstrip("/")
        self._fs, self._root = url_to_fs(self._location)
        self.local = isinstance(self._fs, LocalFileSystem)
        self.of_one_process = isinstance(self._fs, MemoryFileSystem)  # no other rank sees it

    def __str__(self) -> str:
        return self._location

    @property
    def name(self) -> str:
        return self._location.rpartition("/")[2]

    @property
    def parent(self) -> Storage:
        return Storage(self._location.rpartition("/")[0])

    def at(self, name: str) -> Storage:
        """A folder in this one."""
        return Storage(f"{self._location}/{name}")

    def names(self) -> list[str]:
        """Of the files and folders in it, sorted; [] where it is not there."""
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
        """When it was written last, in UTC; None where the file system does not tell."""
        try:
            return self._fs.modified(self._path(name))
        except (NotImplementedError, FileNotFoundError):
            return None

    def open(self, name: str, mode: str) -> IO[bytes]:
        return self._fs.open(self._path(name), mode)

    def read(self, name: str) -> bytes:
        return self._fs.cat_file(self._path(name))

    def write(self, name: str, data: bytes) -> None:
        """A whole file: a reader or a crash sees all of it, or none."""
        if not self.local:
            self._fs.pipe_file(self._path(name), data)
            return
        atomic_write_bytes(Path(self._path(name)), data)
        self.sync()

    def make(self) -> None:
        """Create the folder, and those above it."""
        self._fs.makedirs(self._root, exist_ok=True)
        if self.local:
            self.parent.sync()

    def sync(self) -> None:
        """Make the names of the folder's files durable."""
        if self.local:
            handle = os.open(self._root, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def remove(self, name: str) -> None:
        """A file; nothing where it is not there."""
        if self.exists(name):
            self._fs.rm_file(self._path(name))
            self.sync()

    def remove_all(self) -> None:
        """The folder and everything in it."""
        self._fs.invalidate_cache()
        if self._fs.exists(self._root):
            self._fs.rm(self._root, recursive=True)

    def free(self) -> int | None:
        """Bytes that are free, where that can be told."""
        if not self.local:
            return None
        try:
            stats = os.statvfs(self._root)
        except OSError:
            return None
        return stats.f_bavail * stats.f_frsize

    def prove_writable(self) -> None:
        """Create the folder, write a file and remove it. Raises what the file system raises."""
        self._fs.makedirs(self._root, exist_ok=True)
        probe = f".writable-{os.getpid()}"
        self._fs.pipe_file(self._path(probe), b"titanlike")
        self._fs.rm_file(self._path(probe))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
