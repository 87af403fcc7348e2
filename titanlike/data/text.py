"""Text (`data=text`): documents tokenized once into a cache, then packed into sequences.

A document is a text file, a line of a JSONL file, or a row of a Parquet, Arrow or ORC file. Without
a path the corpus is the source files of Python's standard library, which every machine has. Files
are sorted, so that the order of documents depends on the files alone.

1. The key of a cache entry is a hash of the files, the tokenizer, the text's key, the validation
   fraction and FORMAT. A complete entry is reused.
2. Each document is written as its boundary token and its ids to train.bin or validation.bin
   (little-endian uint16 or uint32). Its number decides which of the two.
3. An empty part receives the other part's last document, or the end of the only one.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np

from titanlike.config.errors import Problem, as_override
from titanlike.config.files import open_regular, read_object
from titanlike.config.schema import ChatData, Config, HFData, MixtureData, StreamData, TextData
from titanlike.data.folder_splits import saved_files, split_names
from titanlike.data.kinds import DataError, Vocabulary, missing_package
from titanlike.data.order import is_for_validation
from titanlike.data.token_files import TokenFile
from titanlike.data.token_formats import check_is_text
from titanlike.data.tokenizer import Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from titanlike.data.sources import Data

# Suffixes read from a folder; a path to a single file may have any suffix.
TABLES = (".parquet", ".arrow", ".orc")
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

FORMAT = 2  # part of the cache key: increment when the file format changes
PARTS = ("train", "validation")
_LARGEST = 1 << 26  # bytes that a record may always have
_UNPACKED = 50  # bytes of a record per byte of its file
_AT_ONCE = 8  # rows of a table that are in memory as texts
_MAX_UNUSED = 4  # model's vocabulary / tokenizer's vocabulary, for data.path=null

_T = TypeVar("_T")


def open_data(data: TextData, config: Config) -> Data:
    version = platform.python_version()
    what = data.path or f"the sources of Python {version}'s standard library"
    return open_texts(data, config, what, identity(data), texts(data))


def open_texts(
    data: TextData | HFData, config: Config, what: str, source: list[Any], documents: Iterable[str]
) -> Data:
    """Open documents as data, from the cache or tokenized now. source: what they depend on, as
    JSON."""
    from titanlike.data.packed import packed_data  # imports torch

    tokenizer = open_tokenizer(data.tokenizer)
    corpus = tokenize_corpus(data, tokenizer, source, documents)
    parts = {
        part: [TokenFile(corpus.path(part), corpus.dtype, 0, corpus.tokens[part])] for part in PARTS
    }
    what += f" in {data.tokenizer}"
    return packed_data(config, parts, tokenizer.vocab_size, tokenizer.boundary, tokenizer, what)


def vocabulary(data: TextData | HFData | ChatData | StreamData) -> Vocabulary:
    tokenizer = open_tokenizer(data.tokenizer)
    return Vocabulary(tokenizer.vocab_size, data.tokenizer, tokenizer.boundary)


def check_tokenizer(data: TextData | HFData | ChatData | MixtureData, config: Config) -> None:
    open_tokenizer(data.tokenizer)


_TRIED = 64  # files whose first record is read before a launch


def check_first_records(files: list[Path], text_key: str) -> None:
    """Raise DataError if the first text of a file of records cannot be read."""
    of_records = [file for file in files if kind_of_file(file) in (".jsonl", *TABLES)]
    for file in of_records[:_TRIED]:
        next(documents([file], text_key), None)


def _check_files(data: TextData, config: Config) -> None:
    check_first_records(find_files(data.path), data.text_key)


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


CHECKS = (check_tokenizer, _check_files, check_stand_in)


# --- files --------------------------------------------------------------------------------------


def find_files(path: str | None) -> list[Path]:
    """Return the files of `data.path` (None: the standard library's), absolute and sorted.

    Raises DataError if there is none.
    """
    if path is None:
        return files_under(Path(sysconfig.get_paths()["stdlib"]), {".py"}, skipped=SKIPPED)
    root = Path(path).expanduser().resolve()
    if files := corpus_files(root, SUFFIXES):
        return files
    advice = " with text, JSONL or Parquet, or data.path=null for Python's own sources"
    raise no_files("data.path", path, root, SUFFIXES, advice)


def corpus_files(root: Path, suffixes: Collection[str]) -> list[Path]:
    """Return the files of a corpus, compressed ones included; of a save_to_disk folder its tables,
    of several splits those of train. Raises DataError."""
    check_is_text(root)
    if (splits := split_names(root)) is not None:
        if "train" not in splits:
            reason = f"is a data set of the splits {', '.join(splits)}, and none is train"
            fix = as_override("data.path", str(root.joinpath(*splits[:1])))
            raise DataError("data.path", root, reason, fix)
        root = root / "train"
    saved = (root / "state.json").is_file() and (root / "dataset_info.json").is_file()
    return saved_files(root) if saved else files_under(root, suffixes, compressed=True)


def files_under(
    root: Path,
    suffixes: Collection[str],
    *,
    compressed: bool = False,
    skipped: Collection[str] = (),
) -> list[Path]:
    """Return the file, or a folder's files with one of the suffixes, sorted.

    Hidden files and folders, and links to folders, are skipped. compressed: a.jsonl.gz counts as
    .jsonl. Raises DataError for a FIFO or device among them.
    """
    if root.is_file():
        return [root]
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped and not f.startswith(".")]
        visible = (Path(folder, name) for name in names if not name.startswith("."))
        files += [
            f for f in visible if (kind_of_file(f) if compressed else f.suffix.lower()) in suffixes
        ]
    if odd := next((file for file in files if file.exists() and not file.is_file()), None):
        raise DataError("data.path", odd, "is not a regular file", "remove it from the folder")
    return sorted(files)


def no_files(
    key: str, path: object, root: Path, suffixes: Collection[str], advice: str = ""
) -> DataError:
    """Return the error for a path without files. advice: added if the path does not exist."""
    if not root.is_dir():
        reason = f"there is no such file or folder (from {os.getcwd()})"
        return DataError(key, path, reason, f"give the path of a file or folder{advice}")
    fix = f"give a file, or a folder with files that end in {' '.join(sorted(suffixes))}"
    return DataError(key, path, f"no file to read in {root}", fix)


def file_states(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return (path, size, mtime) of each file, which change when files do. Raises DataError."""
    try:
        return [(str(f), (s := f.stat()).st_size, s.st_mtime_ns) for f in files]
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise DataError("data.path", error.filename, reason, "fix or delete it") from None


def identity(data: TextData) -> list[Any]:
    """Return, as JSON, everything that the texts depend on: the key of their cache entry."""
    return file_states(find_files(data.path))


def texts(data: TextData) -> Iterator[str]:
    """Yield the texts of all files, in order, without empty and null ones.

    Raises DataError with file and line for unreadable data.
    """
    yield from documents(find_files(data.path), data.text_key)


def documents(files: Iterable[Path], text_key: str) -> Iterator[str]:
    for file in files:
        for record in records(file, text_key):
            if isinstance(record, str):
                yield record
                continue
            raise record.error(file, f"line {record.number}" * bool(record.number), text_key)


# --- records ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BadRecord:
    """An unreadable record. number: from 1; 0 = the rest of the file."""

    number: int
    reason: str
    misses_text: bool = False  # there is no text under `text_key`
    fix: str = ""

    def error(self, file: Path | str, line: str, text_key: str) -> DataError:
        """Return the error. line: the record's place in words; "" = the rest of the file."""
        if self.misses_text:
            reason = f"{line + ' of ' * bool(line)}{file} {self.reason}"
            fix = self.fix or "name the field, or the column, that holds the text"
            return DataError("data.text_key", text_key, reason, fix)
        fix = "give UTF-8 text that can be read, or remove the file from the folder"
        fix = "fix or delete that line; each must be one JSON object" if line else fix
        return DataError("data.path", file, f"{line} {self.reason}".strip(), fix)


def records(path: Path, text_key: str) -> Iterator[str | BadRecord]:
    """Yield the texts of a file, without empty and null ones, and a BadRecord for each unreadable
    one.

    text_key: the field (JSONL) or column (Parquet) of the text. Raises DataError for a missing
    package.
    """
    try:
        if kind_of_file(path) in (*TABLES, ".jsonl"):
            rows = rows_of(path, text_key)
        else:
            text = _whole(path)
            json_rows = _json_rows(text) if kind_of_file(path) == ".json" else []
            if not json_rows or text_key not in json_rows[0]:
                yield from filter(None, [text])
                return
            rows = enumerate(json_rows, 1)
        for number, row in rows:
            record = row if isinstance(row, BadRecord) else _text_of(row, number, text_key)
            if record:
                yield record
    except DataError:
        raise
    except UnicodeDecodeError as error:
        yield BadRecord(0, f"is not UTF-8 text (byte {error.start})")
    except Exception as error:
        yield BadRecord(0, read_failure(error))


def rows_of(path: Path, key: str | None = None) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, row or BadRecord) of a JSONL file, a JSON array or a table. key: the
    only column to read, if the table has it."""
    kind = kind_of_file(path)
    if kind in TABLES:
        names, batches = _table(path)
        columns = [one for one in (key, str(key).partition(".")[0]) if one in names][:1]
        pieces = (
            batch.slice(start, _AT_ONCE).to_pylist()
            for batch in batches(columns or names)
            for start in range(0, len(batch), _AT_ONCE)
        )
        yield from enumerate(chain.from_iterable(pieces), 1)
        return
    if kind == ".json" and (rows := _json_rows(_whole(path))):
        yield from enumerate(rows, 1)
        return
    with opened(path) as file:
        lines = iter(partial(file.readline, (most := _largest(path)) + 1), b"")
        for number, line in enumerate(lines, 1):
            if len(line) > most:
                raise ValueError(f"line {number} is longer than {most >> 20} MiB")
            if line.strip():
                yield number, _json_of(line, number)


def _whole(path: Path) -> str:
    with opened(path) as file:
        data = file.read((most := _largest(path)) + 1)
    if len(data) > most:
        raise ValueError(f"unpacks to more than {most >> 20} MiB")
    return data.decode("utf-8-sig")


def _largest(path: Path) -> int:
    """Return how many bytes a record of a file may have: all of them, or a multiple of a compressed
    file's, which a real text's compression does not reach."""
    return max(_LARGEST, path.stat().st_size * _UNPACKED)


def read_failure(error: Exception) -> str:
    """Return why a file cannot be read; zstandard and pyarrow have exceptions of their own."""
    plain = isinstance(error, (OSError, EOFError, zlib.error))  # BadGzipFile is an OSError
    reason = getattr(error, "strerror", None) or error
    return f"cannot be read to its end ({reason if plain else f'{type(error).__name__}: {error}'})"


def jsonl_text(line: bytes, number: int, text_key: str) -> str | BadRecord | None:
    row = _json_of(line, number)
    return row if isinstance(row, BadRecord) else _text_of(row, number, text_key)


def _json_of(line: bytes, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRecord(number, f"is not JSON ({error})")


def _text_of(row: Any, number: int, text_key: str) -> str | BadRecord | None:
    if not isinstance(row, dict):
        return BadRecord(number, "is not an object", True)
    values, fields = field_of(row, text_key), dict(_fields(row))
    if values and isinstance(values[0], str | None):
        # JSON can contain a lone surrogate, which is not a character: it becomes "?"
        return values[0] and values[0].encode(errors="replace").decode()
    fixes = [
        as_override("data.text_key", n) for n, value in fields.items() if isinstance(value, str)
    ]
    fixes += [f"data=hf data.ids_key={n}" for n, value in fields.items() if is_ids(value)]
    reason = f"has no field {text_key} (its fields are {', '.join(fields)})"
    if values:
        reason = f"holds {type(values[0]).__name__} in {text_key}, not text"
    return BadRecord(number, reason, True, *fixes[:1])


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def field_of(row: dict[str, Any], key: str) -> tuple[Any] | None:
    """Return the value of a field, or of a nested one by its path (`meta.text`), as a tuple; None =
    missing."""
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
    """Return the objects of a .json file that is an array or has one per line; [] = it is one
    document."""
    with suppress(ValueError, RecursionError):
        start = text.lstrip()[:1]
        lines = text.splitlines() if start == "{" else ()
        rows = json.loads(text) if start == "[" else [json.loads(x) for x in lines if x.strip()]
        return rows if rows and all(isinstance(row, dict) for row in rows) else []
    return []


def _table(path: Path) -> tuple[list[str], Callable[[list[str]], Iterator[Any]]]:
    """Return the columns of a Parquet, Arrow or ORC file, and a function that reads some as record
    batches."""
    try:
        from pyarrow import ArrowException, ipc, memory_map, orc, parquet
    except ImportError:
        raise missing_package("data.path", path, "pyarrow", "text") from None
    try:
        with open_regular(path) as file:
            magic = file.read(6)
        table: Any
        if magic[:3] == b"ORC":
            table = orc.ORCFile(path)
            return table.schema.names, lambda names: (
                table.read_stripe(i, names) for i in range(table.nstripes)
            )
        if magic[:4] == b"PAR1" or path.suffix == ".parquet":
            schema = parquet.read_schema(path)
            names, texts = schema.names, [f.name for f in schema if str(f.type) == "string"]
            # a repeated text is there once, until its row is read
            table = parquet.ParquetFile(path, read_dictionary=texts)
            groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
            if max((group.total_byte_size for group in groups), default=0) > _largest(path):
                raise ValueError(f"a row group unpacks to more than {_largest(path) >> 20} MiB")
            return names, lambda names: table.iter_batches(1024, columns=names)
        source = memory_map(str(path))
        if magic == b"ARROW1":
            table = ipc.open_file(source)
            every = (table.get_batch(i) for i in range(table.num_record_batches))
        else:  # Arrow's streaming format, which save_to_disk writes
            table = every = ipc.open_stream(source)
        return table.schema.names, lambda names: (batch.select(names) for batch in every)
    except (ArrowException, OSError, ValueError) as error:
        kind = path.suffix[1:].capitalize()
        reason = f"is not a {kind} file that can be read ({' '.join(str(error).split())[:200]})"
        raise DataError("data.path", path, reason, f"give a complete {kind} file") from None


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
    """Open a file, decompressing it. Raises DataError for a missing package, ValueError for a
    sparse file."""
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


# --- the cache ----------------------------------------------------------------------------------


def cached(
    cache: str | None, name: str, read: Callable[[Path], _T | None], write: Callable[[Path], object]
) -> _T:
    """Return what `read` returns for an entry's folder in `data.cache`, after `write` has filled it
    if needed.

    An entry is written under a temporary name and renamed, so that concurrent processes never read
    an incomplete one. Raises DataError if the cache cannot be written.
    """
    root = Path(cache or "~/.cache/titanlike").expanduser().resolve()
    folder = root / name
    if (entry := read(folder)) is not None:
        return entry
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=root) as parent:
            unfinished = Path(parent, "entry")
            unfinished.mkdir()
            write(unfinished)
            try:
                os.rename(unfinished, folder)
            except OSError:  # the folder exists
                if read(folder) is None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.rename(unfinished, folder)
    except OSError as error:
        reason = f"the folder cannot be written ({error.strerror or error})"
        fix = "give a writable folder with 2 to 4 bytes of space per token: "
        raise DataError("data.cache", root, reason, fix + "data.cache=/tmp/titanlike") from None
    entry = read(folder)
    assert entry is not None, f"{folder} was just written"
    return entry


def cache_key(content: list[Any]) -> str:
    """Hash JSON; the order of an object's keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


