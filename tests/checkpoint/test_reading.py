"""Tensors of a checkpoint are read into their own memory, and damage in any byte of them is found."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from titanlike.checkpoint import storage
from titanlike.checkpoint.integrity import CheckpointHeader, Chunk, DamagedCheckpoint, SavedTensor
from titanlike.checkpoint.reader import ShardReader, read
from titanlike.checkpoint.staging import write_tensors
from titanlike.checkpoint.storage import Storage
from titanlike.torch_private.distributed_checkpoint import Blocks

ROWS, COLUMNS = 768, 1000
VALUES = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
FILE = "__0_0.distcp"


@pytest.fixture
def header(tmp_path: Path) -> CheckpointHeader:
    """A tensor of 3 MB that two ranks have written, each its rows."""
    folder, halves = Storage(tmp_path), VALUES.chunk(2)
    file = write_tensors(folder, FILE, halves)
    begins = [0, file.ends[0]]
    chunks = [
        Chunk((first, 0), (ROWS // 2, COLUMNS), FILE, begin, end - begin)
        for first, begin, end in zip((0, ROWS // 2), begins, file.ends, strict=True)
    ]
    tensors = {"w": SavedTensor("w", "float32", (ROWS, COLUMNS), chunks)}
    return CheckpointHeader(folder, {}, tensors, {FILE: (file.ends, file.sums)})


def own_memory(header: CheckpointHeader, target: Blocks) -> float:
    """Read a tensor; the share of the bytes that came into its own memory from the file."""
    held, counts = target.held, {True: 0, False: 0}
    original = storage.open_regular

    class Watched:
        def __init__(self, path: str) -> None:
            self.file = original(path)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def readinto(self, buffer: Any) -> int:
            size = self.file.readinto(buffer)
            at = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
            begin = held.untyped_storage().data_ptr()
            counts[begin <= at < begin + held.untyped_storage().nbytes()] += size
            return size

    with mock.patch.object(storage, "open_regular", Watched):
        read(header, {"w": target}, None)
    return counts[True] / (counts[True] + counts[False])


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "share"),
    [
        (slice(0, ROWS), slice(0, COLUMNS), torch.float32, 0.99),
        (slice(100, 500), slice(0, COLUMNS), torch.float32, 0.52),
        (slice(0, ROWS), slice(250, 750), torch.float32, 0.0),
        (slice(0, ROWS), slice(0, COLUMNS), torch.bfloat16, 0.0),
    ],
    ids=["as it was saved", "other rows", "columns", "another dtype"],
)
def test_a_contiguous_shard_is_read_directly_into_its_tensor(
    header: CheckpointHeader, rows: slice, columns: slice, dtype: torch.dtype, share: float
) -> None:
    """In one pass over the bytes, whose checksum is computed on the way."""
    wanted = VALUES[rows, columns].to(dtype)
    held = torch.full_like(wanted, -1)
    block = {torch.Size([rows.start, columns.start]): held}
    assert own_memory(header, Blocks(held, VALUES.shape, block)) == pytest.approx(share, abs=0.01)
    assert torch.equal(held, wanted)


def test_damage_in_any_byte_of_a_large_tensor_is_detected(header: CheckpointHeader) -> None:
    """In the record's own bytes, and in the first and last values; and where the file ends early."""
    path, chunk = Path(str(header.folder)) / FILE, header.tensors["w"].chunks[1]
    whole = path.read_bytes()
    end = chunk.begin + chunk.length
    values = whole.index(VALUES[ROWS // 2].numpy().tobytes())
    last = values + 4 * VALUES.numel() // 2
    places = [
        chunk.begin,
        chunk.begin + 70,
        values - 1,
        values,
        (values + end) // 2,
        last - 1,
        last,
    ]
    for place in (*places, end - 30, end - 1, None):
        damaged = bytearray(whole)
        if place is None:
            damaged = damaged[: (values + end) // 2]
        else:
            damaged[place] ^= 64
        path.write_bytes(damaged)
        says = "ends too early" if place is None else "does not match the checksum"
        with pytest.raises(DamagedCheckpoint, match=says):
            read(header, {"w": torch.zeros_like(VALUES)}, None)
        with pytest.raises(DamagedCheckpoint, match=says):
            deque(ShardReader(header).rows("w", 2**16), maxlen=0)
