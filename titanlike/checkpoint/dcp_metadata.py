"""Reading DCP's `.metadata` without executing code.

DCP's own reader calls `pickle.load` on `.metadata` (torch 2.11 to 2.15), so that a checkpoint from
an untrusted source can execute any code. Here the file may name only the few classes that DCP needs.
"""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from titanlike.checkpoint.integrity import (
    METADATA,
    DamagedCheckpoint,
    Manifest,
    UnsafeCheckpoint,
    read_checked,
)
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.tensor_index import unpickling
from titanlike.torch_private.distributed_checkpoint import read_newer_checkpoints

# What a `.metadata` file may name. torch.float32 and the like are read as attributes of torch.
_DCP = "torch.distributed.checkpoint."
_ALLOWED = {
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"dict", "list", "set", "tuple"},
    "torch": {"Size", *(n for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype))},
    "torch.serialization": {"_get_layout"},
    f"{_DCP}metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    f"{_DCP}filesystem": {"_StorageInfo", "_StoragePrefix"},
}


class RestrictedUnpickler(pickle.Unpickler):
    """Resolves only the allowed names, and undoes and refuses any change to them.

    The BUILD instruction sets attributes of whatever object it is given, classes included.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._resolved: list[tuple[Any, dict[str, Any]]] = []  # with their attributes before

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise UnsafeCheckpoint(f"asks for {module}.{name}, which no checkpoint needs")
        found = super().find_class(module, name)
        if hasattr(found, "__dict__"):
            self._resolved.append((found, dict(vars(found))))
        return found

    def load(self) -> Any:
        try:
            return super().load()
        finally:
            names = []
            for resolved, before in reversed(self._resolved):
                now = dict(vars(resolved))
                changed = {key for key in now | before if now.get(key) is not before.get(key)}
                for key in changed - {"__dict__", "__weakref__"}:
                    if key in before:
                        setattr(resolved, key, before[key])
                    else:
                        delattr(resolved, key)
                if changed:
                    names.append(f"{resolved.__module__}.{resolved.__qualname__}")
            if names:
                raise UnsafeCheckpoint(f"changes {', '.join(names)}")


def read_metadata(folder: Storage, files: Manifest | None = None) -> Metadata:
    """Names, shapes, dtypes and files of a checkpoint's tensors.

    files: the manifest with its checksum; None = not compared. Raises DamagedCheckpoint,
    UnsafeCheckpoint.
    """
    read_newer_checkpoints()
    data = None if files is None else read_checked(folder, files, METADATA)
    with unpickling(folder):
        metadata = RestrictedUnpickler(folder.read(METADATA) if data is None else data).load()
    if not isinstance(metadata, Metadata):
        raise DamagedCheckpoint(folder, METADATA, "has no description of tensors")
    for info in (metadata.storage_data or {}).values():
        if not isinstance(getattr(info, "relative_path", None), str):
            raise DamagedCheckpoint(folder, METADATA, "does not name the files of its tensors")
        if os.path.basename(info.relative_path) != info.relative_path:
            raise UnsafeCheckpoint(
                f"checkpoint {folder} is refused: {METADATA} names a file outside the folder, "
                f"{info.relative_path!r}"
            )
    return metadata