@dataclass
class TokenizedCorpus:
    """A cache entry: `folder`/train.bin, validation.bin, meta.json (the other fields)."""

    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    boundary: int  # id of the token that begins each document
    tokens: dict[str, int]  # part -> number of tokens, boundaries included
    documents: dict[str, int]  # part -> number of documents
    folder: Path = Path()

    def path(self, part: str) -> Path:
        return self.folder / f"{part}.bin"


def tokenize_corpus(
    data: TextData | HFData, tokenizer: Tokenizer, source: list[Any], documents: Iterable[str]
) -> TokenizedCorpus:
    """Return the tokenized documents, from the cache or tokenized now. source: see `open_texts`.

    Raises DataError for a corpus without text, and for a cache that cannot be written.
    """
    key = [FORMAT, source, tokenizer.fingerprint, data.text_key, data.validation_fraction]
    return cached(
        data.cache,
        cache_key(key),
        _read_corpus,
        lambda folder: _write_corpus(folder, data, tokenizer, documents),
    )


def _read_corpus(folder: Path) -> TokenizedCorpus | None:
    """Return the entry, or None if it is missing or incomplete (a crash may truncate a file)."""
    try:
        entry = replace(read_object(folder / "meta.json", TokenizedCorpus), folder=folder)
        itemsize = np.dtype(entry.dtype).itemsize
        sizes = [entry.path(part).stat().st_size for part in PARTS]
        return entry if sizes == [entry.tokens[part] * itemsize for part in PARTS] else None
    except (OSError, ValueError, KeyError):
        return None


