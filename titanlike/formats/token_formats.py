"""Token files in other projects' formats, recognized by content, not by name.

A reader receives a path and the file's first bytes, and returns the `TokenFile`, or None if the
format is another. A file that no reader recognizes is raw ids of `data.dtype`, unless it is known
to be something else (`MAGIC`) or text: then the error names it and what reads it.
"""

from __future__ import annotations

import re
import shlex
import struct
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from titanlike.core.config.errors import as_override
from titanlike.core.config.files import read_object
from titanlike.core.config.groups.data import TokenData
from titanlike.core.data.kinds import DataError
from titanlike.formats.token_files import NPY, TokenFile, open_tokens

HEAD = 1024  # bytes read to recognize a file
SUFFIXES = (".bin", ".npy")  # token files within a folder
_COMPLETE = "Give the complete file"
_ARRAY = "Save the ids as an array: numpy.save('tokens.npy', ids), and write data.path=tokens.npy"
_HF = "data=hf {path} data.ids_key=input_ids for rows of ids, or data=text {path} for text"

# (offset, bytes, the format, the fix); {path}: data.path=PATH, {stem}: without suffix
MAGIC = (
    (0, b"MMIDIDX\0\0", "the index of a Megatron file NAME.bin", "data=tokens {stem}"),
    (0, b"TNTIDX\0\0", "an index of fairseq's older format", "Tokenize the text again"),
    (0, b"LITPKDS", "lit-gpt's packed ids", "Remove its header: tail -c +25 {file} > ids.bin"),
    (0, b"PAR1", "a Parquet file", _HF),
    (0, b"ARROW1\0\0", "an Arrow file", _HF),
    (0, b"\xff\xff\xff\xff", "an Arrow stream", _HF),
    (0, b"ORC", "an ORC file", "data=text {path}"),
    (0, b"\x1f\x8b\x08", "compressed by gzip", "Decompress it: gunzip -k {file}"),
    (0, b"(\xb5/\xfd", "compressed by zstd", "Decompress it: zstd -d {file}"),
    (0, b"PK\x03\x04", "an archive of numpy.savez or torch.save", _ARRAY),
    (0, b"\x89HDF\r\n", "an HDF5 file", _ARRAY),
    (257, b"ustar", "a tar archive, as of WebDataset", "data=hf {path} data.text_key=txt"),
    (0, struct.pack("<i", 20240522), "questions of llm.c's evaluations", "Give its .bin of tokens"),
    (0, struct.pack("<i", 20240326), "weights of llm.c", "Give its .bin of tokens"),
)
# (key of an index.json, the project, a line that converts the texts to JSONL)
FOREIGN_INDEX = (
    ("shards", "Mosaic's MDS", "from streaming import StreamingDataset as S; d=S(local={folder},batch_size=1)"),
    ("chunks", "litdata", "from litdata import StreamingDataset as S; d=S({folder})"),
)  # fmt: skip
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16", 9: "uint32"}
_LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # magic -> version, type
_HELD = r"(^|[^a-z])(val|valid|validation|dev|eval)([^a-z]|$)"  # file names of validation data
_END = 1 << 62  # where documents after the last id begin
_UNUSED = r"(^|[^a-z])test([^a-z]|$)"


def recognized(path: Path, head: bytes | None = None) -> tuple[str, str] | None:
    """Return a file's format and the fix, if `MAGIC` has it."""
    head = _head(path) if head is None else head
    for offset, magic, what, fix in MAGIC:
        if head[offset : offset + len(magic)] == magic:
            given = partial(as_override, "data.path")
            stem, file = given(str(path.with_suffix(""))), shlex.quote(str(path))
            return what, fix.format(path=given(str(path)), stem=stem, file=file)
    return None


