"""Distributed checkpoints (DCP): blocks of a tensor, and the places of chunks in files."""

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

    DCP asks objects of any class for the two methods below, DTensor's among them, which its
    documentation does not name. Without them a rank's part is saved under its own shape.
    Torch 2.15 has a public way, `CheckpointableTensor`: it can go with the versions before.
    Test: `test_fences.py::test_blocks_of_a_tensor_have_no_public_way_in_all_versions`.
    """

    held: Tensor  # all that this rank has of it; a DTensor's local part, if it is one
    shape: torch.Size  # of the whole
    blocks: Mapping[torch.Size, Tensor]  # views of `held`, by their offsets in the whole

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
        return [ChunkStorageMetadata(at, block.shape) for at, block in self.blocks.items()]


def describe_files(
    metadata: Metadata, places: Iterable[tuple[MetadataIndex, str, int, int]]
) -> Metadata:
    """The description of tensors with the place of each chunk (file, begin, length), as torch's own
    writer completes it, which its reader looks up.

    The class of a place is private, and `.metadata` has objects of it. It can go when torch makes
    it public: `test_fences.py::test_the_place_of_a_chunk_is_still_private`.
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
    """A tensor on meta like the one in a record of torch.save, and where in it the values begin,
    which are not read. record: a file that can be read and searched.

    The attribute is documented, for torch's FakeTensors, under a name with an underscore. Test:
    `test_fences.py::test_a_record_says_where_its_values_begin`.
    """
    tensor = torch.load(record, map_location="meta", weights_only=True)
    return tensor, tensor.untyped_storage()._checkpoint_offset
