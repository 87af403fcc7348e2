"""A checkpoint's tensors, a few rows at a time: from any layout's pieces, without a whole one in memory.

A piece (a block of a tensor) is a record of torch.save, a ZIP file that is not compressed: the
values lie in it in a row, and are read as they are needed. The piece's checksum is computed on the way, and
compared when its last row has been read.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import zipfile
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from titanlike.checkpoint.dcp_metadata import read_metadata
from titanlike.checkpoint.discovery import resolve
from titanlike.checkpoint.integrity import (
    METADATA,
    DamagedCheckpoint,
    check_all,
    check_quick,
    read_manifest,
    reading,
)
from titanlike.checkpoint.piece_sums import PieceSums, read_pieces
from titanlike.checkpoint.storage import Storage

MOST_BYTES = 2**24  # of the rows that are in memory at a time
_READ = 2**22  # bytes read at a time
# what reading a record of another form raises
_OTHER_FORM = (
    *(zipfile.BadZipFile, pickle.UnpicklingError, StopIteration, struct.error),
    *(KeyError, ValueError, TypeError, AttributeError),
)


class TensorRows:
    """Reads the tensors of an intact checkpoint. What is read is checked."""

    def __init__(self, folder: Storage, metadata: Metadata, sums: PieceSums | None) -> None:
        """sums: of the pieces; None where the files have been checked already, as a whole."""
        self.folder, self._metadata, self._sums = folder, metadata, sums

    @classmethod
    def open(cls, key: str, location: str) -> TensorRows:
        """Of a checkpoint, or of a run's newest one. Raises ValueError, naming `key`, where there is
        none; DamagedCheckpoint, UnsafeCheckpoint."""
        folder = resolve(key, location)
        files = read_manifest(folder)
        sums = read_pieces(folder, files)
        (check_all if sums is None else check_quick)(folder)  # a piece is checked when it is read
        return cls(folder, read_metadata(folder, files), sums)

    def entries(self, prefix: str) -> dict[str, TensorStorageMetadata]:
        """Shapes and dtypes of the tensors whose names begin with a prefix, without it."""
        return {
            name.removeprefix(prefix): entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }

    def rows(self, name: str, most_bytes: int = MOST_BYTES) -> Iterator[Tensor]:
        """A tensor's rows (along its first dimension), as many at a time as take `most_bytes`."""
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        size, dtype = list(entry.size) or [1], entry.properties.dtype
        step = max(1, most_bytes // max(1, prod(size[1:]) * dtype.itemsize))
        waiting = sorted(entry.chunks, key=lambda chunk: tuple(chunk.offsets))
        opened: list[_Piece] = []
        try:
            for start in range(0, size[0], step):
                stop = min(start + step, size[0])
                slab = torch.empty([stop - start, *size[1:]], dtype=dtype)
                filled = 0
                while waiting and (waiting[0].offsets or [0])[0] < stop:
                    chunk = waiting.pop(0)
                    if prod(chunk.sizes):
                        opened.append(self._open(name, chunk, dtype))
                for piece in opened:
                    filled += piece.read_into(slab, start)
                opened = [piece for piece in opened if not piece.close_at_end()]
                if filled != slab.numel():
                    reason = f"has {filled:,} of the {slab.numel():,} values of rows of {name}"
                    raise DamagedCheckpoint(self.folder, METADATA, reason)
                yield slab if entry.size else slab[0]
        finally:
            for piece in opened:
                piece.close()

    def whole(self, name: str) -> Tensor:
        """A tensor."""
        found = list(self.rows(name))
        if len(found) == 1:
            return found[0]
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        return torch.cat(found) if found else torch.empty(entry.size, dtype=entry.properties.dtype)

    def _open(self, name: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> _Piece:
        places = self._metadata.storage_data
        info = places.get(MetadataIndex(name, chunk.offsets)) or places.get(MetadataIndex(name))
        if info is None or getattr(info, "transform_descriptors", None):
            raise DamagedCheckpoint(self.folder, METADATA, f"does not say where {name} is")
        place = self.folder, info.relative_path, info.offset, info.length
        return _Piece(place, chunk, dtype, self._sums)


class _Piece:
    """The values of a block, read in their order."""

    def __init__(
        self,
        place: tuple[Storage, str, int, int],
        chunk: ChunkStorageMetadata,
        dtype: torch.dtype,
        sums: PieceSums | None,
    ) -> None:
        """place: folder, file, and where in it: begin and length in bytes."""
        self._folder, self._file, self._begin, self._length = place
        self._sums, self._dtype = sums, dtype
        self._resources = contextlib.ExitStack()
        self._read = self._resources.enter_context(self._folder.reader(self._file))
        self._offsets, self._sizes = list(chunk.offsets) or [0], list(chunk.sizes) or [1]
        self._hasher, self._at, self._row = xxhash.xxh3_128(), 0, 0
        values = prod(self._sizes) * dtype.itemsize
        self._kept: Tensor | None = None  # a record of another form, read as a whole
        window = _Window(self._read, self._begin, self._length)
        with reading(self._folder, self._file):
            begin = _begin_of_values(window, dtype, self._sizes)
        if begin is None or begin + values > self._length:
            self._kept = self._load()
        else:
            self._take(begin)

    def read_into(self, slab: Tensor, start: int) -> int:
        """Copy the next rows, those that `slab` has from the tensor's row `start` on; their number
        of values."""
        first = self._offsets[0] + self._row
        count = min(start + len(slab), self._offsets[0] + self._sizes[0]) - first
        if count <= 0:
            return 0
        inside = zip(self._offsets[1:], self._sizes[1:], strict=True)
        target = slab[(slice(first - start, first - start + count), *_slices(inside))]
        if self._kept is not None:
            target.copy_(self._kept[self._row : self._row + count])
        else:
            numel = count * prod(self._sizes[1:])
            data = bytearray(self._take(numel * self._dtype.itemsize, keep=True))
            values = torch.frombuffer(data, dtype=self._dtype, count=numel)
            target.copy_(values.view(target.shape))
        self._row += count
        return target.numel()

    def close_at_end(self) -> bool:
        """Whether all rows have been read. Raises DamagedCheckpoint where they were other ones."""
        if self._row < self._sizes[0]:
            return False
        if self._kept is None:
            self._take(self._length - self._at)
            self._check()
        self.close()
        return True

    def close(self) -> None:
        self._resources.close()
        self._kept = None

    def _take(self, length: int, keep: bool = False) -> bytes:
        """The next bytes, if they are to be kept."""
        parts, end = [], self._at + length
        while self._at < end:
            data = self._read(self._begin + self._at, min(_READ, end - self._at))
            if not data:
                raise DamagedCheckpoint(self._folder, self._file, "ends too early")
            self._hasher.update(data)
            self._at += len(data)
            if keep:
                parts.append(data)
        return b"".join(parts)

    def _check(self) -> None:
        if self._sums is not None:
            place = self._file, self._begin, self._length
            self._sums.check_digest(*place, self._hasher.digest())

    def _load(self) -> Tensor:
        data = self._take(self._length, keep=True)
        self._check()
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True).reshape(
            self._sizes
        )


def _slices(inside: Any) -> Iterator[slice]:
    return (slice(offset, offset + size) for offset, size in inside)


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, read: Any, begin: int, length: int) -> None:
        self._read, self._begin, self._length, self._at = read, begin, length, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._length)[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        data = self._read(self._begin + self._at, left if size < 0 else min(size, left))
        self._at += len(data)
        return data


def _begin_of_values(window: Any, dtype: torch.dtype, sizes: list[int]) -> int | None:
    """Where the values of a contiguous tensor begin in a record of torch.save; None where the record
    is of another form."""
    try:
        with zipfile.ZipFile(window) as archive:
            described = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            folder = described.removesuffix("data.pkl")
            form = _Description(io.BytesIO(archive.read(described))).load()
            entry = archive.getinfo(f"{folder}data/{form.storage}")
            little = archive.read(f"{folder}byteorder") == b"little"
        window.seek(entry.header_offset + 26)
        name, extra = struct.unpack("<HH", window.read(4))  # lengths, in the local header
    except _OTHER_FORM:
        return None
    strides = [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    same = [*form.size] == sizes and [*form.stride] == strides if form.size else sizes == [1]
    plain = entry.compress_type == zipfile.ZIP_STORED and little and not form.offset
    if not same or not plain or entry.file_size != prod(sizes) * dtype.itemsize:
        return None
    return entry.header_offset + 30 + name + extra


class _Form:
    """What a record says of its tensor."""

    def __init__(self, storage: str, offset: int, size: Any, stride: Any, *_: Any) -> None:
        self.storage, self.offset, self.size, self.stride = storage, offset, size, stride


class _Description(pickle.Unpickler):
    """Reads a record's description of its tensor; calls nothing but `_Form` and `dict`."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name.startswith("_rebuild_tensor_v"):
            return _Form
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch":  # FloatStorage; float32
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, found: Any) -> str:
        return str(found[2])