def read_file(path: Path, data: TokenData) -> TokenFile:
    """Open a file, or a Megatron prefix, of `data.path`. Raises DataError for other or damaged
    files."""
    prefixed = Path(f"{path}.bin")
    if not path.exists() and prefixed.is_file() and Path(f"{path}.idx").is_file():
        path = prefixed
    if not path.is_file():
        fix = "give a .npy or .bin file of token ids, or a folder of them"
        raise DataError("data.path", path, "there is no such file", fix)
    if data.format == "raw":
        return _whole(path, data.dtype)
    head = _head(path)
    for reader in (_megatron, _llm_c):
        if (file := reader(path, head)) is not None:
            return file
    if head[:6] == b"\x93NUMPY":
        return _whole(path, NPY)
    if (known := recognized(path, head)) is not None:
        raise DataError("data.path", path, f"is {known[0]}, not a file of token ids", known[1])
    if _is_text(head):
        fix = f"data=text {as_override('data.path', str(path))}"
        raise DataError("data.path", path, "is text, not a file of token ids", fix)
    guess = "uint32" if _looks_like_uint32(path) else "uint16"
    if path.suffix == ".npy":
        reason = "does not begin as numpy.save writes it; OLMo's .npy are raw ids"
        raise DataError("data.path", path, reason, f"data.format=raw data.dtype={guess}")
    if (data.dtype, guess) == ("uint16", "uint32"):
        reason = f"each second id of {path} is near 0: these are the halves of uint32"
        fix = "data.dtype=uint32, or data.format=raw where they are uint16"
        raise DataError("data.dtype", data.dtype, reason, fix)
    return _whole(path, data.dtype)


def read_folder(folder: Path, data: TokenData) -> tuple[list[TokenFile], list[TokenFile]]:
    """Return the training files of a folder without an index, and its validation files, told by
    name."""
    train, held = list[TokenFile](), list[TokenFile]()
    for path in sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES):
        name = path.stem.lower()
        if not re.search(_UNUSED, name):
            (held if re.search(_HELD, name) else train).append(read_file(path, data))
    return (train, held) if train else (held, [])


def has_token_files(folder: Path) -> bool:
    return any(path.suffix in SUFFIXES for path in folder.iterdir())


def foreign_index(folder: Path, index: dict[str, object]) -> DataError | None:
    """Return the error for a folder whose index.json another project wrote, if so."""
    for key, whose, opened in FOREIGN_INDEX:
        if key in index:
            code = f"import json; {opened.format(folder=repr(str(folder)))}; "
            code += "[print(json.dumps({'text': r['text']})) for r in d]"
            fix = f'Write its texts as JSONL: python -c "{code}" > texts.jsonl, and write '
            fix += "data=text data.path=texts.jsonl; or read it in a function of your own "
            fix += "(docs/data.md)"
            return DataError("data.path", folder, f"is a data set of {whose}", fix)
    return None


def check_is_text(root: Path) -> None:
    """Raise DataError if a file or folder given as text is in a known other format."""
    given, known = as_override("data.path", str(root)), None
    if root.is_file():
        known = recognized(root)
        if known and ("data=text" in known[1] or known[1].startswith("Decompress")):
            return
        if root.suffix in SUFFIXES:
            known = "a file of token ids", f"data=tokens {given}"
    elif (root / "index.json").is_file():
        index = dict[str, object]()
        with suppress(ValueError):  # of a file that is none
            index = read_object(root / "index.json")
        if (error := foreign_index(root, index)) is not None:
            raise error
        if {"tokenizer", "files"} <= index.keys():
            known = "a folder of token ids", f"data=tokens {given}"
    elif (root / "train.bin").is_file():  # of nanoGPT
        known = "a folder of token ids", f"data=tokens {given}"
    elif root.is_dir() and next(root.glob("*.tar"), None):
        known = "a folder of tar archives, as of WebDataset", f"data=hf {given} data.text_key=txt"
    if known:
        raise DataError("data.path", root, f"is {known[0]}, not of text", known[1])


def largest_id(files: list[TokenFile], most: int) -> int:
    """Return the largest of the first `most` ids of each file."""
    return max(int(open_tokens(f)[f.start : min(f.stop, f.start + most)].max()) for f in files)


# --- readers ------------------------------------------------------------------------------------


