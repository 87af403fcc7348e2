"""The rows of Parquet, Arrow and ORC files, as record batches.

A file of kilobytes can unfold to gigabytes. So what it unfolds to is found before it does: of
Parquet in its footer, of Arrow in the lengths before its compressed buffers, of ORC in another
process.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from titanlike.core.config.files import open_regular
from titanlike.core.data.kinds import DataError, missing_package

TABLES = (".parquet", ".arrow", ".feather", ".orc")  # suffixes
_LARGEST = 1 << 26  # bytes that a record, or a table, may always have
_UNPACKED = 50  # bytes of either per byte of its file
_ROWS = 1024  # of Parquet in memory at once
_NESTED = 8  # the same, where a repeated text within a list is there each time
_VALUE = 8  # bytes of a value in memory
_SPARE = 1 << 28  # bytes that ORC's library takes by itself

Batches = Callable[[list[str]], Iterator[Any]]


def largest(path: Path) -> int:
    """Return how many bytes a record of a file may have: all of them, or a multiple of a compressed
    file's, which a real text's compression does not reach. A table as well."""
    return max(_LARGEST, path.stat().st_size * _UNPACKED)


def open_table(path: Path) -> tuple[list[str], Batches]:
    """Return the columns of a Parquet, Arrow or ORC file, and a function that reads some as record
    batches. Raises DataError for a file that cannot be read, or unfolds to more than `largest`."""
    try:
        from pyarrow import ArrowException
    except ImportError:
        raise missing_package("data.path", path, "pyarrow", "text") from None
    try:
        with open_regular(path) as file:
            magic = file.read(6)
        most = largest(path)
        if magic[:3] == b"ORC":
            return _orc(path, most)
        if magic[:4] == b"PAR1" or path.suffix == ".parquet":
            return _parquet(path, most)
        return _arrow(path, most, magic == b"ARROW1")
    except (ArrowException, OSError, ValueError, struct.error) as error:
        kind = path.suffix[1:].capitalize()
        reason = f"is not a {kind} file that can be read ({' '.join(str(error).split())[:200]})"
        raise DataError("data.path", path, reason, f"give a complete {kind} file") from None


def _check(unfolded: int, most: int) -> None:
    if unfolded > most:
        raise ValueError(f"it unpacks to more than {most >> 20} MiB")


def _parquet(path: Path, most: int) -> tuple[list[str], Batches]:
    from pyarrow import parquet, types

    schema = parquet.read_schema(path)
    texts = [field.name for field in schema if str(field.type) == "string"]
    rows = _NESTED if any(types.is_nested(field.type) for field in schema) else _ROWS
    # a repeated text is there once, until its row is read
    table = parquet.ParquetFile(path, read_dictionary=texts)
    unfolded = 0
    for group in map(table.metadata.row_group, range(table.metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        in_lists = sum(max(0, column.num_values - group.num_rows) for column in columns)
        unfolded += max(group.total_byte_size, in_lists * _VALUE, group.num_rows)
    _check(unfolded, most)
    return schema.names, lambda names: table.iter_batches(rows, columns=names)


def _arrow(path: Path, most: int, is_file: bool) -> tuple[list[str], Batches]:
    """Read Arrow's file format as the stream that it contains, whose parts have been checked."""
    from pyarrow import ipc, memory_map

    source, begin = memory_map(str(path)), 8 * is_file
    source.seek(begin)
    messages = [(one.type, _unfolded(one)) for one in ipc.MessageReader.open_stream(source)]
    _check(sum(unfolded for _, unfolded in messages), most)
    batches = sum(kind == "record batch" for kind, _ in messages)
    if is_file and ipc.open_file(source).num_record_batches != batches:
        raise ValueError("its footer has other batches than it")
    source.seek(begin)
    table = ipc.open_stream(source)
    return table.schema.names, lambda names: (batch.select(names) for batch in table)


def _unfolded(message: Any) -> int:
    """Return the bytes that a message's buffers unfold to, or its rows if they are more.

    Format: https://github.com/apache/arrow/blob/main/format/Message.fbs, in flatbuffers, which
    Arrow has verified."""
    data, body = memoryview(message.metadata), message.body

    def at(form: str, place: int) -> int:
        return int(struct.unpack_from("<" + form, data, place)[0])

    def field(table: int, number: int) -> int:
        """Return the place of a table's field; 0 = it has its default."""
        places = table - at("i", table)
        within = 4 + 2 * number
        offset = at("H", places + within) if within < at("H", places) else 0
        return table + offset if offset else 0

    def inner(table: int, number: int) -> int:
        place = field(table, number)
        return place + at("I", place) if place else 0

    if message.type not in ("record batch", "dictionary"):
        return 0  # the schema
    batch = inner(at("I", 0), 2)
    batch = batch if message.type == "record batch" else inner(batch, 1)
    rows = at("q", field(batch, 0)) if field(batch, 0) else 0
    buffers, unfolded = inner(batch, 2), 0
    for place in range(buffers + 4, buffers + 4 + 16 * at("I", buffers), 16) if buffers else ():
        offset, size = at("q", place), at("q", place + 8)
        if field(batch, 3) and size >= 8:  # compressed, after its length; -1 = as it is
            size = max(size, struct.unpack_from("<q", body, offset)[0])
        unfolded += max(0, size)
    return max(rows, unfolded)


# Read in a process of its own first: what ORC's library does without memory, and of some damaged
# files, is to crash.
_TRIAL = """
import resource, sys
from pyarrow import orc
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
file = orc.ORCFile(sys.argv[1])
for stripe in range(file.nstripes):
    file.read_stripe(stripe)
"""


def _orc(path: Path, most: int) -> tuple[list[str], Batches]:
    from pyarrow import orc

    trial = [sys.executable, "-I", "-c", _TRIAL, str(path), str(2 * most + _SPARE)]
    if subprocess.run(trial, capture_output=True, check=False).returncode:
        raise ValueError(f"a stripe is damaged, or unpacks to more than {most >> 20} MiB")
    table = orc.ORCFile(path)
    _check(table.nrows, most)
    return table.schema.names, lambda names: (
        table.read_stripe(i, names) for i in range(table.nstripes)
    )
