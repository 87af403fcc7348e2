"""Tokenize a corpus once, into a cache folder.

1. The key of a cache entry is a hash of the files, the tokenizer, the text's key, the validation
   fraction and FORMAT. A complete entry is used again.
2. Each document is written as its boundary token and its ids to train.bin or validation.bin
   (little-endian uint16 or uint32). Which of them depends on the document's number alone.
3. A part without documents gets the last document of the other part, or the end of the only one.
4. The entry is written under a temporary name and then renamed, so that several processes may do
   this concurrently and none reads an incomplete file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from titanlike.config.files import read_object
from titanlike.config.schema import HFData, TextData
from titanlike.data import hf_dataset
from titanlike.data.corpus import documents, find_files
from titanlike.data.errors import DataError
from titanlike.data.shuffle import splitmix64
from titanlike.data.tokenizer import Tokenizer

FORMAT = 1  # part of the key: increment it when the files are written differently
PARTS = ("train", "validation")


@dataclass
class TokenizedCorpus:
    """An entry of the cache: `folder`/train.bin, validation.bin, meta.json (the other fields)."""

    folder: Path
    dtype: str  # "uint16" or "uint32"
    vocab_size: int
    boundary: int  # id of the token that begins each document
    tokens: dict[str, int]  # part -> number of tokens, boundaries included
    documents: dict[str, int]  # part -> number of documents

    def path(self, part: str) -> Path:
        return self.folder / f"{part}.bin"


def tokenize_corpus(data: TextData | HFData, tokenizer: Tokenizer) -> TokenizedCorpus:
    """The tokenized corpus of `data`, from the cache or tokenized now.

    Raises DataError for a corpus without text, and for a cache folder that cannot be written.
    """
    cache = Path(data.cache or "~/.cache/titanlike").expanduser().resolve()
    folder = cache / _key(data, tokenizer)
    if (entry := _read(folder)) is not None:
        return entry
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=cache) as parent:
            unfinished = Path(parent, "entry")
            unfinished.mkdir()
            _write(unfinished, data, tokenizer)
            _publish(unfinished, folder)
    except OSError as error:
        reason = f"the folder cannot be written ({error.strerror or error})"
        fix = "Give a writable folder with 2 to 4 bytes of space per token: "
        raise DataError("data.cache", cache, reason, fix + "data.cache=/tmp/titanlike") from None
    entry = _read(folder)
    assert entry is not None, f"{folder} was just written"
    return entry


def _key(data: TextData | HFData, tokenizer: Tokenizer) -> str:
    try:
        if isinstance(data, HFData):
            source = hf_dataset.identity(data)
        else:
            files = find_files(data.path)
            source = [(str(file), (s := file.stat()).st_size, s.st_mtime_ns) for file in files]
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise DataError("data.path", error.filename, reason, "Fix or delete it") from None
    content = [FORMAT, source, tokenizer.fingerprint, data.text_key, data.validation_fraction]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def _read(folder: Path) -> TokenizedCorpus | None:
    """The entry, or None if it is missing or incomplete (a crash may truncate a file)."""
    try:
        entry = TokenizedCorpus(folder, **read_object(folder / "meta.json"))
        itemsize = np.dtype(entry.dtype).itemsize
        sizes = [entry.path(part).stat().st_size for part in PARTS]
        return entry if sizes == [entry.tokens[part] * itemsize for part in PARTS] else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _publish(unfinished: Path, folder: Path) -> None:
    try:
        os.rename(unfinished, folder)
    except OSError:  # the folder exists
        if _read(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(unfinished, folder)


def _texts(data: TextData | HFData) -> Iterator[str]:
    if isinstance(data, HFData):
        return hf_dataset.texts(data)
    return documents(find_files(data.path), data.text_key)


def _write(folder: Path, data: TextData | HFData, tokenizer: Tokenizer) -> None:
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    none = dict.fromkeys(PARTS, 0)
    sizes = (tokenizer.vocab_size, tokenizer.boundary)
    entry = TokenizedCorpus(folder, dtype, *sizes, tokens={**none}, documents={**none})
    file_dtype = np.dtype(dtype).newbyteorder("<")
    last = {**none}  # tokens in each part's last document
    with ExitStack() as stack:
        out = {part: stack.enter_context(open(entry.path(part), "wb")) for part in PARTS}
        for number, ids in enumerate(tokenizer.encode_many(_texts(data))):
            hashed = int(splitmix64(np.array([number + 1], np.uint64))[0])
            part = "validation" if hashed < data.validation_fraction * 2.0**64 else "train"
            document = np.empty(len(ids) + 1, file_dtype)
            document[0] = tokenizer.boundary
            document[1:] = ids
            out[part].write(document.data)
            entry.tokens[part] += len(document)
            entry.documents[part] += 1
            last[part] = len(document)
    if not any(entry.documents.values()):
        raise DataError("data.path", data.path, "it contains no text", "Give files with some text")
    for empty, full in (PARTS, PARTS[::-1]):
        if entry.documents[empty] == 0:
            _move_last(entry, empty, full, last[full], data.validation_fraction)
    meta = {name: value for name, value in asdict(entry).items() if name != "folder"}
    (folder / "meta.json").write_text(json.dumps(meta))


def _move_last(entry: TokenizedCorpus, empty: str, full: str, last: int, fraction: float) -> None:
    """Move the last document of part `full` to the empty part; if it is the only one, cut it."""
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
