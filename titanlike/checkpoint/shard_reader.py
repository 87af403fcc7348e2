"""A checkpoint outside of training: its model, and its tensors, a few rows at a time.

Tensors of any layout are read without a whole one in memory. A chunk (a block of a tensor) is a record
of torch.save, a ZIP file that is not compressed: the values lie in it in a row, and are read as they are
needed. The chunk's checksum is computed on the way, and compared when its last row has been read.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import struct
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import xxhash
from torch import Tensor

from titanlike.checkpoint.discovery import resolve
from titanlike.checkpoint.integrity import METADATA, DamagedCheckpoint, read_state, reading
from titanlike.checkpoint.metadata import CheckpointHeader, Chunk, SavedTensor, open_header
from titanlike.checkpoint.storage import Storage
from titanlike.config.errors import ConfigError
from titanlike.config.imports import imports_line
from titanlike.config.parse import parse
from titanlike.config.schema import Config, Custom
from titanlike.models.registry import MODELS, resolve_model

MOST_BYTES = 2**24  # of the rows that are in memory at a time
_READ = 2**22  # bytes read at a time
# what reading a record of another form raises
_OTHER_FORM = (
    *(zipfile.BadZipFile, pickle.UnpicklingError, StopIteration, struct.error),
    *(KeyError, ValueError, TypeError, AttributeError),
)


class ShardReader:
    """Reads the tensors of an intact checkpoint. What is read is checked."""

    def __init__(self, header: CheckpointHeader) -> None:
        self.header, self.folder = header, header.folder

    @classmethod
    def open(cls, key: str, location: str) -> ShardReader:
        """Of a checkpoint, or of a run's newest one. Raises ValueError, naming `key`, where there is
        none; DamagedCheckpoint, UnsafeCheckpoint."""
        return cls(open_header(resolve(key, location)))

    def entries(self, prefix: str) -> dict[str, SavedTensor]:
        """The tensors whose names begin with a prefix, without it."""
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.header.tensors.items()
            if name.startswith(prefix)
        }

    def rows(self, name: str, most_bytes: int = MOST_BYTES) -> Iterator[Tensor]:
        """A tensor's rows (along its first dimension), as many at a time as take `most_bytes`."""
        saved = self.header.tensors[name]
        size, dtype = list(saved.shape) or [1], dtype_of(saved)
        step = max(1, most_bytes // max(1, prod(size[1:]) * dtype.itemsize))
        waiting = sorted(saved.chunks, key=lambda chunk: chunk.offsets)
        opened: list[_ChunkStream] = []
        try:
            for start in range(0, size[0], step):
                stop = min(start + step, size[0])
                slab = torch.empty([stop - start, *size[1:]], dtype=dtype)
                filled = 0
                while waiting and (waiting[0].offsets or [0])[0] < stop:
                    chunk = waiting.pop(0)
                    if prod(chunk.sizes):
                        opened.append(_ChunkStream(self.header, name, chunk, dtype))
                for stream in opened:
                    filled += stream.read_into(slab, start)
                opened = [stream for stream in opened if not stream.close_at_end()]
                if filled != slab.numel():
                    reason = f"has {filled:,} of the {slab.numel():,} values of rows of {name}"
                    raise DamagedCheckpoint(self.folder, METADATA, reason)
                yield slab if saved.shape else slab[0]
        finally:
            for stream in opened:
                stream.close()

    def whole(self, name: str) -> Tensor:
        """A tensor."""
        slabs, saved = list(self.rows(name)), self.header.tensors[name]
        if len(slabs) == 1:
            return slabs[0]
        return torch.cat(slabs) if slabs else torch.empty(saved.shape, dtype=dtype_of(saved))


def dtype_of(tensor: SavedTensor) -> torch.dtype:
    return getattr(torch, tensor.dtype)


class _ChunkStream:
    """The values of a chunk, read in their order."""

    def __init__(
        self, header: CheckpointHeader, name: str, chunk: Chunk, dtype: torch.dtype
    ) -> None:
        if chunk.file is None or not chunk.plain:
            raise DamagedCheckpoint(header.folder, METADATA, f"does not say where {name} is")
        self._folder, self._file, self._checksums = header.folder, chunk.file, header.checksums
        self._begin, self._length, self._dtype = chunk.begin, chunk.length, dtype
        self._resources = contextlib.ExitStack()
        self._read = self._resources.enter_context(self._folder.reader(self._file))
        self._offsets, self._sizes = list(chunk.offsets) or [0], list(chunk.sizes) or [1]
        self._hasher, self._at, self._row = xxhash.xxh3_128(), 0, 0
        values = prod(self._sizes) * dtype.itemsize
        self._kept: Tensor | None = None  # a record of another form, read as a whole
        window = FileSlice(self._read, self._begin, self._length)
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
        columns = (slice(offset, offset + size) for offset, size in inside)
        target = slab[(slice(first - start, first - start + count), *columns)]
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
        if self._checksums is not None:
            place = self._file, self._begin, self._length
            self._checksums.check(*place, self._hasher.digest())

    def _load(self) -> Tensor:
        data = self._take(self._length, keep=True)
        self._check()
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True).reshape(
            self._sizes
        )


