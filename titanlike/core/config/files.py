"""Files that the program writes: strict JSON (NaN is "nan"), regular files, atomic writes."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import stat
import tempfile
import types
import typing
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

Record = TypeVar("Record")
LARGEST = 1 << 63  # upper bound of integers that the program writes
MOST_BYTES = 1 << 26  # of a file that is read whole
MOST_LINE = 1 << 22  # bytes of a line of a JSONL file of a run
_DIGITS = 20  # of an integer
_NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP)  # as systems name it
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dumps(record: dict[str, Any]) -> str:
    """Write a line of strict JSON; floats round-trip to the last bit, NaN and inf are strings."""
    return json.dumps(_finite(record), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def loads(data: str | bytes) -> dict[str, Any]:
    """Parse what `dumps` wrote, as UTF-8. Raises ValueError as `parse_object`."""
    return {
        key: NON_FINITE.get(value, value) if isinstance(value, str) else value
        for key, value in parse_object(data).items()
    }


def parse_object(data: str | bytes) -> dict[str, Any]:
    """Parse a JSON object from an untrusted text.

    Raises ValueError with a reason that can follow a file's name: "is not a JSON object".
    """
    try:
        record = parse_json(data, object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start})") from None
    except RecursionError:
        raise ValueError("is not JSON that this program writes: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError("is not a JSON object")
    return record


def parse_json(data: str | bytes, **options: Any) -> Any:
    """Parse untrusted JSON, in UTF-8. Raises ValueError, RecursionError; for a number of too many
    digits, which could not be shown or computed with, too."""
    text = data.decode() if isinstance(data, bytes) else data  # json takes UTF-16, too
    return json.loads(text, parse_int=_integer, **options)


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def check_depth(value: Any, most: int = 64) -> None:
    """Raise ValueError if a JSON value is nested deeper than objects and lists of this program."""
    if not most:
        raise ValueError("is not JSON that this program writes: nested too deeply")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(item, most - 1)


def leaves(plain: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all that is neither a mapping nor a list in plain data."""
    if isinstance(plain, dict):
        for name, item in plain.items():
            yield from leaves(item, f"{key}.{name}".lstrip("."))
    elif isinstance(plain, list | tuple):
        for index, item in enumerate(plain):
            yield from leaves(item, f"{key}[{index}]")
    else:
        yield key, plain


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a key is there twice")
    return record


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a regular file whole. Raises OSError, and ValueError, without its name, for a device or
    a FIFO, or more than `most` bytes."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            data: bytes = file.read(most + 1) if size <= most else b""
    except NotRegularFile:
        raise ValueError("is not a regular file") from None
    if max(size, len(data)) > most:
        raise ValueError(f"is larger than {most >> 20} MiB")
    return data


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Read a UTF-8 text, as `read_bytes`."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start})") from None


def read_object(path: Path, kind: type[Record] | None = None) -> Any:
    """Apply `loads` to a file; with `kind`, return that dataclass.

    Raises OSError if the file cannot be read, ValueError naming it for any other content.
    """
    try:
        record = loads(read_bytes(path))
        return record if kind is None else as_record(record, kind)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def as_record(record: dict[str, Any], kind: type[Record]) -> Record:
    """Convert a JSON object to a dataclass, ignoring other keys. Raises ValueError."""
    hints = typing.get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in record:
            if not _is_a(record[field.name], hints[field.name]):
                raise ValueError(f"has {repr(record[field.name])[:40]} as {field.name}")
            values[field.name] = record[field.name]
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"has no {field.name}")
    return kind(**values)


def _is_a(value: Any, hint: Any) -> bool:
    """Return whether a JSON value has a type: scalars, `X | None`, lists and dicts of one type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is_a(value, argument) for argument in arguments)
    if origin is list:
        return isinstance(value, list) and all(_is_a(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(i, arguments[1]) for i in value.values())
    if hint is Any or type(value) is hint and hint not in (int, float):
        return True
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, tuple)):
        return isinstance(value, dict if dataclasses.is_dataclass(hint) else list)  # read next
    if origin is Literal:
        return value in arguments
    if hint is float:
        return type(value) is float or (type(value) is int and abs(value) < LARGEST)
    return type(value) is hint and (hint is not int or abs(value) < LARGEST)


class NotRegularFile(OSError):
    """A FIFO, socket, device, folder or loop of links instead of a file."""


def open_regular(path: str | Path, mode: str = "rb", **options: Any) -> IO[Any]:
    """Open a regular file; `open` would block on a FIFO. Raises NotRegularFile."""
    return open(path, mode, opener=regular_fd, **options)


def regular_fd(path: str | Path, flags: int) -> int:
    """Apply `os.open` to a regular file, or for writing to a device. Raises NotRegularFile."""
    try:
        fd = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise NotRegularFile(error.errno, "is not a regular file", str(path)) from None
        raise
    kind, writes = os.fstat(fd).st_mode, flags & os.O_ACCMODE == os.O_WRONLY
    if not (stat.S_ISREG(kind) or (writes and stat.S_ISCHR(kind))):
        os.close(fd)
        raise NotRegularFile(errno.EINVAL, "is not a regular file", str(path))
    return fd


def check_writable(folder: Path) -> None:
    """Raise OSError if a folder can neither be written nor created. Creates nothing."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    tempfile.TemporaryFile(dir=existing).close()


def same_folder(one: str | Path, other: str | Path) -> bool:
    """Return whether two paths are the same existing folder."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def make_new_folder(folder: Path) -> Path:
    """Create a folder that did not exist: FOLDER, else FOLDER-2 and so on."""
    number, failures = 1, 0
    while True:
        new = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            new.parent.mkdir(parents=True, exist_ok=True)
            new.mkdir()
            return new
        except FileExistsError:
            if not new.is_dir():  # there is a file at this path or a parent's
                raise
            number += 1
        except FileNotFoundError:  # another process removed an empty parent
            failures += 1
            if failures > 10:
                raise


def atomic_write_text(path: Path, text: str, sync: bool = True) -> None:
    """`atomic_write_bytes` in UTF-8."""
    atomic_write_bytes(path, text.encode(), sync)


def atomic_write_bytes(path: Path, data: bytes, sync: bool = True) -> None:
    """Write `path` so that readers (`sync`: also after a crash) see the old file or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as temporary, open(temporary, "xb") as file:
        file.write(data)
        file.flush()
        if sync:
            sync_to_disk(file.fileno())


def sync_to_disk(fd: int) -> None:
    """Apply `os.fsync` to an open file or folder, unless its file system has no such operation: of
    folders SMB and several FUSE and 9p mounts have none."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary path; at the end its file is renamed to `path`, or removed after an error."""
    # no file yet: tempfile's would not follow the umask
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