def _write_corpus(
    folder: Path, data: TextData | HFData, tokenizer: Tokenizer, documents: Iterable[str]
) -> None:
    none = dict.fromkeys(PARTS, 0)
    entry = TokenizedCorpus(
        folder=folder,
        dtype=token_dtype(tokenizer),
        vocab_size=tokenizer.vocab_size,
        boundary=tokenizer.boundary,
        tokens={**none},
        documents={**none},
    )
    last = {**none}  # number of tokens in each part's last document
    with ExitStack() as stack:
        out = {part: stack.enter_context(open(entry.path(part), "wb")) for part in PARTS}
        for number, document in enumerate(separated_documents(tokenizer, documents)):
            is_held = is_for_validation(number, data.validation_fraction)
            part = "validation" if is_held else "train"
            out[part].write(document.data)
            entry.tokens[part] += len(document)
            entry.documents[part] += 1
            last[part] = len(document)
    if not any(entry.documents.values()):
        raise DataError("data.path", data.path, "it contains no text", "give files with some text")
    for empty, full in (PARTS, PARTS[::-1]):
        if entry.documents[empty] == 0 and data.validation_fraction:
            _move_last(entry, empty, full, last[full], data.validation_fraction)
    meta = {name: value for name, value in asdict(entry).items() if name != "folder"}
    (folder / "meta.json").write_text(json.dumps(meta))