class FileSlice(io.RawIOBase):
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
            form = _TensorUnpickler(io.BytesIO(archive.read(described))).load()
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


class PickledTensorHeader:
    """What a record says of its tensor."""

    def __init__(self, storage: str, offset: int, size: Any, stride: Any, *_: Any) -> None:
        self.storage, self.offset, self.size, self.stride = storage, offset, size, stride


class _TensorUnpickler(pickle.Unpickler):
    """Reads a record's description of its tensor; calls nothing but `PickledTensorHeader` and `dict`."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name.startswith("_rebuild_tensor_v"):
            return PickledTensorHeader
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch":  # FloatStorage; float32
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, storage: Any) -> str:
        return str(storage[2])


# --- its model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint's model with all arguments of its constructor."""

    model: Custom
    config: Config
    step: int
    complete: bool = True  # else the model has the arguments that its config gives


def saved_model(folder: Storage) -> SavedModel:
    """Raises ValueError where the checkpoint does not say what it is of; DamagedCheckpoint."""
    state = read_state(folder)
    plain: dict[str, Any] = state.get("config", {})
    if not plain:
        raise ValueError(
            f"{folder} does not say which model it has: it was restored from a file of another "
            "program; train a step from it first (checkpoint.start_from)"
        )
    config, _ = parse(plain)  # keys that later versions lack change no model
    if "model" in state:
        args = {
            key: value for key, value in state["model"].items() if key not in ("name", "tp_plan")
        }
        return SavedModel(Custom(state["model"]["name"], args), config, state["step"])
    if config.model.name not in MODELS:  # else its code would run here
        return SavedModel(config.model, config, state["step"], complete=False)
    try:  # of an earlier version
        return SavedModel(resolve_model(config), config, state["step"])
    except ConfigError as error:
        raise ValueError(f"{folder}: its model is not known: {error}") from None


def model_to_build(saved: SavedModel, place: object, trust_code: bool) -> Custom:
    """The model, if its code may run here: titanlike's own, or that of others if the user has said
    so; then what is imported is printed first. Raises ValueError."""
    name = saved.model.name
    if name in MODELS:
        return saved.model
    if not trust_code:
        raise ValueError(
            f"{place} names its model {name}, which is none of titanlike's ({', '.join(MODELS)}): "
            "its code would run here; if you trust both, add --trust-code"
        )
    print(imports_line(name, f"the model of {place}"), file=sys.stderr)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the user's models
    return saved.model if saved.complete else resolve_model(saved.config)


def add_evaluation(checkpoint: Storage, result: dict[str, Any]) -> str:
    """Append to what was measured of a checkpoint, a JSON list beside it; where that is."""
    folder, name = checkpoint.parent, f"{checkpoint.name}.evaluations.json"
    results: Any = []
    if folder.exists(name):
        with contextlib.suppress(ValueError):
            results = json.loads(folder.read(name))
    results = results if isinstance(results, list) else []
    text = json.dumps([*results, {"time": time.time(), **result}], indent=1)
    folder.write(name, text.encode() + b"\n")
    return f"{folder}/{name}"
