"""A folder of checkpoints: a local path, or an object store's URL such as s3://bucket/runs/a, by
fsspec.

No torch, so that a config can be checked with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TypeVar

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from titanlike.core.config.files import (
    NotRegularFile,
    atomic_write_bytes,
    check_writable,
    open_regular,
    sync_to_disk,
)

# files of a checkpoint, see integrity.py
MARKER = "COMMITTED"  # without this file a checkpoint is incomplete
DAMAGED_MARKER = "DAMAGED"
INDEX = "index.json"
STATE = "state.json"
OLD_INDEX = ".metadata"  # of the formats before, which `titanlike checkpoint convert` rewrites

# allowed protocols of fsspec: other ones may execute what a URL names, or are read-only
PROTOCOLS = ("file", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "oci")
MOST_BYTES = 2**26  # of a small file, as state.json
_PART = 2**20  # bytes of it that are read at a time
_PAUSES = (0.1, 0.4, 1.5)  # seconds before each further attempt to read
# errors of a removal when files were added, or are open on a network file system
_CHANGED = (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY)
_Result = TypeVar("_Result")
ReadInto = Callable[[int, Any], int]  # (offset in a file, buffer) -> bytes read


class Moved:
    """Counts what is read of checkpoints' files and written to them, a part of a file at a time:
    progress, however long it takes."""

    count = 0


class UnreadableFile(OSError):
    """A file or folder could not be read in several attempts; its content may be intact."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.errno = errno.EIO  # a restart may succeed


