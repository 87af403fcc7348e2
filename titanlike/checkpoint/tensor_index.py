"""The tensors that DCP's `.metadata` lists, read without torch and without executing code.

For commands that read no tensors: importing torch takes seconds. Classes are replaced by inert ones;
what training loads is read by dcp_metadata.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from titanlike.checkpoint.integrity import METADATA, DamagedCheckpoint, Manifest, UnsafeCheckpoint
from titanlike.checkpoint.storage import Storage, UnreadableFile

MODEL, OPTIMIZER, RNG = "model.", "optimizer.state.", "rng."  # prefixes of names
_TORCH = re.compile(r"torch(\.serialization|\.distributed\.checkpoint\.(metadata|filesystem))?")
_PLAIN = {"dict": dict, "list": list, "set": set, "tuple": tuple}
_COLLECTIONS = {"OrderedDict": OrderedDict, "defaultdict": defaultdict}


@dataclass(frozen=True)
class Shard:
    """A block of a tensor, and its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str | None = None  # None: no file is listed
    begin: int = 0
    length: int = 0
    plain: bool = True  # not compressed or the like


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a checkpoint."""

    name: str
    dtype: str  # float32
    shape: tuple[int, ...]
    shards: list[Shard]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * _item_size(self.dtype)


def read_entries(folder: Storage) -> list[TensorEntry]:
    """The tensors in a checkpoint, sorted by name. Raises DamagedCheckpoint, UnsafeCheckpoint."""
    with unpickling(folder):
        metadata = _InertUnpickler(io.BytesIO(folder.read(METADATA))).load()
        return sorted(_entries(metadata), key=lambda entry: entry.name)


@contextlib.contextmanager
def unpickling(folder: Storage) -> Iterator[None]:
    """Name the checkpoint in errors. Raises DamagedCheckpoint, UnsafeCheckpoint."""
    try:
        yield
    except FileNotFoundError:
        raise DamagedCheckpoint(folder, METADATA, "is missing") from None
    except UnreadableFile:
        raise
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(
            f"checkpoint {folder} is refused: {METADATA} {error}; it may execute code on your "
            "machine: take a checkpoint from a source that you trust"
        ) from None
    except Exception as error:  # pickle raises anything on damaged bytes
        reason = f"cannot be read ({type(error).__name__})"
        raise DamagedCheckpoint(folder, METADATA, reason) from None


def missing_data(entries: list[TensorEntry], files: Manifest) -> Iterator[str]:
    """Texts that say which data of the tensors cannot be in the files."""
    for entry in entries:
        present = sum(prod(shard.sizes) for shard in entry.shards)
        if present != entry.numel:
            yield f"{METADATA} has {present:,} of the {entry.numel:,} elements of {entry.name}"
        for shard in entry.shards:
            place = f"{entry.name} at {list(shard.offsets)}"
            if shard.file is None:
                yield f"{METADATA} names no file for {place}"
            elif shard.file not in files:
                yield f"{METADATA} names {shard.file}, which is not in the manifest, for {place}"
            elif shard.begin + shard.length > files[shard.file][0]:
                yield f"{shard.file} ends before the bytes of {place}"
            elif shard.plain and shard.length < prod(shard.sizes) * _item_size(entry.dtype):
                yield f"{shard.file} has too few bytes for {place}"


def _entries(metadata: Any) -> Iterator[TensorEntry]:
    storage = {
        (index.fqn, tuple(getattr(index, "offset", None) or ())): info
        for index, info in (metadata.storage_data or {}).items()
    }
    for name, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):  # objects, which titanlike neither writes nor reads
            continue
        shards = []
        for chunk in entry.chunks:
            shard = Shard(tuple(chunk.offsets), tuple(chunk.sizes))
            if info := storage.get((name, shard.offsets)) or storage.get((name, ())):
                plain = not getattr(info, "transform_descriptors", None)
                place = (info.relative_path, info.offset, info.length)
                shard = Shard(shard.offsets, shard.sizes, *place, plain)
            shards.append(shard)
        yield TensorEntry(name, entry.properties.state[0], tuple(entry.size), shards)


class _InertUnpickler(pickle.Unpickler):
    """Returns plain objects with the attributes that are in the file; calls nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "builtins" and name in _PLAIN:
            return _PLAIN[name]
        if module == "collections" and name in _COLLECTIONS:
            return _COLLECTIONS[name]
        if (module, name) == ("torch", "Size"):
            return tuple
        layout = (module, name) == ("torch.serialization", "_get_layout")
        if layout or module.startswith("pathlib") or name == "_MEM_FORMAT_ENCODING":
            return lambda *parts: "/".join(map(str, parts))
        if module == "torch" and "." not in name:  # float32
            return name
        if not _TORCH.fullmatch(module):
            raise UnsafeCheckpoint(f"asks for {module}.{name}, which no checkpoint needs")
        return _Inert


class _Inert:
    def __setstate__(self, state: Any) -> None:
        """A dataclass has a dict as its state, TensorProperties a tuple."""
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


def _item_size(dtype: str) -> int:
    """Bytes of an element: 4 of float32, 1 of float8_e4m3fn."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1
