"""DCP's writer and reader on a `Storage`: with checksums, a commit, and without executing code.

DCP's own reader calls `torch.load(weights_only=False)` on entries that are not tensors (torch 2.11
to 2.15), which can execute any code; here a checkpoint has tensors only.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from typing import IO, Any

import xxhash
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlike.checkpoint.integrity import (
    DamagedCheckpoint,
    Manifest,
    UnsafeCheckpoint,
    check_sizes,
    commit,
    delete_checkpoint,
)
from titanlike.checkpoint.storage import Storage
from titanlike.device.accelerator import set_device, started


class StorageWriter(FileSystemWriter):
    """Writes a checkpoint's files, and commits it on the coordinator when all are written.

    A save that fails on any rank fails on all: DCP gathers the errors.
    """

    def __init__(
        self, folder: Storage, state: dict[str, Any], committed: Callable[[Manifest], None]
    ) -> None:
        """state: for state.json. committed: called on the coordinator after the commit."""
        super().__init__(str(folder), sync_files=False)  # `_Files` syncs local files
        self._folder, self._state, self._committed = folder, state, committed
        self._files = _Files(folder)
        self.fs, self.path = self._files, ""
        self._device = started()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._device is not None:
            set_device(self._device)  # a new thread has device 0
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            # of a killed save, or of a run that restarted from an earlier step
            delete_checkpoint(self._folder)
            self._folder.make()

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner).value()
        future: Future[list[Any]] = Future()
        future.set_result([*written, self._files.written])  # to the coordinator
        return future

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        files: Manifest = {}
        for *_, written in results:
            files |= written
        super().finish(metadata, [dcp_results for *dcp_results, _ in results])
        files |= self._files.written  # with .metadata
        try:
            check_sizes(self._folder, files)
        except DamagedCheckpoint as damage:  # written by another rank, not visible here
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


class StorageReader(FileSystemReader):
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
    """DCP's planner, which refuses entries that it would unpickle."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise UnsafeCheckpoint(f"{read_item.storage_index.fqn} in the checkpoint is not a tensor")


class _Files(FileSystemBase):
    """A `Storage` as DCP's file system; paths are names in it. Sums up sizes and checksums."""

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
            stream = _ChecksumStream(raw)
            try:
                yield stream
            except RuntimeError:
                if stream.error is not None:  # torch.save raises an error of its own instead
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
        """Of `.metadata`, which DCP writes to a temporary file first."""
        old, new = os.fspath(path), os.fspath(new_path)
        self._folder.write(new, self._folder.read(old))
        self._folder.remove(old)
        self.written[new] = self.written.pop(old)

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


class _ChecksumStream:
    """A stream for torch.save, which writes sequentially."""

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
        """`create_stream` closes the file."""
