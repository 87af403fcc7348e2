"""Rewrites checkpoints of titanlike's formats 1 and 2 (torch's distributed checkpoints) as safetensors
and JSON: what `titanlike checkpoint convert FOLDER` runs.

In place: the new files are written beside the old ones, which go once the new ones are committed; so
a conversion that is cut off is begun again. Each rank's file becomes a rank's file, a piece in memory
at a time. Code in a pickle is not run: names outside of an allowlist are refused.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor

from titanlike.checkpoint import integrity
from titanlike.checkpoint.format import SavedTensor, checksum
from titanlike.checkpoint.staging import write_pieces
from titanlike.checkpoint.storage import MARKER, OLD_INDEX, STATE, DamagedCheckpoint, Storage
from titanlike.data.kinds import READERS
from titanlike.data.stream_source import dumped

_DCP = "torch.distributed.checkpoint"
_FILES, _MOST = "files.json", 2**34  # sizes and checksums; bytes of a small file


def convert_all(checkpoints: list[Storage], say: Callable[[str], object]) -> bool:
    """Convert the complete ones among these; return whether all of an old format were."""
    done = True
    for folder in checkpoints:
        names = folder.names()
        old = [n for n in names if n in (OLD_INDEX, _FILES, "pieces.json") or n.endswith(".distcp")]
        if not old:
            continue
        if MARKER not in names:
            say(f"{folder.name}: left as it is, for it has no {MARKER}")
            done = False
            continue
        if OLD_INDEX in names:
            _convert(folder)
        old.sort(key=lambda name: name != OLD_INDEX)  # without that one the others are remains
        for name in old:
            folder.remove(name)
        say(f"{folder.name}: converted")
    return done


def _convert(folder: Storage) -> None:
    marker = _read(folder, MARKER).decode().strip().rpartition("\n")[2]
    manifest = _read(folder, _FILES)
    if checksum(manifest) != marker:  # converted, and cut off before anything was removed
        return integrity.check_all(folder)
    for name, (size, expected) in json.loads(manifest).items():
        _check(folder, name, size, expected)
    state = json.loads(_read(folder, STATE))
    described = _Unpickler(io.BytesIO(_read(folder, OLD_INDEX))).load()
    of_files: dict[str, list[tuple[SavedTensor, Any, Any]]] = {}
    for index, place in described.storage_data.items():
        entry = described.state_dict_metadata[index.fqn]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        saved = SavedTensor(index.fqn, dtype, tuple(entry.size))
        of_files.setdefault(place.relative_path, []).append((saved, index.offset, place))
    written = []
    for rank, (file, entries) in enumerate(sorted(of_files.items())):
        if os.path.basename(file) != file:
            raise DamagedCheckpoint(folder, OLD_INDEX, f"names a file outside, {file!r}")
        written += write_pieces(folder, rank, _pieces(folder, file, entries))
    integrity.commit(folder, written, state)


def _pieces(
    folder: Storage, file: str, entries: list[tuple[SavedTensor, Any, Any]]
) -> Iterator[tuple[SavedTensor, tuple[int, ...], Tensor]]:
    with folder.reader(file) as read_into:
        for saved, offset, place in entries:
            record = bytearray(place.length)
            read_into(place.offset, record)
            block = torch.load(io.BytesIO(record), map_location="cpu", weights_only=True)
            if saved.name.removeprefix(READERS).isdigit():  # its state was a record of torch.save
                length, step = block[:16].clone().view(torch.int64).tolist()
                content = io.BytesIO(block[16 : 16 + length].numpy().tobytes())
                state = torch.load(content, weights_only=True)
                block = dumped(state["state"], state["first"], step)
                saved = saved._replace(shape=tuple(block.shape))
            yield saved, tuple(offset or (0,) * block.dim()), block


def _check(folder: Storage, name: str, size: int, expected: str) -> None:
    """Raise DamagedCheckpoint unless a file has this size and checksum."""
    hasher, buffer, at = xxhash.xxh3_128(), memoryview(bytearray(2**22)), 0
    with integrity.reading(folder, name), folder.reader(name) as read_into:
        while count := read_into(at, buffer):
            hasher.update(buffer[:count])
            at += count
        if (at, hasher.hexdigest()) != (size, expected):
            raise ValueError(integrity.UNEQUAL)


def _read(folder: Storage, name: str) -> bytes:
    with integrity.reading(folder, name), folder.reader(name) as read_into:
        data = bytearray(min(folder.size(name), _MOST))
        read_into(0, data)
        return bytes(data)


class _Unpickler(pickle.Unpickler):
    """Of `.metadata`: resolves what torch's description of tensors consists of, and nothing else."""

    _NAMES = {
        **dict.fromkeys(["dict", "list", "set", "tuple"], "builtins"),
        **dict.fromkeys(["OrderedDict", "defaultdict"], "collections"),
        **dict.fromkeys(["Size"], "torch"),
        **dict.fromkeys(["_get_layout"], "torch.serialization"),
        **dict.fromkeys(["_StorageInfo", "_StoragePrefix"], f"{_DCP}.filesystem"),
        **dict.fromkeys(
            [
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            ],
            f"{_DCP}.metadata",
        ),
    }

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or self._NAMES.get(name) == module:
            return super().find_class(module, name)
        raise ValueError(f"{OLD_INDEX} asks for {module}.{name}, which no checkpoint needs")
