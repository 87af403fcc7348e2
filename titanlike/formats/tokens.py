"""Token ids in files (`data=tokens`), memory-mapped: .npy, raw little-endian integers, other tools'
formats (token_formats.py), and folders written by `titanlike tokenize` (token_folder.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.core.config.errors import Problem
from titanlike.core.config.groups.data import TokenData
from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import DataError, Vocabulary
from titanlike.formats.token_files import TokenFile, TokenSet, open_tokens, too_short
from titanlike.formats.token_folder import INDEX, PLAN, files_of, read_index
from titanlike.formats.token_formats import has_token_files, largest_id, read_file, read_folder
from titanlike.formats.tokenizer import TOKENIZER, open_tokenizer

if TYPE_CHECKING:
    from titanlike.core.data.sources import Data

_MAX_SEARCHED = 1 << 24  # tokens searched for the document boundary
_CHUNK = 1 << 20  # tokens per search
_TRIED = 64  # files whose first ids are read before a launch


def check_first_ids(tokens: TokenSet) -> None:
    """Raise DataError if a file begins with ids that the vocabulary does not have."""
    for file in (*tokens.files, *tokens.held)[:_TRIED]:
        ids = open_tokens(file)[file.start : min(file.stop, file.start + _CHUNK)]
        for bad in (int(ids.max()), int(ids.min())):
            if not 0 <= bad < tokens.vocab_size:
                place = int((ids == bad).argmax())
                reason = f"token {place} of {file.path} is the id {bad}"
                fix = "data.dtype=uint32, or another as it was written"
                if bad > 0:
                    fix = f"data.vocab_size={bad + 1}, or more as its tokenizer has, or another data.dtype"
                raise DataError("data.vocab_size", tokens.vocab_size, reason, fix)


def open_data(data: TokenData, config: Config) -> Data:
    from titanlike.formats.packed import packed_data  # imports torch

    tokens = read_tokens(data)
    tokenizer = None if tokens.tokenizer is None else open_tokenizer(tokens.tokenizer)
    what = ", ".join(map(str, _paths(data)))
    what += f" in {len(tokens.files):,} files" if len(tokens.files) > 1 else ""
    forms = {file.form for file in (*tokens.files, *tokens.held)} - {""}
    if held := ", ".join(file.path.name for file in tokens.held):
        forms.add(f"{held} for validation")
    what += f" ({'; '.join(sorted(forms))})" if forms else ""
    return packed_data(config, tokens, tokenizer, what)


def vocabulary(data: TokenData) -> Vocabulary:
    tokens = read_tokens(data)
    return Vocabulary(tokens.vocab_size, tokens.tokenizer, tokens.boundary)


def _check_lengths(data: TokenData, config: Config) -> Iterator[Problem]:
    tokens = read_tokens(data)
    check_first_ids(tokens)
    if 0 < data.validation_fraction < 1 and config.evaluate.part != "all":
        yield from too_short(tokens.parts(data.validation_fraction), config.seq_len)


def _check_boundary(data: TokenData, config: Config) -> Iterator[Problem]:
    """Yield an error if documents=true and the beginning of the files has no boundary token."""
    if not data.documents:
        return
    tokens = read_tokens(data)
    boundary, remedy = tokens.boundary, "the id of the token that begins a document"
    remedy += ", data.boundary=0"
    if boundary is None and all(file.index for file in (*tokens.files, *tokens.held)):
        return
    if boundary is None:
        yield Problem("data.boundary", "null", "documents=true needs the boundary token", remedy)
    elif not 0 <= boundary < tokens.vocab_size:
        reason = f"is not a token id below data.vocab_size={tokens.vocab_size}"
        yield Problem("data.boundary", boundary, reason, remedy)
    else:
        ids = open_tokens(tokens.files[0])[:_MAX_SEARCHED]
        chunks = (ids[start : start + _CHUNK] for start in range(0, len(ids), _CHUNK))
        if not any((chunk == boundary).any() for chunk in chunks):
            reason = f"is not among the first {len(ids):,} tokens"
            yield Problem("data.boundary", boundary, reason, f"{remedy}, or data.documents=false")


CHECKS = (_check_lengths, _check_boundary)


# --- files --------------------------------------------------------------------------------------


def read_tokens(data: TokenData) -> TokenSet:
    """Open the files and folders of `data.path`. Sizes are compared with the index; ids are not
    read.

    Raises DataError for missing or incomplete files, and for folders with different tokenizers.
    """
    files, held = list[TokenFile](), list[TokenFile]()
    indices: list[tuple[Path, dict[str, Any]]] = []
    for path in _paths(data):
        if not path.is_dir():
            both = [read_file(path, data)], list[TokenFile]()
        elif any((path / name).exists() for name in (INDEX, PLAN)) or not has_token_files(path):
            index = read_index(path)
            indices.append((path, index))
            both = files_of(path, index)
        else:
            both = read_folder(path, data)
        files, held = files + both[0], held + both[1]
    if not files:
        raise DataError("data.path", data.path, "names no file", "give a file, or a folder")
    vocab_size, boundary, tokenizer = data.vocab_size, data.boundary, None
    if indices:
        folder, first = indices[0]
        for path, index in indices:
            if index["tokenizer"] != first["tokenizer"]:
                reason = f"was written with another tokenizer than {folder}"
                raise DataError("data.path", path, reason, "tokenize both with the same one")
        vocab_size = first["vocab_size"] if vocab_size is None else vocab_size
        boundary = first["boundary"] if boundary is None else boundary
        if (tokenizer := first["tokenizer"]) not in (None, "bytes"):
            tokenizer = str(folder / TOKENIZER)
    if vocab_size is None:
        reason = "a file of ids does not say how many there are"
        fix = f"data.vocab_size={largest_id(files + held, _CHUNK) + 1}, or more if its tokenizer has more"
        raise DataError("data.vocab_size", "null", reason, fix)
    return TokenSet(files, held, vocab_size, boundary, tokenizer)


def _paths(data: TokenData) -> list[Path]:
    paths = [data.path] if isinstance(data.path, str) else data.path
    return [Path(os.path.expanduser(path)) for path in paths]
