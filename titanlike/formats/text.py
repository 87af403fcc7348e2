"""Text (`data=text`): documents tokenized once into a cache, then packed into sequences.

A document is a text file, a line of a JSONL file, or a row of a Parquet, Arrow or ORC file. Without
a path the corpus is the source files of Python's standard library, which every machine has. Files
are sorted, so that the order of documents depends on the files alone.

The key of a cache entry is a hash of the files, the tokenizer, the text's key and the validation
fraction. A complete entry is reused; token_folder.py writes and reads it, as what `titanlike
tokenize` writes. A document's number decides whether it is held out.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import platform
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from titanlike.core.config.errors import Problem, as_override
from titanlike.core.config.files import open_regular
from titanlike.core.config.groups.data import ChatData, HFData, MixtureData, StreamData, TextData
from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import DataError, Vocabulary, missing_package
from titanlike.formats.folder_splits import saved_files, split_names
from titanlike.formats.tables import TABLES, largest, read_table
from titanlike.formats.token_folder import cached_corpus, separated_documents, vocabulary_of
from titanlike.formats.token_formats import check_is_text
from titanlike.formats.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from titanlike.core.data.sources import Data

# Suffixes read from a folder; a path to a single file may have any suffix.
SUFFIXES = frozenset(
    (*TABLES, ".jsonl", ".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv")
    + (".json", ".yaml", ".yml", ".toml", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu")
    + (".java", ".js", ".ts", ".go", ".rs", ".rb", ".sh", ".sql")
)
COMPRESSED = (".gz", ".zst")
_GZIP, _ZSTD = b"\x1f\x8b", b"(\xb5/\xfd"  # what such a file begins with

# Skipped folders of the standard library: installed packages and tests.
SKIPPED = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__")
)

_REPAIR = "give UTF-8 text that can be read, or remove the file from the folder"
_NAME_IT = "name the field, or the column, that holds the text"
_MAX_UNUSED = 4  # model's vocabulary / tokenizer's vocabulary, for data.path=null

_T = TypeVar("_T")


def open_data(data: TextData, config: Config) -> Data:
    version, files = platform.python_version(), find_files(data.path)
    what = data.path or f"the sources of Python {version}'s standard library"
    texts = documents(files, data.text_key)
    return open_texts(data, config, what, file_states(files), texts)


def open_texts(
    data: TextData | HFData, config: Config, what: str, source: list[Any], texts: Iterable[str]
) -> Data:
    """Open texts as data, from the cache or tokenized now. source: what they depend on, as JSON."""
    from titanlike.formats.packed import packed_data  # imports torch

    tokenizer = open_tokenizer(data.tokenizer)
    tokens = cached_corpus(
        data,
        [*source, data.text_key],
        separated_documents(tokenizer, texts),
        vocabulary_of(tokenizer),
        data.validation_fraction,
    )
    return packed_data(config, tokens, tokenizer, f"{what} in {data.tokenizer}")


def vocabulary(data: TextData | HFData | ChatData | StreamData) -> Vocabulary:
    tokenizer = open_tokenizer(data.tokenizer)
    return Vocabulary(tokenizer.vocab_size, data.tokenizer, tokenizer.boundary)


def check_tokenizer(data: TextData | HFData | ChatData | MixtureData, config: Config) -> None:
    open_tokenizer(data.tokenizer)


_TRIED = 64  # files whose first record is read before a launch


def check_first_records(path: str | None, text_key: str) -> None:
    """Raise DataError if there is no file, or the first text of a file of records, or of the first
    table, cannot be read."""
    for file in first_files(find_files(path)):
        next(documents([file], text_key), None)


def first_files(files: list[Path]) -> list[Path]:
    """Return the files whose first record is read before a launch."""
    lines = [file for file in files if kind_of_file(file) == ".jsonl"]
    tables = [file for file in files if kind_of_file(file) in TABLES]  # a process each
    return [*lines[:_TRIED], *tables[:1]]


def check_stand_in(data: TextData | StreamData, config: Config) -> Iterator[Problem]:
    """Yield an error if a model with a large vocabulary would train on data.path=null, which suits
    small ones."""
    model_size = config.model.args.get("vocab_size")
    if data.path is not None or getattr(data, "sources", None) or not isinstance(model_size, int):
        return
    try:
        size = vocabulary(data).size
    except DataError:  # reported by `check_tokenizer`
        return
    if size is not None and model_size > _MAX_UNUSED * size:
        reason = (
            f"the model has {model_size:,} token ids, and without data.path it would be trained on "
            f"Python's own sources, which have {size}"
        )
        tokens = f"data=tokens data.path=FILE data.vocab_size={model_size}"
        tokens += " data.dtype=uint32" if model_size > 1 << 16 else ""
        synthetic = f"data=synthetic data.vocab_size={model_size}"
        text = "data=text data.path=FOLDER data.tokenizer=TOKENIZER"
        fix = f"{tokens}, or {text}; to try the model's speed, {synthetic}"
        yield Problem("data.path", "null", reason, fix)


CHECKS = (
    check_tokenizer,
    lambda data, _: check_first_records(data.path, data.text_key),
    check_stand_in,
)


# --- files --------------------------------------------------------------------------------------


def find_files(
    path: str | None, suffixes: Collection[str] = SUFFIXES, key: str = "data.path"
) -> list[Path]:
    """Return the files of a corpus (None: the standard library's), absolute and sorted, compressed
    ones included; of a save_to_disk folder its tables, of several splits those of train.

    Raises DataError if there is none.
    """
    if path is None:
        return files_under(Path(sysconfig.get_paths()["stdlib"]), {".py"}, SKIPPED)
    root = Path(path).expanduser().resolve()
    check_is_text(root)
    if (splits := split_names(root)) is not None:
        if "train" not in splits:
            reason = f"is a data set of the splits {', '.join(splits)}, and none is train"
            fix = as_override("data.path", str(root.joinpath(*splits[:1])))
            raise DataError("data.path", root, reason, fix)
        root = root / "train"
    saved = (root / "state.json").is_file() and (root / "dataset_info.json").is_file()
    if files := saved_files(root) if saved else files_under(root, suffixes):
        return files
    if root.is_dir():
        fix = f"give a file, or a folder with files that end in {' '.join(sorted(suffixes))}"
        raise DataError(key, path, f"no file to read in {root}", fix)
    fix = "give the path of a file or folder"
    if (suffixes, key) == (SUFFIXES, "data.path"):
        fix += " with text, JSONL or Parquet, or data.path=null for Python's own sources"
    raise DataError(key, path, f"there is no such file or folder (from {os.getcwd()})", fix)


def files_under(root: Path, suffixes: Collection[str], skipped: Collection[str] = ()) -> list[Path]:
    """Return the file, or a folder's files with one of the suffixes, sorted; a.jsonl.gz counts as
    .jsonl. skipped: names of folders.

    Hidden files and folders, and links to folders, are skipped. Raises DataError for a FIFO or
    device among them.
    """
    if root.is_file():
        return [root]
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped and not f.startswith(".")]
        visible = (Path(folder, name) for name in names if not name.startswith("."))
        files += [file for file in visible if kind_of_file(file) in suffixes]
    if odd := next((file for file in files if file.exists() and not file.is_file()), None):
        raise DataError("data.path", odd, "is not a regular file", "remove it from the folder")
    return sorted(files)


def file_states(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return (path, size, mtime) of each file, which change when files do. Raises DataError."""
    try:
        return [(str(f), (s := f.stat()).st_size, s.st_mtime_ns) for f in files]
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise DataError("data.path", error.filename, reason, "fix or delete it") from None


# --- records ------------------------------------------------------------------------------------


class BadRow(ValueError):
    """A row of a file that cannot be used. fix: "" = the row itself must be corrected; key, value:
    of the data's section, if it is to be changed there."""

    fix = "fix or delete that line"

    def __init__(self, reason: str, fix: str = "", key: str = "", value: object = "") -> None:
        super().__init__(reason)
        self.fix, self.key, self.value = fix or self.fix, key, value

    def of(self, path: object, place: str) -> DataError:
        """Return the error of a file. place: the row's, in words; "" = the rest of the file."""
        if self.key:
            return DataError(self.key, self.value, f"{place} of {path} {self}", self.fix)
        return DataError("data.path", path, f"{place}: {self}" if place else str(self), self.fix)


Skip = Callable[[Path, int, str], object]  # of a file, a record's number or 0, and the reason


def documents(files: Iterable[Path], text_key: str, skip: Skip | None = None) -> Iterator[str]:
    """Yield the texts of files, in order, without empty and null ones.

    text_key: the field (JSONL) or column (Parquet) of the text; skip: see `records`.
    """
    convert = partial(text_of, text_key=text_key)
    for file in files:
        yield from filter(None, records(file, _rows_or_text(file, text_key), convert, skip))


def records(
    path: Path,
    rows: Iterator[tuple[int, Any]],
    convert: Callable[[Any], _T],
    skip: Skip | None = None,
) -> Iterator[_T]:
    """Yield `convert(row)` of each row of a file, which raises BadRow for one that is unusable.

    skip: called for a record that cannot be read, number from 1, 0 = the rest of the file; None =
    raise a DataError with file and line. Raises DataError also for a missing package.
    """

    def refuse(number: int, error: BadRow) -> None:
        if skip is None:
            raise error.of(path, f"line {number}" * bool(number)) from None
        skip(path, number, str(error))

    try:
        for number, row in rows:
            try:
                value = convert(parsed(row))
            except BadRow as error:
                refuse(number, error)
            else:
                yield value
    except DataError:
        raise
    except UnicodeDecodeError as error:
        refuse(0, BadRow(f"is not UTF-8 text (byte {error.start})", _REPAIR))
    except Exception as error:  # zstandard and pyarrow have exceptions of their own
        plain = isinstance(error, (OSError, EOFError, zlib.error))  # BadGzipFile is an OSError
        reason = getattr(error, "strerror", None) or error
        reason = reason if plain else f"{type(error).__name__}: {error}"
        refuse(0, BadRow(f"cannot be read to its end ({reason})", _REPAIR))


def _rows_or_text(path: Path, text_key: str) -> Iterator[tuple[int, Any]]:
    """Yield a file's rows, or (0, all of its text) if it has none with the key."""
    kind = kind_of_file(path)
    if kind in (*TABLES, ".jsonl"):
        yield from rows_of(path, text_key)
        return
    text = _whole(path)
    rows = _json_rows(text) if kind == ".json" else []
    named = any(field_of(row, text_key) is not None for row in rows)
    yield from enumerate(rows, 1) if named else [(0, text)]


def rows_of(path: Path, key: str | None = None) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, row) of a JSONL file (lines as bytes), a JSON array or a table. key: the
    only column to read, if the table has it."""
    kind = kind_of_file(path)
    if kind in TABLES:
        batches = (batch.to_pylist() for batch in read_table(path, key))
        yield from enumerate(chain.from_iterable(batches), 1)
        return
    if kind == ".json" and (rows := _json_rows(_whole(path))):
        yield from enumerate(rows, 1)
        return
    with opened(path) as file:
        lines = iter(partial(file.readline, (most := largest(path)) + 1), b"")
        for number, line in enumerate(lines, 1):
            if len(line) > most:
                raise ValueError(f"line {number} is longer than {most >> 20} MiB")
            if line.strip():
                yield number, line


def _whole(path: Path) -> str:
    with opened(path) as file:
        data = file.read((most := largest(path)) + 1)
    if len(data) > most:
        raise ValueError(f"unpacks to more than {most >> 20} MiB")
    return data.decode("utf-8-sig")


def parsed(row: Any) -> Any:
    """Return the content of a line of JSON; any other row unchanged. Raises BadRow."""
    if not isinstance(row, bytes):
        return row
    try:
        return json.loads(row)
    except (ValueError, RecursionError) as error:
        fix = "fix or delete that line; each must be one JSON object"
        raise BadRow(f"is not JSON ({error})", fix) from None


def text_of(row: Any, text_key: str) -> str | None:
    """Return a row's text. Raises BadRow."""
    if isinstance(row, str):
        return row
    if not isinstance(row, dict):
        raise BadRow("is not an object", _NAME_IT, "data.text_key", text_key)
    values, fields = field_of(row, text_key), dict(_fields(row))
    if values and isinstance(values[0], str | None):
        # JSON can contain a lone surrogate, which is not a character: it becomes "?"
        return values[0] and values[0].encode(errors="replace").decode()
    texts = [name for name, value in fields.items() if isinstance(value, str)]
    fixes = [as_override("data.text_key", name) for name in texts]
    fixes += [f"data=hf data.ids_key={n}" for n, value in fields.items() if is_ids(value)]
    reason = f"has no field {text_key} (its fields are {', '.join(fields)})"
    if values:
        reason = f"holds {type(values[0]).__name__} in {text_key}, not text"
    raise BadRow(reason, [*fixes, _NAME_IT][0], "data.text_key", text_key)


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def field_of(row: dict[str, Any], key: str) -> tuple[Any] | None:
    """Return the value of a field, or nested one (`meta.text`), as a tuple; None = missing."""
    if key in row:
        return (row[key],)
    first, _, rest = key.partition(".")
    if isinstance(within := row.get(first), dict) and rest:
        return field_of(within, rest)
    return (None,) if rest and first in row and within is None else None


