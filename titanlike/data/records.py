"""Documents of many files, one by one; what cannot be read is told and not raised.

A document is a text file, a line of JSONL, or a row of Parquet; files may be compressed (.gz, .zst).
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from titanlike.data.corpus import SUFFIXES, parquet_file
from titanlike.data.errors import DataError

COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class Bad:
    """A record that cannot be read: its number in the file, from 1; 0 = the rest of the file."""

    record: int
    reason: str


def find_corpus(root: Path) -> list[Path]:
    """The files with text under a folder, sorted; or the file. Hidden ones, and links to folders, are
    skipped. Raises DataError where there is none."""
    if root.is_file():
        return [root]
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible = (Path(folder, name) for name in names if not name.startswith("."))
        found += [path for path in visible if kind_of(path) in SUFFIXES]
    if not found:
        what = "there is no such file or folder" if not root.exists() else "no file to read in it"
        fix = f"Give a file, or a folder with files that end in {' '.join(sorted(SUFFIXES))}"
        raise DataError("CORPUS", root, what, fix)
    return sorted(found)


def kind_of(path: Path) -> str:
    """The suffix that says how a file is read: .jsonl of a.jsonl.gz."""
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return inner.suffix.lower()


def records(path: Path, text_key: str) -> Iterator[str | Bad]:
    """The texts of a file, without empty ones, and what is bad. Raises DataError for a package that is
    missing."""
    kind = kind_of(path)
    try:
        if kind == ".parquet":
            yield from _parquet(path, text_key)
        elif kind == ".jsonl":
            with opened(path) as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip() and (found := _line(line, number, text_key)):
                        yield found
        else:
            with opened(path) as file:
                content = file.read()
            try:
                text = content.decode()
            except UnicodeDecodeError as error:
                yield Bad(0, f"is not UTF-8 text (byte {error.start})")
            else:
                if text:
                    yield text
    except (OSError, EOFError, zlib.error) as error:  # BadGzipFile is an OSError
        yield Bad(0, f"cannot be read to its end ({error})")
    except DataError:
        raise
    except Exception as error:  # zstandard and pyarrow raise errors of their own
        yield Bad(0, f"cannot be read to its end ({type(error).__name__}: {error})")


def _line(line: bytes, number: int, text_key: str) -> str | Bad | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Bad(number, f"is not JSON ({error})")
    if not isinstance(row, dict):
        return Bad(number, "is not an object")
    if text_key not in row:
        return Bad(number, f"has no field {text_key} (its fields are {', '.join(row)})")
    text = row[text_key]
    if not isinstance(text, str | None):
        return Bad(number, f"holds {type(text).__name__} in {text_key}, not text")
    # JSON can contain half a surrogate pair, which is not a character: it becomes "?"
    return text and text.encode(errors="replace").decode()


def _parquet(path: Path, text_key: str) -> Iterator[str | Bad]:
    with parquet_file(path) as table:
        columns = [column.name for column in table.schema_arrow]
        if text_key not in columns:
            yield Bad(0, f"has no column {text_key} (its columns are {', '.join(columns)})")
            return
        number = 0
        for batch in table.iter_batches(batch_size=1024, columns=[text_key]):
            for text in batch.column(0).to_pylist():
                number += 1
                if isinstance(text, str) and text:
                    yield text
                elif text and not isinstance(text, str):
                    yield Bad(number, f"holds {type(text).__name__} in {text_key}, not text")


def opened(path: Path) -> IO[Any]:
    """A file's content, decompressed. Raises DataError for a package that is missing."""
    if path.suffix.lower() == ".gz":
        return cast(IO[Any], gzip.open(path, "rb"))  # a BufferedIOBase, in typeshed not an IO
    if path.suffix.lower() == ".zst":
        try:
            import zstandard
        except ImportError:
            fix = "Install it with: pip install 'titanlike[zstd]'"
            raise DataError("CORPUS", path, "the package zstandard is not installed", fix) from None
        import io

        raw = open(path, "rb")  # noqa: SIM115  # closed with the reader
        reader = zstandard.ZstdDecompressor().stream_reader(
            raw, read_across_frames=True, closefd=True
        )
        return io.BufferedReader(reader)
    return open(path, "rb")  # noqa: SIM115