def _megatron(path: Path, head: bytes) -> TokenFile | None:
    """NAME.bin of Megatron-LM, GPT-NeoX or fairseq (whose index has no documents)."""
    index = path.with_suffix(".idx")
    if path.suffix != ".bin" or not index.is_file() or not _head(index).startswith(b"MMIDIDX"):
        return None
    version, code, sequences = struct.unpack_from("<QBQ", _head(index).ljust(HEAD, b"\0"), 9)
    dtype = _CODES.get(code)
    if version != 1 or dtype is None:
        reason = f"has version {version} and type {code}, which are not those of token ids"
        raise DataError("data.path", index, reason, "Tokenize the text again")
    try:
        borders = _Borders.of(index)
        last, length = int(borders.places[-1]), int(borders.lengths[-1])
    except (ValueError, IndexError, struct.error):
        reason = f"does not have the {sequences:,} sequences that it counts"
        raise DataError("data.path", index, reason, _COMPLETE) from None
    itemsize = np.dtype(dtype).itemsize
    _check_size(path, last + length * itemsize, index.name)
    return TokenFile(path, dtype, 0, last // itemsize + length, 0, index, "Megatron's, by its .idx")


def _llm_c(path: Path, head: bytes) -> TokenFile | None:
    """llm.c and modded-nanogpt: 256 int32 of header, three of them used: magic, version, number of
    ids."""
    if len(head) < 12 or (known := _LLM_C.get(struct.unpack_from("<i", head)[0])) is None:
        return None
    _, version, count = struct.unpack_from("<3i", head)
    if version != known[0]:
        reason = f"has a header of llm.c of version {version}, and {known[0]} is read"
        raise DataError("data.path", path, reason, "Write the file again")
    _check_size(path, HEAD + count * np.dtype(known[1]).itemsize, "its header")
    return TokenFile(path, known[1], 0, count, HEAD, form="llm.c's, by its header")


def _whole(path: Path, dtype: str) -> TokenFile:
    return TokenFile(path, dtype, 0, len(open_tokens(TokenFile(path, dtype, 0, 0))))


def _check_size(path: Path, size: int, by: str) -> None:
    if (actual := path.stat().st_size) != size:
        reason = f"has {actual:,} bytes, and by {by} there are {size:,}"
        raise DataError("data.path", path, reason, _COMPLETE)


def _head(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(HEAD)
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise DataError("data.path", path, reason, "give a file that can be read") from None


def _is_text(head: bytes) -> bool:
    text = head.decode(errors="ignore")  # the last character may be truncated
    whole = len(text.encode()) > len(head) - 4
    return whole and len(head) > 16 and all(c.isprintable() or c in "\t\n\r\f\ufeff" for c in text)


def _looks_like_uint32(path: Path) -> bool:
    halves = np.fromfile(path, "<u2", 1 << 12)
    low, high = halves[::2], halves[1::2]
    return len(halves) > 64 and bool(high.max() < 32 and low.max() > 255)


# --- documents ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Borders:
    """An index, mapped: mark m is of the document that begins at id places[m] // itemsize (Megatron:
    of sequences), or at id m (of rows). Its arrays are not aligned: numpy's searches copy them."""

    marks: Sequence[int] | np.ndarray
    places: np.ndarray
    lengths: np.ndarray
    itemsize: int = 0

    @classmethod
    def of(cls, index: Path) -> _Borders:
        mapped = np.memmap(index, mode="r") if index.stat().st_size else np.empty(0, np.uint8)
        if mapped[:7].tobytes() != b"MMIDIDX":
            ends = mapped[: len(mapped) // 8 * 8].view("<u8")
            return cls(ends, ends, ends)
        _, code, count = struct.unpack_from("<QBQ", mapped[:26].tobytes(), 9)
        marks, offset = range(count), 26
        if len(mapped) != offset + 12 * count:  # else fairseq's: each sequence is a document
            documents, offset = struct.unpack_from("<Q", mapped[:34].tobytes(), 26)[0], 34
            marks = mapped[offset + 12 * count :][: 8 * documents].view("<i8")
        lengths = mapped[offset:][: 4 * count].view("<i4")
        places = mapped[offset + 4 * count :][: 8 * count].view("<i8")
        if not len(places) == len(lengths) == count:
            raise ValueError("too short")
        return cls(marks, places, lengths, np.dtype(_CODES[code]).itemsize)

    def within(self, start: int, stop: int) -> np.ndarray:
        """Return the ids in start < i <= stop at which documents begin."""

        def place(mark: int) -> int:
            if not self.itemsize:
                return int(mark)
            inside = 0 <= mark < len(self.places)
            return int(self.places[mark]) // self.itemsize if inside else _END

        first, last = (bisect_right(self.marks, one, key=place) for one in (start, stop))
        return np.array([place(mark) for mark in self.marks[first:last]], np.int64)


def borders(file: TokenFile) -> _Borders:
    assert file.index is not None
    return _Borders.of(file.index)
