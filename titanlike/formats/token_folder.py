"""Folders of token files: written by `titanlike tokenize`, and by data=text and data=hf into their
cache; read by all of them.

    index.json         the files below, their dtype, the vocabulary, the token between documents
    tokens-00000.bin   ids, little-endian; each document begins with that token, or, without one,
                       ends where tokens-00000.bin.index says (uint64)
    held-00000.bin     the same, for validation only: of a cache
    tokenizer/         the tokenizer's files, unless it is "bytes": not in a cache
    bad.jsonl          unreadable records, if they were skipped
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import xxhash

from titanlike.core.config.files import as_record, atomic_write_text, read_object
from titanlike.core.config.groups.data import HFData, TextData
from titanlike.core.data.kinds import DataError, Vocabulary
from titanlike.core.data.order import held_out
from titanlike.formats.token_files import TokenFile, TokenSet
from titanlike.formats.token_formats import foreign_index
from titanlike.formats.tokenizer import Tokenizer

INDEX, PLAN = "index.json", "plan.json"
FORMAT = 1
PARTS = ("train", "validation")
_AGAIN = "Run titanlike tokenize again: it goes on where it was"

_T = TypeVar("_T")


@dataclass
class Entry:
    """A token file, as the index has it. held: for validation only."""

    name: str
    tokens: int = 0
    documents: int = 0
    xxh3: str = ""
    held: bool = False


# --- written ------------------------------------------------------------------------------------


def separated_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield each document's ids after its boundary token, as written to files."""
    dtype = np.dtype(token_dtype(tokenizer.vocab_size)).newbyteorder("<")
    for ids in tokenizer.encode_many(texts):
        document = np.empty(len(ids) + 1, dtype)
        document[0] = tokenizer.boundary
        document[1:] = ids
        yield document


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the dtype in which ids are written."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


@contextmanager
def token_writer(
    path: Path, entry: Entry, with_ends: bool = False
) -> Iterator[Callable[[np.ndarray], None]]:
    """Yield a function that appends a document's ids to a file and counts them in its entry; at the
    end the entry has its checksum. with_ends: write where documents end, too."""
    hasher = xxhash.xxh3_128()
    with ExitStack() as stack:
        file = stack.enter_context(open(path, "wb"))
        ends = stack.enter_context(open(ends_of(path), "wb")) if with_ends else None

        def write(document: np.ndarray) -> None:
            file.write(document.data)
            hasher.update(document.data)
            entry.tokens += len(document)
            entry.documents += 1
            if ends is not None:
                ends.write(entry.tokens.to_bytes(8, "little"))

        yield write
    entry.xxh3 = hasher.hexdigest()


def write_index(
    folder: Path, vocabulary: Vocabulary, files: Sequence[Entry], **more: Any
) -> dict[str, Any]:
    """Write and return the index. vocabulary: its tokenizer is a fingerprint."""
    assert vocabulary.size is not None
    index = {
        "format": FORMAT,
        "dtype": token_dtype(vocabulary.size),
        "vocab_size": vocabulary.size,
        "boundary": vocabulary.boundary,
        "tokenizer": vocabulary.tokenizer,
        "tokens": sum(file.tokens for file in files),
        "documents": sum(file.documents for file in files),
        **more,
        "files": [asdict(file) for file in files],
    }
    atomic_write_text(folder / INDEX, json.dumps(index, indent=1) + "\n")
    return index


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer.vocab_size, tokenizer.fingerprint, tokenizer.boundary)


def write_corpus(
    folder: Path, documents: Iterable[np.ndarray], vocabulary: Vocabulary, fraction: float
) -> int:
    """Write documents as a folder, some for validation, by their number; return how many tokens.

    A part without any receives the other part's last document, or the end of the only one.
    """
    train, held = Entry("tokens-00000.bin"), Entry("held-00000.bin", held=True)
    last: dict[str, np.ndarray] = {}  # of each part; not written yet
    with ExitStack() as stack:
        write = {
            part: stack.enter_context(
                token_writer(folder / entry.name, entry, vocabulary.boundary is None)
            )
            for part, entry in zip(PARTS, (train, held), strict=True)
        }
        for is_held, document in zip(held_out(fraction), documents, strict=False):
            part = "validation" if is_held else "train"
            if part in last:
                write[part](last[part])
            last[part] = document
        if fraction and len(last) == 1:
            [(full, document)] = last.items()
            if train.documents or held.documents:
                last = {part: document for part in PARTS if part != full}
            else:
                cut = len(document) - max(1, round((len(document) - 1) * fraction))
                end = np.append(document[:1], document[cut:])
                last = {"train": document[:cut], "validation": end}
        for part, document in last.items():
            write[part](document)
    return write_index(folder, vocabulary, [train, held])["tokens"]


