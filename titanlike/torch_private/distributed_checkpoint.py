"""Distributed checkpoints (DCP): those that another version of torch wrote, and a file's entries."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.storage import WriteResult


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
