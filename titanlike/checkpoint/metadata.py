"""What a checkpoint's small files say, its tensors among it: read without torch, and without executing code.

DCP's own reader calls `pickle.load` on `.metadata` (torch 2.11 to 2.15), so that a checkpoint from an
untrusted source can execute any code. Here the file may name only the classes that DCP needs, and inert
objects stand in for these.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any

from titanlike.checkpoint.integrity import (
    CHUNKS,
    METADATA,
    ChunkChecksums,
    DamagedCheckpoint,
    Manifest,
    UnsafeCheckpoint,
    check_sizes,
    check_sums,
    read_checked,
    read_chunk_checksums,
    read_manifest,
    read_state,
    reading,
)
from titanlike.checkpoint.storage import Storage

MODEL, OPTIMIZER, RNG = "model.", "optimizer.state.", "rng."  # prefixes of names


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, and its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str | None = None  # None: no file is listed
    begin: int = 0
    length: int = 0
    plain: bool = True  # not compressed or the like


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint."""

    name: str
    dtype: str  # float32
    shape: tuple[int, ...]
    chunks: list[Chunk]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * _item_size(self.dtype)


@dataclass(frozen=True)
class CheckpointHeader:
    """A checkpoint's small files, found right."""

    folder: Storage
    state: dict[str, Any]
    tensors: dict[str, SavedTensor]  # by name
    objects: frozenset[str]  # names of entries that are no tensors, which are never read
    checksums: ChunkChecksums | None  # None: the tensors' files have been read and found right


def read_header(
    folder: Storage, files: Manifest, rank: int = 0, ranks: int = 1
) -> CheckpointHeader:
    """Read and check the small files of a checkpoint with this manifest.

    A checkpoint of an older version has no checksums of its chunks: of that one all files are read and
    checked, a share on each rank. Raises DamagedCheckpoint, UnsafeCheckpoint.
    """
    if CHUNKS not in files:
        check_sums(folder, files, sorted(files)[rank::ranks])
    state = read_state(folder, files)
    tensors, objects = _read_metadata(folder, read_checked(folder, files, METADATA))
    checksums = read_chunk_checksums(folder, files)
    return CheckpointHeader(folder, state, tensors, objects, checksums)


def open_header(folder: Storage) -> CheckpointHeader:
    """`read_header` of a committed checkpoint whose files have the sizes that were written."""
    files = read_manifest(folder)
    check_sizes(folder, files)
    return read_header(folder, files)


def read_tensors(folder: Storage) -> dict[str, SavedTensor]:
    """The tensors of a checkpoint that may be damaged, by name. Raises DamagedCheckpoint, UnsafeCheckpoint."""
    with reading(folder, METADATA):
        return _read_metadata(folder, folder.read(METADATA))[0]


def missing_data(tensors: dict[str, SavedTensor], files: Manifest) -> Iterator[str]:
    """Say which data of the tensors cannot be in the files."""
    for tensor in tensors.values():
        present = sum(prod(chunk.sizes) for chunk in tensor.chunks)
        if present != tensor.numel:
            yield f"{METADATA} has {present:,} of the {tensor.numel:,} elements of {tensor.name}"
        for chunk in tensor.chunks:
            place = f"{tensor.name} at {list(chunk.offsets)}"
            if chunk.file is None:
                yield f"{METADATA} names no file for {place}"
            elif chunk.file not in files:
                yield f"{METADATA} names {chunk.file}, which is not in the manifest, for {place}"
            elif chunk.begin + chunk.length > files[chunk.file][0]:
                yield f"{chunk.file} ends before the bytes of {place}"
            elif chunk.plain and chunk.length < prod(chunk.sizes) * _item_size(tensor.dtype):
                yield f"{chunk.file} has too few bytes for {place}"