# --- read ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Index:
    """The required keys of an index."""

    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    boundary: int | None
    tokenizer: str | None
    files: list[dict[str, Any]]


def read_index(folder: Path) -> dict[str, Any]:
    """Read the index of a folder of token files. Raises DataError."""
    try:
        index = read_object(folder / INDEX)
    except FileNotFoundError:
        reason = f"has no {INDEX}: its tokenization has not been completed, or it is none"
        raise DataError("data.path", folder, reason, _AGAIN) from None
    except (OSError, ValueError) as error:
        raise DataError("data.path", folder, f"{INDEX} cannot be read ({error})", _AGAIN) from None
    if (error := foreign_index(folder, index)) is not None:
        raise error
    if index.get("format") != FORMAT:
        reason = f"has format {index.get('format')}, and this version reads {FORMAT}"
        raise DataError("data.path", folder, reason, "tokenize it again")
    try:
        as_record(index, _Index)
        names = [as_record(entry, Entry).name for entry in index["files"]]
        if odd := [name for name in names if Path(name).name != name or len(name) > 255]:
            raise ValueError(f"names {odd[0][:200]}, which is not in it")
        if len({*names}) < len(names):
            raise ValueError("names a file twice")
    except ValueError as error:
        raise DataError("data.path", folder, f"its {INDEX} {error}", _AGAIN) from None
    return index


def files_of(folder: Path, index: dict[str, Any]) -> tuple[list[TokenFile], list[TokenFile]]:
    """Return an index's files, without empty ones, and those for validation. Sizes are compared, ids
    are not read. Raises DataError."""
    files: dict[bool, list[TokenFile]] = {False: [], True: []}
    for entry in (as_record(entry, Entry) for entry in index["files"]):
        path = (folder / entry.name).resolve()
        ends = ends_of(path) if index["boundary"] is None else None
        sizes = [(path, entry.tokens * np.dtype(index["dtype"]).itemsize)]
        sizes += [] if ends is None else [(ends, 8 * entry.documents)]
        for file, size in sizes:
            if not file.is_file() or file.stat().st_size != size:
                reason = f"does not have the {size:,} bytes of {INDEX}"
                raise DataError("data.path", file, reason, _AGAIN)
        if entry.tokens:
            tokens = TokenFile(path, index["dtype"], 0, entry.tokens, index=ends)
            files[entry.held].append(tokens)
    return files[False], files[True]


# --- the cache ----------------------------------------------------------------------------------


def cached_corpus(
    data: TextData | HFData,
    source: list[Any],
    documents: Iterable[np.ndarray],
    vocabulary: Vocabulary,
    fraction: float,
) -> TokenSet:
    """Return the documents, from the cache or written now. source: what the documents depend on
    besides the vocabulary, as JSON; vocabulary: its tokenizer is a fingerprint.

    Raises DataError for a corpus without text, and for a cache that cannot be written.
    """

    def read(folder: Path) -> TokenSet | None:
        with suppress(DataError):  # of an entry that is missing or incomplete, or of another form
            files = files_of(folder, read_index(folder))
            return TokenSet(*files, vocabulary.size or 0, vocabulary.boundary, None)
        return None

    def write(folder: Path) -> None:
        if not write_corpus(folder, documents, vocabulary, fraction):
            reason = f"it contains no {'text' if vocabulary.boundary is not None else 'ids'}"
            raise DataError("data.path", data.path, reason, "give files with some")

    return cached(data.cache, cache_key([FORMAT, source, vocabulary, fraction]), read, write)


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


def ends_of(path: Path) -> Path:
    """Return the file that says where a token file's documents end."""
    return path.with_name(f"{path.name}.index")
