"""Find text files under a path, and read them document by document.

A document is a text file, a line of a JSONL file, or a row of a Parquet file. Without a path the
corpus is the source files of Python's standard library, which every machine has. Files are sorted,
so that the order of documents depends on the files alone.
"""

from __future__ import annotations

import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlike.config.files import open_regular
from titanlike.data.errors import DataError, missing_extra

# Files read from a folder; a path of a single file may have any suffix.
SUFFIXES = frozenset(
    (".jsonl", ".parquet", ".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv")
    + (".json", ".yaml", ".yml", ".toml", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu")
    + (".java", ".js", ".ts", ".go", ".rs", ".rb", ".sh", ".sql")
)

# Folders of the standard library that are skipped: installed packages and tests.
SKIPPED = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__")
)


def find_files(path: str | None) -> list[Path]:
    """The files of `data.path` (null: the standard library's), absolute and sorted.

    Hidden files and folders, and links to folders, are skipped. Raises DataError where no file is
    found.
    """
    if path is None:
        root, suffixes, skipped = Path(sysconfig.get_paths()["stdlib"]), {".py"}, SKIPPED
    else:
        root, suffixes, skipped = Path(path).expanduser().resolve(), SUFFIXES, frozenset()
        if root.is_file():
            return [root]
        if not root.is_dir():
            reason = f"there is no such file or folder (from {os.getcwd()})"
            fix = (
                "Give the path of a file or folder with text, JSONL or Parquet, or data.path=null "
            )
            fix += "for the Python standard library's own sources"
            raise DataError("data.path", path, reason, fix)
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped and not f.startswith(".")]
        visible = (Path(folder, name) for name in names if not name.startswith("."))
        files += [file for file in visible if file.suffix.lower() in suffixes]
    if not files:
        fix = f"Give a file, or a folder with files that end in {' '.join(sorted(suffixes))}"
        value = path if path is not None else "null"
        raise DataError("data.path", value, f"no file to read in {root}", fix)
    return sorted(files)


def describe(path: str | None) -> str:
    """`data.path` in words."""
    if path is None:
        return f"the sources of Python {platform.python_version()}'s standard library"
    return str(path)


def documents(files: list[Path], text_key: str) -> Iterator[str]:
    """The texts in `files`, in order, without empty and null ones.

    text_key: the field (JSONL) or column (Parquet) of the text. Raises DataError with file and line
    for what cannot be read.
    """
    readers = {".jsonl": _jsonl, ".parquet": _parquet}
    for file in files:
        try:
            for text in readers.get(file.suffix.lower(), _text)(file, text_key):
                if text:
                    yield text
        except OSError as error:
            reason = f"cannot be read ({error.strerror or error})"
            raise DataError("data.path", file, reason, "Give another") from None
        except UnicodeDecodeError as error:
            reason = f"is not UTF-8 text (byte {error.start})"
            fix = "Convert the file to UTF-8, or remove it from the folder"
            raise DataError("data.path", file, reason, fix) from None


def _text(file: Path, text_key: str) -> Iterator[str]:
    with open_regular(file) as content:
        yield content.read().decode()


def _jsonl(file: Path, text_key: str) -> Iterator[str | None]:
    with open_regular(file) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = f"line {number} is not JSON ({error})"
                fix = "Fix or delete that line; each line must be one JSON object"
                raise DataError("data.path", file, reason, fix) from None
            reason = ""
            if not isinstance(row, dict):
                reason = "has no such field (not an object)"
            elif text_key not in row:
                reason = f"has no such field (its fields are {', '.join(row)})"
            elif not isinstance(row[text_key], str | None):
                reason = f"holds {type(row[text_key]).__name__} there, not text"
            if reason:
                fix = "Name the field that holds the text"
                raise DataError("data.text_key", text_key, f"line {number} of {file} {reason}", fix)
            # JSON can contain half a surrogate pair, which is not a character: it becomes "?".
            yield row[text_key] and row[text_key].encode(errors="replace").decode()


def _parquet(file: Path, text_key: str) -> Iterator[str | None]:
    with parquet_file(file) as table:
        columns = {column.name: column.type for column in table.schema_arrow}
        if text_key not in columns:
            fix = f"Name one of its columns: {', '.join(columns)}"
            raise DataError("data.text_key", text_key, f"{file} has no such column", fix)
        if "string" not in str(columns[text_key]):
            reason = f"the column holds {columns[text_key]} in {file}, not text"
            fix = f"Name a text column; there are {', '.join(columns)}"
            raise DataError("data.text_key", text_key, reason, fix)
        for batch in table.iter_batches(batch_size=1024, columns=[text_key]):
            yield from batch.column(0).to_pylist()


def parquet_file(file: Path) -> Any:
    """The opened pyarrow.parquet.ParquetFile."""
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise missing_extra("data.path", file, "pyarrow") from None
    try:
        return parquet.ParquetFile(file)
    except ArrowInvalid as error:
        reason = f"is not a Parquet file ({error})"
        raise DataError("data.path", file, reason, "Give a complete Parquet file") from None
