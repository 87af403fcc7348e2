"""A corpus of token ids in a folder: what `titanlike tokenize` writes and `data=tokens` reads.

    index.json         the files below, their dtype, the vocabulary, the token between documents
    tokens-00000.bin   ids, little-endian; each document begins with that token
    tokenizer/         the tokenizer's files, unless it is that of bytes
    bad.jsonl          records that could not be read, if they were skipped

No torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titanlike.config.files import read_object
from titanlike.config.schema import TokenData
from titanlike.data.errors import DataError
from titanlike.data.token_file import open_tokens

INDEX, TOKENIZER = "index.json", "tokenizer"
FORMAT = 1
_AGAIN = "Run titanlike tokenize again: it goes on where it was"


@dataclass(frozen=True)
class TokenFile:
    """ids start..stop of a file."""

    path: Path
    dtype: str  # of a raw file
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class TokenSet:
    """All files of `data.path`, in order. tokenizer: its name or path, None = not known."""

    files: list[TokenFile]
    vocab_size: int
    boundary: int | None
    tokenizer: str | None
    documents: int | None  # None = not counted

    @property
    def count(self) -> int:
        return sum(file.count for file in self.files)

    def part(self, start: int, stop: int) -> list[TokenFile]:
        """The files, and parts of files, that have these of all ids."""
        found, before = [], 0
        for file in self.files:
            low, high = max(start - before, 0), min(stop - before, file.count)
            if low < high:
                place = file.start + low, file.start + high
                found.append(TokenFile(file.path, file.dtype, *place))
            before += file.count
        return found

    def spans(self, validation_fraction: float) -> dict[str, tuple[int, int]]:
        """Part -> (start, stop): the end is for validation."""
        cut = self.count - round(self.count * validation_fraction)
        return {"train": (0, cut), "validation": (cut, self.count)}


def paths_of(data: TokenData) -> list[Path]:
    given = [data.path] if isinstance(data.path, str) else data.path
    return [Path(os.path.expanduser(path)) for path in given]


def read_tokens(data: TokenData) -> TokenSet:
    """The files and folders of `data.path`; sizes are compared with the index, contents are not read.

    Raises DataError for what is missing or incomplete, and for folders of different tokenizers.
    """
    files: list[TokenFile] = []
    indices: list[tuple[Path, dict[str, Any]]] = []
    for path in paths_of(data):
        if path.is_dir():
            index = read_index(path)
            indices.append((path, index))
            files += _files_of(path, index)
        else:
            files.append(TokenFile(path, data.dtype, 0, len(open_tokens(path, data.dtype))))
    if not files:
        raise DataError("data.path", data.path, "names no file", "Give a file, or a folder")
    known = [index for _, index in indices]
    for path, index in indices[1:]:
        if index["tokenizer"] != known[0]["tokenizer"]:
            reason = f"was written with another tokenizer than {indices[0][0]}"
            raise DataError("data.path", path, reason, "Tokenize both with the same one")
    vocab_size = data.vocab_size
    if vocab_size is None and known:
        vocab_size = known[0]["vocab_size"]
    if vocab_size is None:
        reason = "a file of ids does not say how many there are"
        raise DataError(
            "data.vocab_size", "null", reason, "Write data.vocab_size=50257, or as it is"
        )
    boundary = data.boundary
    if boundary is None and known:
        boundary = known[0]["boundary"]
    counts = [index["documents"] for index in known]
    documents = sum(counts) if len(known) == len(paths_of(data)) else None
    return TokenSet(files, vocab_size, boundary, _tokenizer(indices), documents)


def read_index(folder: Path) -> dict[str, Any]:
    """index.json of a folder. Raises DataError."""
    try:
        index = read_object(folder / INDEX)
    except FileNotFoundError:
        reason = f"has no {INDEX}: its tokenization has not been completed, or it is none"
        raise DataError("data.path", folder, reason, _AGAIN) from None
    except (OSError, ValueError) as error:
        raise DataError("data.path", folder, f"{INDEX} cannot be read ({error})", _AGAIN) from None
    if index.get("format") != FORMAT:
        reason = f"has format {index.get('format')}, and this version reads {FORMAT}"
        raise DataError("data.path", folder, reason, "Tokenize it again")
    return index


def _files_of(folder: Path, index: dict[str, Any]) -> list[TokenFile]:
    found = []
    for entry in index["files"]:
        path, size = folder / entry["name"], entry["tokens"] * np.dtype(index["dtype"]).itemsize
        if not path.is_file() or path.stat().st_size != size:
            raise DataError(
                "data.path", path, f"does not have the {size:,} bytes of {INDEX}", _AGAIN
            )
        if entry["tokens"]:
            found.append(TokenFile(path.resolve(), index["dtype"], 0, entry["tokens"]))
    return found


def _tokenizer(indices: Sequence[tuple[Path, dict[str, Any]]]) -> str | None:
    if not indices:
        return None
    folder, index = indices[0]
    return "bytes" if index["tokenizer"] == "bytes" else str(folder / TOKENIZER)
