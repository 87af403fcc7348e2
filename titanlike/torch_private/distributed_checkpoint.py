"""Distributed checkpoints (DCP): blocks of a tensor, and positions of chunks in files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Blocks:
    """A tensor of which this rank holds some blocks, as DCP plans to save and load it.

    DCP calls the two undocumented methods below on objects of any class, as on DTensors. Without
    them a rank's part is saved under its own shape. Torch 2.15 has a public API,
    `CheckpointableTensor`: this class can go when older versions are dropped. Test:
    `test_fences.py::test_blocks_of_a_tensor_have_no_public_way_in_all_versions`.
    """

    held: Tensor  # this rank's part (a DTensor's local tensor)
    shape: torch.Size  # of the full tensor
    blocks: Mapping[torch.Size, Tensor]  # views of `held`, by their offsets in the full tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    def size(self) -> torch.Size:
        return self.shape

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.blocks[chunk.offsets]),
                    size=self.shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets, block.shape) for offsets, block in self.blocks.items()
        ]


def describe_files(
    metadata: Metadata, places: Iterable[tuple[MetadataIndex, str, int, int]]
) -> Metadata:
    """Metadata completed with the position of each chunk (file, offset, length), as torch's writer
    does, for its reader.

    The class of a position is private. It can go when torch makes it public:
    `test_fences.py::test_the_place_of_a_chunk_is_still_private`.
    """
    storage_data = {
        index: _StorageInfo(file, begin, length) for index, file, begin, length in places
    }
    return replace(
        metadata,
        version=CURRENT_DCP_VERSION,
        storage_data=storage_data,
        storage_meta=StorageMeta(),
    )


def describe_record(record: Any) -> tuple[Tensor, int]:
    """A meta tensor like the one in a torch.save record, and the offset of its values, which are
    not read. record: a seekable file.

    The attribute is documented, for FakeTensors, with an underscore. Test:
    `test_fences.py::test_a_record_says_where_its_values_begin`.
    """
    tensor = torch.load(record, map_location="meta", weights_only=True)
    return tensor, tensor.untyped_storage()._checkpoint_offset
