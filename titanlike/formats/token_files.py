"""Memory-mapped files of token ids: numpy's, or little-endian integers with or without a header."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from titanlike.core.config.errors import Problem
from titanlike.core.data.kinds import DataError

NPY = "npy"  # dtype of a numpy.save file, which stores its own
# the only dtypes that are mapped: of "O" the bytes of a file would be addresses of objects
_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")


@dataclass(frozen=True)
class TokenFile:
    """Ids start..stop of a file."""

    path: Path
    dtype: str
    start: int
    stop: int
    offset: int = 0  # bytes before the first id
    index: Path | None = None  # file that says where documents begin
    form: str = ""  # the format's name

    @property
    def count(self) -> int:
        return self.stop - self.start


Parts = Mapping[str, Sequence[TokenFile]]  # "train" or "validation" -> files


@dataclass(frozen=True)
class TokenSet:
    """All files of `data.path`, in order. held: files for validation only; tokenizer: name or path,
    None = unknown."""

    files: list[TokenFile]
    held: list[TokenFile]
    vocab_size: int
    boundary: int | None
    tokenizer: str | None

    def parts(self, validation_fraction: float) -> Parts:
        """Return the training and validation files; without validation files, the end of all tokens
        is held out."""
        if self.held:
            return {"train": self.files, "validation": self.held}
        count = sum(file.count for file in self.files)
        cut = count - round(count * validation_fraction)
        return {"train": self._between(0, cut), "validation": self._between(cut, count)}

    def _between(self, start: int, stop: int) -> list[TokenFile]:
        """Return the files, and parts of files, with ids start..stop of all files' ids."""
        between, before = [], 0
        for file in self.files:
            low, high = max(start - before, 0), min(stop - before, file.count)
            if low < high:
                between.append(replace(file, start=file.start + low, stop=file.start + high))
            before += file.count
        return between


def too_short(parts: Parts, seq_len: int) -> Iterator[Problem]:
    """Yield an error for each part of the data that is shorter than one sequence."""
    for part, files in parts.items():
        count = sum(file.count for file in files)
        if count <= seq_len:
            which = f"the {part} part of the data has" if len(parts) > 1 else "the data have"
            reason = f"{which} {count} tokens, a sequence needs seq_len + 1"
            fix = "give more text with data.path"
            fix += ", or raise data.validation_fraction" if part == "validation" else ""
            fix += f", or write seq_len={count - 1}" if count > 1 else ""
            yield Problem("seq_len", seq_len, reason, fix)


def open_tokens(file: TokenFile) -> np.ndarray:
    """Map all ids of a file read-only, not only start..stop.

    Raises DataError if the file is missing, empty, or in another format.
    """
    path, dtype = file.path, file.dtype
    if dtype == NPY:
        remedy = "save a one-dimensional array of integers with numpy.save"
        try:
            tokens = read_array(path)
        except ValueError as error:
            raise DataError("data.path", path, f"is not a .npy file ({error})", remedy) from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
            form = f"an array of {tokens.dtype} and shape {tokens.shape}"
            raise DataError("data.path", path, f"is {form}, not a list of token ids", remedy)
        return np.asarray(tokens)
    assert dtype in _DTYPES, dtype
    itemsize = np.dtype(dtype).itemsize
    size = path.stat().st_size - file.offset
    if size <= 0 or size % itemsize:
        reason = f"{size} bytes are not a multiple of the {itemsize} bytes of a {dtype} token id"
        fix = "give a complete file, and data.dtype=uint16 or data.dtype=uint32 as it was written"
        raise DataError("data.path", path, reason, fix)
    # A plain array over the map: slicing np.memmap is several times slower.
    kind = np.dtype(dtype).newbyteorder("<")
    return np.asarray(np.memmap(path, mode="r", dtype=kind, offset=file.offset))


def read_array(path: Path) -> np.ndarray:
    """Map a numpy.save file of integers or booleans read-only. Raises ValueError."""
    if not path.is_file():
        raise ValueError("is not a regular file")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # of a header, which numpy parses as Python
        raise ValueError(" ".join(str(error).split())[:200]) from None
    if array.dtype.kind not in "iub":
        raise ValueError(f"it has {array.dtype}")
    return array
