"""The rows of Parquet, Arrow and ORC files, as record batches.

A part of a file is read here only once another process has read it in limited memory and time
(first_read.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from titanlike.core.data.kinds import missing_package
from titanlike.core.launch.environment import python

TABLES = (".parquet", ".arrow", ".feather", ".orc")  # suffixes
_LARGEST = 1 << 26  # bytes that a record, or a batch of them, may always have
_UNPACKED = 50  # bytes of either per byte of its file
_ROWS = 64  # in memory at once
_PROGRAM = Path(__file__).with_name("first_read.py")


def largest(path: Path) -> int:
    """Return how many bytes a record of a file may have: all of them, or a multiple of a compressed
    file's, which a real text's compression does not reach. A batch of records as well."""
    return max(_LARGEST, path.stat().st_size * _UNPACKED)


def read_table(path: Path, key: str | None = None) -> Iterator[Any]:
    """Yield the record batches of a Parquet, Arrow or ORC file. key: the only column to read, if the
    table has it. Raises OSError for a file that cannot be read, or unfolds to more than `largest`;
    DataError without pyarrow."""
    try:
        import pyarrow  # noqa: F401

        from titanlike.formats.first_read import parts_of
    except ImportError:
        raise missing_package("data.path", path, "pyarrow", "text") from None
    parts = parts_of(str(path), _ROWS, key)
    for _ in _first_read([path], _ROWS, key):
        yield from next(parts)


def check_tables(paths: Sequence[Path]) -> None:
    """Raise OSError if a table cannot be read by a library that reads its parts at once."""
    for _ in _first_read(paths, 0, None) if paths else ():
        pass


def _first_read(paths: Sequence[Path], rows: int, key: str | None) -> Iterator[None]:
    """Yield after each part of the files that a process of its own could read. rows: in its memory
    at once, 0 = a whole part. Raises OSError."""
    files = [(str(path), largest(path)) for path in paths]
    job = json.dumps({"rows": rows, "key": key, "files": files}).encode()
    program = [*python(), str(_PROGRAM)]
    # a session of its own: a Ctrl-C is for this process, which may go on to the end of a step
    child = Popen(program, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True)
    with child:
        assert child.stdin is not None and child.stdout is not None
        try:
            with suppress(BrokenPipeError):
                child.stdin.write(job)
                child.stdin.close()
            for path in paths:
                while (said := child.stdout.read(1)) == b".":
                    yield
                if said != b"/":
                    why = (said + child.stdout.read()).decode()
                    most = f"is damaged, or unpacks to more than {largest(path) >> 20} MiB"
                    raise OSError(f"{path.name}: {why}" if why else f"{path.name} {most}")
        finally:
            child.kill()
