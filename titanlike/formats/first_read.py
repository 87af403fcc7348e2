"""`python -P first_read.py < JOB` reads tables part by part, in limited memory and processor time:
one of kilobytes can unfold to gigabytes, whatever its footer and pages say of themselves, and a
damaged one can end the process that reads it. tables.py starts it before it reads itself. JOB:
{"rows": of a batch, 0 = a part at once; "key": the only column to read, if there is one; "files":
[[path, bytes of a batch at most], ...]}. It writes "." for each part that can be read, "/"
after a file, and else why not, or nothing for memory.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pyarrow import compute, ipc, memory_map, orc, parquet, types

SPARE = 1 << 28  # bytes that a library takes by itself
SECONDS = 10  # of the processor, and one more for each MiB of a file
TOTAL = 16  # all batches, in batches as large as one may be
VALUE = 8  # bytes of a value in memory
ROW = 512  # bytes that a row counts as in all: reading ten million of them takes a minute


def parts_of(path: str, rows: int, key: str | None = None) -> Iterator[Iterable[Any]]:
    """Yield the batches of each part: of a row group of Parquet, a stripe of ORC, or a batch of
    Arrow. rows, key: see above."""
    if not os.path.isfile(path):
        raise ValueError("it is no regular file")
    with open(path, "rb") as opened:
        magic = opened.read(6)
    size = rows or sys.maxsize

    def cut(batch: Any) -> Iterator[Any]:
        return (batch.slice(start, size) for start in range(0, len(batch), size))

    def columns(names: list[str]) -> list[str]:
        return [one for one in (key, str(key).partition(".")[0]) if one in names][:1] or names

    file: Any
    if magic[:4] == b"PAR1" or path.endswith(".parquet"):
        file = parquet.ParquetFile(path)
        names = columns(file.schema_arrow.names)
        for group in range(file.num_row_groups):
            most = min(size, max(1, file.metadata.row_group(group).num_rows))
            yield file.iter_batches(most, [group], names, use_threads=False)
    elif magic[:3] == b"ORC":
        file = orc.ORCFile(path)
        names = columns(file.schema.names)
        for number in range(file.nstripes):
            yield cut(file.read_stripe(number, names))
    else:  # Arrow's file format contains a stream
        source, begin = memory_map(path), 8 * (magic == b"ARROW1")
        source.seek(begin)
        file, batches = ipc.open_stream(source), 0
        names = columns(file.schema.names)
        for batch in file:
            batches += 1
            yield cut(batch.select(names))
        if begin and ipc.open_file(source).num_record_batches != batches:
            raise ValueError("its footer has other batches than it")


def size_of(array: Any) -> int:
    """Return the bytes of an array whose values are Python's, at least: a text that is repeated is
    there for each row."""
    if types.is_dictionary(array.type):
        texts = array.dictionary.cast("large_binary")
        return compute.sum(compute.binary_length(texts).take(array.indices)).as_py() or 0
    inner = array.flatten() if types.is_nested(array.type) else []
    inner = inner if isinstance(inner, list) else [inner]
    return max(array.nbytes, VALUE * len(array) + sum(map(size_of, inner)))


def main() -> None:
    """Raises MemoryError if a batch of a file, or all of them, have too many bytes."""
    job = json.load(sys.stdin)
    taken = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    for path, most in job["files"]:
        seconds = SECONDS + (os.stat(path).st_size >> 20) + int(sum(os.times()[:2]))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        limit = taken + 2 * most + SPARE
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        total = 0
        for part in parts_of(path, job["rows"], job["key"]):
            for batch in part:
                size = sum(map(size_of, batch.columns)) if job["rows"] else batch.nbytes
                total += size + ROW * len(batch)
                if size > most or total > TOTAL * most:
                    raise MemoryError
            os.write(1, b".")
        os.write(1, b"/")


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        reason = "" if isinstance(error, MemoryError) else " ".join(str(error).split())
        os.write(1, reason[:200].encode())