class NotSmallText(ValueError):
    """A file is larger than it can be, or no text."""


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is missing or differs from what was written."""

    def __init__(self, folder: Storage, file: str, reason: str) -> None:
        self.folder, self.file, self.reason = folder, file, reason
        super().__init__(f"checkpoint {folder} is damaged: {file} {reason}")

    def __reduce__(self) -> Any:  # sent between ranks
        return type(self), (self.folder, self.file, self.reason)


def error_line(error: BaseException) -> str:
    """The first line of an error."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class Storage:
    """A folder; `str()` is its location as the user wrote it.

    Written data are durable when a method returns: on a local file system by fsync of the file and
    its folder, elsewhere by closing the object.

    Reads raise FileNotFoundError and NotRegularFile at once; after other errors they are repeated,
    and finally raise UnreadableFile.
    """

    def __init__(self, location: str | Path, moved: Moved | None = None) -> None:
        """moved: counts parts of its files and of folders below it; None = one of its own. Raises
        ValueError for an unknown protocol, ImportError naming a missing package."""
        text, self.moved = str(location), moved or Moved()
        if "://" not in text:
            text = str(Path(text).expanduser().absolute())
            self._fs, self._root = LocalFileSystem(), text
        elif "::" in text or text.partition("://")[0] not in PROTOCOLS:
            kinds = ", ".join(PROTOCOLS)
            raise ValueError(
                f"{text}: checkpoints are kept in a local folder, or by one of {kinds}"
            )
        else:
            self._fs, self._root = url_to_fs(text.rstrip("/"))
        self._location = text.rstrip("/")
        self.local = isinstance(self._fs, LocalFileSystem)
        self.process_local = isinstance(self._fs, MemoryFileSystem)  # invisible to other ranks

    def __str__(self) -> str:
        return self._location

    @property
    def name(self) -> str:
        return _last(self._location)

    @property
    def parent(self) -> Storage:
        return Storage(self._location.rpartition("/")[0], self.moved)

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link to a folder elsewhere."""
        return self.local and os.path.islink(self._root)

    def at(self, name: str) -> Storage:
        """Return a subfolder."""
        return Storage(f"{self._location}/{name}", self.moved)

    def names(self) -> list[str]:
        """Return the sorted names of files and folders in it; [] if it does not exist."""
        try:
            paths = self._retry("", lambda: self._fs.ls(self._root, detail=False))
        except FileNotFoundError:
            return []
        return sorted({*map(_last, paths)} - {"", self.name})

    def exists(self, name: str) -> bool:
        """Return whether anything has that name."""
        try:
            self.size(name)
        except NotRegularFile:
            return True
        except FileNotFoundError:
            return False
        return True

    def size(self, name: str) -> int:
        """Return a file's size in bytes."""

        def size() -> int:
            info = self._fs.info(self._path(name))
            if info["type"] != "file":
                raise NotRegularFile(errno.EINVAL, "is not a regular file", self._path(name))
            return info["size"]

        return self._retry(name, size)

    def allocated(self, name: str) -> int:
        """Return the bytes that a file takes up: of a sparse one fewer than its size."""
        return os.stat(self._path(name)).st_blocks * 512 if self.local else self.size(name)

    def sizes(self) -> dict[str, int | None]:
        """Return the size of each entry, None if it is not a regular file; {} if the folder does
        not exist.

        One listing for any number of files: a request per file can take a minute on S3.
        """
        try:
            entries = self._retry("", lambda: self._fs.ls(self._root, detail=True))
        except FileNotFoundError:
            return {}
        return {
            _last(info["name"]): info["size"] if info["type"] == "file" else None
            for info in entries
        }

    def modified(self, name: str) -> datetime | None:
        """Return the time of the last write, in UTC; None if the file system has none."""
        try:
            return self._fs.modified(self._path(name))
        except (NotImplementedError, OSError):
            return None

    def create(self, name: str) -> IO[bytes]:
        """Open a file for writing; durable only once closed and, on a local file system, synced."""
        return self._fs.open(self._path(name), "wb")

    def read(self, name: str, most: int = MOST_BYTES) -> bytes:
        """Read a small text file. Raises NotSmallText if it has more than `most` bytes, or a zero
        among them, as a sparse file has."""

        def read() -> bytes:
            data = bytearray()
            with self._open(name) as file:
                while part := file.read(_PART):
                    data += part
                    self.moved.count += 1
                    if len(data) > most:
                        raise NotSmallText(f"has more than {most:,} bytes")
                    if b"\0" in part:
                        raise NotSmallText("has bytes that no text has")
            return bytes(data)

        return self._retry(name, read)

    @contextlib.contextmanager
    def reader(self, name: str) -> Iterator[ReadInto]:
        """Yield a function (offset, buffer) that fills the buffer from the file, reopening it after
        an error, and returns the number of bytes read."""
        opened: list[Any] = []

        def read_into(begin: int, buffer: Any) -> int:
            def attempt() -> int:
                try:
                    if not opened:
                        opened.append(self._open(name))
                    opened[0].seek(begin)
                    return opened[0].readinto(buffer)
                except Exception:
                    while opened:
                        opened.pop().close()
                    raise

            size = self._retry(name, attempt)
            self.moved.count += 1
            return size

        try:
            yield read_into
        finally:
            for file in opened:
                file.close()

    def _open(self, name: str) -> IO[bytes]:
        return (open_regular if self.local else self._fs.open)(self._path(name))

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
                sync_to_disk(handle)
            finally:
                os.close(handle)

    def remove(self, name: str) -> None:
        """Remove a file, or whatever has its name, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            try:
                self.size(name)
            except NotRegularFile:
                self._fs.rm(self._path(name), recursive=True)
            else:
                self._fs.rm_file(self._path(name))
            self.sync()

    def remove_all(self) -> None:
        """Remove the folder and everything in it, even if another process writes there."""
        if self.is_link:
            os.unlink(self._root)
        for pause in (*_PAUSES, None):
            self._fs.invalidate_cache()
            try:
                if self._fs.exists(self._root):
                    self._fs.rm(self._root, recursive=True)
                return
            except OSError as error:
                changed = isinstance(error, FileNotFoundError) or error.errno in _CHANGED
                if pause is None or not changed:
                    raise
            time.sleep(pause)

    def free(self) -> int | None:
        """Return the free bytes; None if unknown."""
        with contextlib.suppress(OSError):
            stats = os.statvfs(self._root) if self.local else None
            return stats and stats.f_bavail * stats.f_frsize
        return None

    def check_writable(self) -> None:
        """Write and remove a file; creates no local folder. Raises what the file system raises."""
        if self.local:
            return check_writable(Path(self._root))
        self._fs.makedirs(self._root, exist_ok=True)
        probe = f".writable-{os.getpid()}"
        self._fs.pipe_file(self._path(probe), b"titanlike")
        self._fs.rm_file(self._path(probe))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _retry(self, name: str, read: Callable[[], _Result]) -> _Result:
        """Read, repeating after errors. name: of the file, for the error."""
        errors: type[Exception] = OSError if self.local else Exception
        for pause in (*_PAUSES, None):
            self._fs.invalidate_cache()  # other processes write here, too
            try:
                return read()
            except (FileNotFoundError, NotRegularFile, NotSmallText):
                raise
            except NotADirectoryError as error:
                raise FileNotFoundError(*error.args) from None
            except errors as error:
                if getattr(error, "errno", None) == errno.ELOOP:
                    raise NotRegularFile(errno.ELOOP, "is not a regular file", name) from None
                if pause is None:
                    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                    text = f"{self}/{name}".rstrip("/")
                    raise UnreadableFile(f"{text} cannot be read now: {reason}") from error
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