def token_dtype(tokenizer: Tokenizer) -> Literal["uint16", "uint32"]:
    """Return the dtype in which ids are written."""
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"


def separated_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield each document's ids after its boundary token, as written to files."""
    dtype = np.dtype(token_dtype(tokenizer)).newbyteorder("<")
    for ids in tokenizer.encode_many(texts):
        document = np.empty(len(ids) + 1, dtype)
        document[0] = tokenizer.boundary
        document[1:] = ids
        yield document


def _move_last(entry: TokenizedCorpus, empty: str, full: str, last: int, fraction: float) -> None:
    """Move the last document of part `full` to the empty part; if it is the only one, split it."""
    tokens = np.fromfile(entry.path(full), np.dtype(entry.dtype).newbyteorder("<"))
    if entry.documents[full] > 1:
        rest, moved = tokens[:-last], tokens[-last:]
        entry.documents[full] -= 1
    else:
        cut = len(tokens) - max(1, round((len(tokens) - 1) * fraction))
        parts = {"train": tokens[:cut], "validation": np.append(tokens[:1], tokens[cut:])}
        rest, moved = parts[full], parts[empty]
    entry.documents[empty] = 1
    for part, values in ((full, rest), (empty, moved)):
        values.tofile(entry.path(part))
        entry.tokens[part] = len(values)
