"""DCP's writer and reader on a `Storage`: with checksums, a commit, and without executing code.

DCP's own reader calls `torch.load(weights_only=False)` on entries that are not tensors (torch 2.11
to 2.15), which can execute any code; here a checkpoint has tensors only.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlike.checkpoint.integrity import (
    METADATA,
    DamagedCheckpoint,
    Manifest,
    UnsafeCheckpoint,
    check_sizes,
    checksum,
    commit,
    delete_checkpoint,
    reading,
)
from titanlike.checkpoint.piece_sums import PIECES, PieceSums, WrittenFile, dump_pieces
from titanlike.checkpoint.save_plan import SavePlanner
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.tensor_file import write_tensors
from titanlike.device.accelerator import set_device, started
from titanlike.torch_private.distributed_checkpoint import Blocks, written_piece

Write = Callable[[Storage, str, Iterable[Tensor]], WrittenFile]


class StorageWriter(FileSystemWriter):
    """Writes a checkpoint's files, and commits it on the coordinator when all are written.

    A save that fails on any rank fails on all: DCP gathers the errors.
    """

    def __init__(
        self,
        folder: Storage,
        state: dict[str, Any],
        committed: Callable[[Manifest], None],
        write: Write = write_tensors,
    ) -> None:
        """state: for state.json. committed: called on the coordinator after the commit."""
        super().__init__(str(folder), sync_files=False)
        self._folder, self._state, self._committed = folder, state, committed
        self._write = write
        self._planner: SavePlanner | None = None
        captured: Any = _Captured()
        self.fs, self.path = captured, ""
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

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[Any]]:
        """To the coordinator: the file, and the place of each piece unless it knows them."""
        name = f"{plan.storage_data.prefix}0.distcp"
        tensors = (planner.resolve_data(item) for item in plan.items)
        written = self._write(self._folder, name, tensors)
        begins = [0, *written.ends]
        results: list[Any] = [
            written_piece(item.index, name, begin, end - begin)
            for item, begin, end in zip(plan.items, begins, written.ends, strict=False)
        ]
        if isinstance(planner, SavePlanner):
            self.describe_as(planner)
            if planner.known:
                if planner.kept.ends != written.ends:
                    raise RuntimeError(f"{name} has other places than in the save before")
                results = []
            planner.kept.ends = written.ends
        future: Future[list[Any]] = Future()
        future.set_result([*results, written])
        return future

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        written: list[WrittenFile] = [own for *_, own in results]
        files: Manifest = {one.name: (one.size, one.checksum) for one in written}
        described = self.describe(metadata, [pieces for *pieces, _ in results])
        for name, data in ((METADATA, described), (PIECES, dump_pieces(written))):
            self._folder.write(name, data)
            files[name] = (len(data), checksum(data))
        try:
            check_sizes(self._folder, files)
        except DamagedCheckpoint as damage:  # written by another rank, not visible here
            raise OSError(
                f"{damage.file} {damage.reason}; is {self._folder.parent} on a file system that "
                "all machines share?"
            ) from None
        commit(self._folder, files, self._state)
        self._committed(files)

    def describe_as(self, planner: SavePlanner) -> None:
        """The planner that knows `.metadata`, or is to remember it."""
        self._planner = planner

    def describe(self, metadata: Metadata, results: list[list[WriteResult]]) -> bytes:
        """The content of `.metadata`: the same in each save of a plan."""
        if self._planner is not None and self._planner.known:
            return self._planner.kept.metadata
        super().finish(metadata, results)
        assert isinstance(self.fs, _Captured)
        data = self.fs.stream.getvalue()
        if self._planner is not None:
            self._planner.kept.metadata = data
        return data

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # without names: see `describe`

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class StorageReader(FileSystemReader):
    """Reads a checkpoint's tensors, each piece once; what is read is checked before it is used."""

    def __init__(self, folder: Storage, metadata: Metadata, sums: PieceSums | None) -> None:
        """sums: None where the files have been checked already, as a whole."""
        super().__init__(str(folder))
        self._folder, self._metadata, self._sums = folder, metadata, sums

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places: dict[str, dict[tuple[int, int], list[ReadItem]]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            pieces = places.setdefault(info.relative_path, {})
            pieces.setdefault((info.offset, info.length), []).append(item)
        for file, pieces in places.items():
            with self._pieces(file) as read:
                for place in sorted(pieces):
                    self._load_piece(read(*place), pieces[place], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def check_pieces(self, prefix: str, rank: int, world_size: int) -> None:
        """Read and check a rank's share of the pieces of a prefix, which nobody loads."""
        unread = [index for index in self._metadata.storage_data if index.fqn.startswith(prefix)]
        for index in unread[rank::world_size] if self._sums is not None else []:
            info = self._metadata.storage_data[index]
            with self._pieces(info.relative_path) as read:
                read(info.offset, info.length)

    @contextlib.contextmanager
    def _pieces(self, file: str) -> Iterator[Callable[[int, int], bytes]]:
        """Reads pieces of a file, as (begin, length), and checks them."""
        with reading(self._folder, file), self._folder.reader(file) as read:

            def checked(begin: int, length: int) -> bytes:
                data = read(begin, length)
                if self._sums is not None:
                    self._sums.check(file, begin, data)
                return data

            yield checked

    def _load_piece(self, data: bytes, items: list[ReadItem], planner: LoadPlanner) -> None:
        info = self.storage_data[items[0].storage_index]
        descriptors = getattr(info, "transform_descriptors", None) or ()
        stream = self.transforms.transform_load_stream(items[0], descriptors, io.BytesIO(data))
        if any(item.type == LoadItemType.BYTE_IO for item in items):
            planner.load_bytes(items[0], io.BytesIO(stream.read()))
            return
        saved = torch.load(stream, map_location="cpu", weights_only=True)
        for item in items:
            begins_and_lengths = zip(item.storage_offsets, item.lengths, strict=True)
            part = saved[tuple(slice(at, at + length) for at, length in begins_and_lengths)]
            target = planner.resolve_tensor(item).detach()
            if target.size() != part.size():
                raise DamagedCheckpoint(self._folder, METADATA, f"has other shapes than {info}")
            target.copy_(part)
            planner.commit_tensor(item, target)


class TensorsOnly(DefaultLoadPlanner):
    """DCP's planner, which refuses entries that it would unpickle."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """torch's allocates tensors that are on meta, and replaces by None what it does not know."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        if isinstance(found, Blocks):
            assert index.offset is not None
            return found.blocks[index.offset]
        return super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise UnsafeCheckpoint(f"{read_item.storage_index.fqn} in the checkpoint is not a tensor")


class _Captured(FileSystemBase):
    """In place of the file system to which DCP writes `.metadata`: the bytes are kept."""

    def __init__(self) -> None:
        self.stream = io.BytesIO()

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        self.stream = io.BytesIO()
        yield self.stream

    def concat_path(self, path: Any, suffix: str) -> str:
        return suffix

    def init_path(self, path: Any) -> Any:
        return os.fspath(path)

    def rename(self, path: Any, new_path: Any) -> None:
        """From its temporary name."""

    def mkdir(self, path: Any) -> None:
        """There is none."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return False

    def rm_file(self, path: Any) -> None:
        """There is none."""

    def ls(self, path: Any) -> list[str]:
        return []
