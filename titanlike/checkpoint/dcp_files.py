"""How torch's distributed checkpoint (DCP) writes and reads files: on a `Storage`, with checksums,
and without running anything that a file asks for.

DCP's own reader calls `pickle.load` on `.metadata`, and `torch.load(weights_only=False)` on entries
that are no tensors (torch 2.11 to 2.15): a checkpoint from somebody else can run any code with
that. Here `.metadata` may name the few classes that DCP needs, and there are no entries but tensors.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import torch
import xxhash
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.whole import (
    METADATA,
    Damaged,
    Manifest,
    Refused,
    check_sizes,
    commit,
    revoke,
)

# What a `.metadata` file may name. torch.float32 and the like are read as attributes of torch.
_DCP = "torch.distributed.checkpoint."
_ALLOWED = {
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"dict", "list", "set", "tuple"},
    "torch": {"Size"}
    | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)},
    "torch.serialization": {"_get_layout"},
    f"{_DCP}metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}filesystem": {"_StorageInfo", "_StoragePrefix"},
}


class _Unpickler(pickle.Unpickler):
    """Knows the names on the list alone, and lets nothing be changed in them.

    The BUILD instruction sets attributes of whatever it is given, a class, too.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._given: list[tuple[Any, dict[str, Any]]] = []

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise Refused(f"asks for {module}.{name}, which no checkpoint needs")
        found = super().find_class(module, name)
        if hasattr(found, "__dict__"):
            self._given.append((found, dict(vars(found))))
        return found

    def load(self) -> Any:
        try:
            return super().load()
        finally:
            for given, before in reversed(self._given):
                now = dict(vars(given))
                changed = {key for key in now | before if now.get(key) is not before.get(key)}
                for key in changed - {"__dict__", "__weakref__"}:
                    if key in before:
                        setattr(given, key, before[key])
                    else:
                        delattr(given, key)
                if changed:
                    raise Refused(f"changes {given.__module__}.{given.__qualname__}")


def read_metadata(folder: Storage) -> Metadata:
    """DCP's `.metadata`. Raises Damaged, and Refused, which name it; runs nothing from it."""
    try:
        metadata = _Unpickler(folder.read(METADATA)).load()
    except FileNotFoundError:
        raise Damaged(folder, METADATA, "is missing") from None
    except Refused as error:
        raise Refused(
            f"checkpoint {folder} is refused: {METADATA} {error}; it may be there to run "
            "code on your machine: take a checkpoint from a source that you trust"
        ) from None
    except Exception as error:  # pickle raises anything on damaged bytes
        raise Damaged(folder, METADATA, f"cannot be read ({type(error).__name__})") from None
    if not isinstance(metadata, Metadata):
        raise Damaged(folder, METADATA, "holds no description of tensors")
    for info in (metadata.storage_data or {}).values():
        if not isinstance(getattr(info, "relative_path", None), str):
            raise Damaged(folder, METADATA, "does not say where its tensors are")
        if os.path.basename(info.relative_path) != info.relative_path:
            raise Refused(
                f"checkpoint {folder} is refused: {METADATA} names a file outside of it, "
                f"{info.relative_path!r}"
            )
    return metadata


@dataclass(frozen=True)
class _Written:
    """Travels to the coordinator with DCP's own results: the files that a rank has written."""

    files: Manifest


class Writer(FileSystemWriter):
    """Writes a checkpoint's files, and on the coordinator makes it count when all are there.

    A save that fails on any rank fails on all: DCP gathers the errors.
    """

    def __init__(
        self, folder: Storage, state: dict[str, Any], committed: Callable[[Manifest], None]
    ) -> None:
        """state: for state.json. committed: called on the coordinator with what was written."""
        super().__init__(str(folder), sync_files=False)  # `_Files` does it, for what can
        self._folder, self._state, self._committed = folder, state, committed
        self._files = _Files(folder)
        self.fs, self.path = self._files, ""
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a saving thread begins with device 0
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            # of a killed save, or of a run that started again from an earlier step
            revoke(self._folder)
            self._folder.make()

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner).value()
        future: Future[list[Any]] = Future()
        future.set_result([*written, _Written(self._files.written)])
        return future

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        files: Manifest = {}
        plain: list[list[WriteResult]] = []
        for of_rank in results:
            plain.append([result for result in of_rank if isinstance(result, WriteResult)])
            for result in of_rank:
                if isinstance(result, _Written):
                    files |= result.files
        super().finish(metadata, plain)
        files |= self._files.written
        try:
            check_sizes(self._folder, files)
        except Damaged as damage:  # what a rank has written is not to be seen from here
            raise OSError(
                f"{damage.file} {damage.reason}; is {self._folder.parent} on a file system that "
                "all machines share?"
            ) from None
        commit(self._folder, files, self._state)
        self._committed(files)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._folder.name, save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class Reader(FileSystemReader):
    """Reads a checkpoint's tensors."""

    def __init__(self, folder: Storage, metadata: Metadata) -> None:
        super().__init__(str(folder))
        self.fs, self.path = _Files(folder), ""
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan


class TensorsOnly(DefaultLoadPlanner):
    """DCP's planner, without the entries that it would unpickle."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise Refused(f"{read_item.storage_index.fqn} in the checkpoint is no tensor")


class _Files(FileSystemBase):
    """DCP's view of a folder; paths are names in it. Sums up what is written."""

    def __init__(self, folder: Storage) -> None:
        self._folder = folder
        self.written: Manifest = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        name = os.fspath(path)
        with self._folder.open(name, mode) as raw:
            if mode == "rb":
                yield raw
                return
            stream = _Summing(raw)
            try:
                yield stream
            except RuntimeError:
                if stream.error is not None:  # torch.save hides it behind one of its own
                    raise stream.error from None
                raise
            raw.flush()
            if self._folder.local:
                os.fsync(raw.fileno())
        self.written[name] = (stream.size, stream.hasher.hexdigest())

    def concat_path(self, path: Any, suffix: str) -> str:
        return suffix

    def init_path(self, path: Any) -> Any:
        return path

    def rename(self, path: Any, new_path: Any) -> None:
        """Of `.metadata`, which DCP writes aside first."""
        data = self._folder.read(os.fspath(path))
        self._folder.write(os.fspath(new_path), data)
        self._folder.remove(os.fspath(path))
        self.written[os.fspath(new_path)] = self.written.pop(os.fspath(path))

    def mkdir(self, path: Any) -> None:
        self._folder.make()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return self._folder.exists(os.fspath(path))

    def rm_file(self, path: Any) -> None:
        self._folder.remove(os.fspath(path))

    def ls(self, path: Any) -> list[str]:
        return self._folder.names()


class _Summing:
    """A stream for torch.save, which writes from front to back."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.size, self.hasher = 0, xxhash.xxh3_128()
        self.error: OSError | None = None  # the first

    def write(self, data: Any) -> int:
        try:
            self._raw.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.hasher.update(data)
        self.size += len(data)
        return len(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._raw.flush()

    def close(self) -> None:
        """Left to `create_stream`."""
