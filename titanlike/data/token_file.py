"""Files of token ids (`data=tokens`), memory-mapped: .npy, or raw little-endian integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from titanlike.data.errors import DataError


def open_tokens(path: Path, dtype: str) -> np.ndarray:
    """The ids in the file [tokens], mapped read-only.

    dtype: "uint16" or "uint32", of a raw file; a .npy file contains its own. Raises DataError where
    the file is missing, empty, or of another format.
    """
    if not path.is_file():
        fix = "Give a .npy or raw .bin file of token ids"
        raise DataError("data.path", path, "there is no such file", fix)
    if path.suffix == ".npy":
        return _open_npy(path)
    itemsize = np.dtype(dtype).itemsize
    size = path.stat().st_size
    if size == 0 or size % itemsize:
        reason = f"{size} bytes are not a multiple of the {itemsize} bytes of a {dtype} token id"
        fix = "Give a complete file, and data.dtype=uint16 or data.dtype=uint32 as it was written"
        raise DataError("data.path", path, reason, fix)
    # A plain array over the map: slicing np.memmap itself is several times slower.
    return np.asarray(np.memmap(path, mode="r", dtype=np.dtype(dtype).newbyteorder("<")))


def _open_npy(path: Path) -> np.ndarray:
    remedy = "Save a one-dimensional array of integers with numpy.save"
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError("data.path", path, f"is not a .npy file ({error})", remedy) from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        form = f"an array of {tokens.dtype} and shape {tokens.shape}"
        raise DataError("data.path", path, f"is {form}, not a list of token ids", remedy)
    return np.asarray(tokens)
