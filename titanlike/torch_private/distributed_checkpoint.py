"""Distributed checkpoints (DCP): those that another version of torch wrote, and a file's entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult


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


def read_newer_checkpoints() -> None:
    """Let torch 2.11 and 2.13 read a checkpoint that 2.15 wrote.

    2.15 pickles one more field, the strides, into each tensor's properties.
    Symptom without it: "too many values to unpack".
    Test: `test_fences.py::test_a_newer_checkpoint_still_needs_help_to_be_read`.
    """
    if "strides" in TensorProperties.__dataclass_fields__ or hasattr(
        TensorProperties.__setstate__, "cut"
    ):
        return
    read = TensorProperties.__setstate__

    def cut(self: TensorProperties, state: tuple[Any, ...]) -> None:
        read(self, tuple(state)[:5])

    cut.cut = True  # type: ignore[attr-defined]
    TensorProperties.__setstate__ = cut  # type: ignore[method-assign]


def written_piece(index: MetadataIndex, file: str, begin: int, length: int) -> WriteResult:
    """What torch's own writer returns for an entry that it has written, and its reader looks up.

    The class of the place in the file is private, and `.metadata` has objects of it. It can go when
    torch makes it public: `test_fences.py::test_the_place_of_a_piece_is_still_private`.
    """
    return WriteResult(index, length, _StorageInfo(file, begin, length))