def _fields(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        inner = value.items() if isinstance(value, dict) else ()
        yield from [(f"{name}.{one}", its) for one, its in inner] or [(name, value)]


def _json_rows(text: str) -> list[Any]:
    """Return the objects of a .json file, an array or one per line; [] = it is one document."""
    with suppress(ValueError, RecursionError):
        start = text.lstrip()[:1]
        lines = text.splitlines() if start == "{" else ()
        rows = json.loads(text) if start == "[" else [json.loads(x) for x in lines if x.strip()]
        return rows if rows and all(isinstance(row, dict) for row in rows) else []
    return []


def kind_of_file(path: Path) -> str:
    """Return the suffix that decides how a file is read: .jsonl for a.jsonl.gz."""
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return inner.suffix.lower()


def is_compressed(path: Path) -> bool:
    """Return whether a file is gzip or zstd, whatever its name says."""
    with open_regular(path) as file:
        return file.read(4).startswith((_GZIP, _ZSTD))


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressing it. Raises DataError without a package, ValueError if sparse."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size and os.lseek(file.fileno(), 0, os.SEEK_HOLE) < size:
            raise ValueError("has holes, which no text has")
        file.seek(0)
        magic = cast(io.BufferedReader, file).peek(4)
        if magic.startswith(_GZIP):
            # a BufferedIOBase, in typeshed not an IO
            yield cast(IO[bytes], gzip.GzipFile(fileobj=file))
        elif magic.startswith(_ZSTD):
            try:
                from zstandard import ZstdDecompressor
            except ImportError:
                raise missing_package("data.path", path, "zstandard", "zstd") from None
            stream = ZstdDecompressor().stream_reader(file, read_across_frames=True)
            yield cast(IO[bytes], io.BufferedReader(stream))
        else:
            yield file