def _item_size(dtype: str) -> int:
    """Bytes of an element: 4 of float32, 1 of float8_e4m3fn."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


# --- `.metadata` ---------------------------------------------------------------------------------


def _read_metadata(folder: Storage, data: bytes) -> tuple[dict[str, SavedTensor], frozenset[str]]:
    """The tensors, sorted by name, and the names of other entries."""
    try:
        metadata = _InertUnpickler(io.BytesIO(data)).load()
        described = hasattr(metadata, "state_dict_metadata")
        storage_data = (described and metadata.storage_data) or {}
        files = [getattr(place, "relative_path", None) for place in storage_data.values()]
        tensors, objects = _entries(metadata, storage_data) if described else ({}, frozenset())
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(
            f"checkpoint {folder} is refused: {METADATA} {error}; it may execute code on your "
            "machine: take a checkpoint from a source that you trust"
        ) from None
    except Exception as error:  # pickle raises anything on damaged bytes
        reason = f"cannot be read ({type(error).__name__})"
        raise DamagedCheckpoint(folder, METADATA, reason) from None
    if not described:
        raise DamagedCheckpoint(folder, METADATA, "has no description of tensors")
    for file in files:
        if not isinstance(file, str):
            raise DamagedCheckpoint(folder, METADATA, "does not name the files of its tensors")
        if os.path.basename(file) != file:
            raise UnsafeCheckpoint(
                f"checkpoint {folder} is refused: {METADATA} names a file outside the folder, {file!r}"
            )
    return tensors, objects


def _entries(
    metadata: Any, storage_data: dict[Any, Any]
) -> tuple[dict[str, SavedTensor], frozenset[str]]:
    places = {
        (key.fqn, _integers(getattr(key, "offset", None) or ())): place
        for key, place in storage_data.items()
    }
    tensors, objects = {}, set()
    for name, entry in sorted(metadata.state_dict_metadata.items()):
        if not hasattr(entry, "chunks"):  # an object, which titanlike neither writes nor reads
            objects.add(name)
            continue
        chunks = []
        for block in entry.chunks:
            chunk = Chunk(_integers(block.offsets), _integers(block.sizes))
            if place := places.get((name, chunk.offsets)) or places.get((name, ())):
                begin, length = _integers((place.offset, place.length))
                plain = not getattr(place, "transform_descriptors", None)
                where = place.relative_path, begin, length
                chunk = Chunk(chunk.offsets, chunk.sizes, *where, plain)
            chunks.append(chunk)
        dtype = entry.properties.state[0]
        tensors[name] = SavedTensor(name, dtype, _integers(entry.size), chunks)
    return tensors, frozenset(objects)


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(map(index, values))


_DCP = "torch.distributed.checkpoint."
_PLAIN: dict[tuple[str, str], Any] = {
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "set"): set,
    ("builtins", "tuple"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    ("torch", "Size"): tuple,
}
_CALLED = {("torch.serialization", "_get_layout"), (f"{_DCP}metadata", "_MEM_FORMAT_ENCODING")}
_CLASSES = {
    f"{_DCP}metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata"),
    },
    f"{_DCP}filesystem": {"_StorageInfo", "_StoragePrefix"},
}
_DTYPE = re.compile(r"bool|bfloat16|(float|complex|q?u?int|bits)\d\w*")


class _InertUnpickler(pickle.Unpickler):
    """Returns plain objects with the attributes that are in the file; resolves no other names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if (module, name) in _CALLED:
            return lambda *parts: "/".join(map(str, parts))
        if module == "torch" and _DTYPE.fullmatch(name):
            return name
        if name in _CLASSES.get(module, ()):
            return _Inert
        raise UnsafeCheckpoint(f"asks for {module}.{name}, which no checkpoint needs")


class _Inert:
    def __setstate__(self, *state: Any) -> None:
        """Keep what a dataclass had, a dict; or TensorProperties, a tuple."""
        if not state:  # BUILD was given the class, which GLOBAL has named
            raise UnsafeCheckpoint("changes a class that it names")
        if isinstance(state[0], dict):
            self.__dict__.update(state[0])
        else:
            self.state = state[0]
