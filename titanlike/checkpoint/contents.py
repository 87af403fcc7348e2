"""What a checkpoint holds, read from DCP's `.metadata` without torch and without running anything.

For tools that only look: torch takes seconds to import. The classes that the file names are
replaced by inert ones; what training loads goes through dcp_files.read_metadata.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.whole import METADATA, Damaged, Manifest, Refused

MODEL, OPTIMIZER, RNG = "model.", "optimizer.state.", "rng."  # how the names begin
_TORCH = re.compile(r"torch(\.serialization|\.distributed\.checkpoint\.(metadata|filesystem))?")
_PLAIN = {"dict": dict, "list": list, "set": set, "tuple": tuple}
_COLLECTIONS = {"OrderedDict": OrderedDict, "defaultdict": defaultdict}


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and the bytes of a file that it is in."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str | None  # None: nowhere
    begin: int = 0
    length: int = 0
    plain: bool = True  # not compressed or the like


@dataclass(frozen=True)
class Entry:
    """A tensor in a checkpoint."""

    name: str
    dtype: str  # float32
    shape: tuple[int, ...]
    pieces: list[Piece]

    @property
    def numbers(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numbers * _item_size(self.dtype)


def entries(folder: Storage) -> list[Entry]:
    """The tensors in a checkpoint, sorted by name. Raises Damaged and Refused."""
    try:
        metadata = _Inert(io.BytesIO(folder.read(METADATA))).load()
        return sorted(_entries(metadata), key=lambda entry: entry.name)
    except FileNotFoundError:
        raise Damaged(folder, METADATA, "is missing") from None
    except Refused as error:
        raise Refused(f"checkpoint {folder} is refused: {METADATA} {error}") from None
    except Exception as error:  # pickle raises anything on damaged bytes
        raise Damaged(folder, METADATA, f"cannot be read ({type(error).__name__})") from None


def absent(found: list[Entry], files: Manifest) -> Iterator[str]:
    """What of the tensors cannot be in the files, in words."""
    for entry in found:
        there = sum(prod(piece.sizes) for piece in entry.pieces)
        if there != entry.numbers:
            yield f"{METADATA} has {there:,} of the {entry.numbers:,} numbers of {entry.name}"
        for piece in entry.pieces:
            where = f"{entry.name} at {list(piece.offsets)}"
            if piece.file is None:
                yield f"{METADATA} names no file for {where}"
            elif piece.file not in files:
                yield f"{METADATA} names {piece.file}, which is not in the list, for {where}"
            elif piece.begin + piece.length > files[piece.file][0]:
                yield f"{piece.file} ends before the bytes of {where}"
            elif piece.plain and piece.length < prod(piece.sizes) * _item_size(entry.dtype):
                yield f"{piece.file} has too few bytes for {where}"


def _entries(metadata: Any) -> Iterator[Entry]:
    places = {
        (index.fqn, tuple(getattr(index, "offset", None) or ())): info
        for index, info in (metadata.storage_data or {}).items()
    }
    for name, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):  # objects, which titanlike neither writes nor reads
            continue
        pieces = []
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            info = places.get((name, offsets)) or places.get((name, ()))
            if info is None:
                pieces.append(Piece(offsets, sizes, None))
                continue
            plain = not getattr(info, "transform_descriptors", None)
            place = (info.relative_path, info.offset, info.length)
            pieces.append(Piece(offsets, sizes, *place, plain))
        yield Entry(name, entry.properties.state[0], tuple(entry.size), pieces)


class _Inert(pickle.Unpickler):
    """Gives plain objects with the attributes that are in the file; calls nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "builtins" and name in _PLAIN:
            return _PLAIN[name]
        if module == "collections" and name in _COLLECTIONS:
            return _COLLECTIONS[name]
        if (module, name) == ("torch", "Size"):
            return tuple
        if module.startswith("pathlib") or (module, name) == ("torch.serialization", "_get_layout"):
            return _text
        if name == "_MEM_FORMAT_ENCODING":
            return _text
        if module == "torch" and "." not in name:  # float32
            return name
        if not _TORCH.fullmatch(module):
            raise Refused(
                f"asks for {module}.{name}, which no checkpoint needs; it may be there to run "
                "code on your machine: take a checkpoint from a source that you trust"
            )
        return _Object


class _Object:
    def __setstate__(self, state: Any) -> None:
        """Of a dataclass a dict; TensorProperties has a tuple."""
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


def _text(*parts: Any) -> str:
    return "/".join(map(str, parts))


def _item_size(dtype: str) -> int:
    """Bytes of a number: 4 of float32, 1 of float8_e4m3fn."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1
