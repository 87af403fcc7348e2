"""Checksums of the pieces of a checkpoint's files, so that what a rank reads is checked as it is read.

A piece is one entry of DCP's in a file: a block of a tensor. `pieces.json` is an object,

    file -> [[end of each piece, in bytes, ...], "32 hexadecimal digits of xxh3 a piece"]

with the pieces in the order of the file, each beginning where the one before it ends; together they
are the whole file. The manifest has the checksum of `pieces.json` itself, and a checkpoint of an
older version has no such file. No torch.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import xxhash

from titanlike.checkpoint.integrity import UNEQUAL, DamagedCheckpoint, Manifest, read_checked
from titanlike.checkpoint.storage import Storage

PIECES = "pieces.json"
_DIGEST = 16  # bytes


@dataclass(frozen=True)
class WrittenFile:
    """What was written into a file of tensors."""

    name: str
    size: int
    checksum: str  # of the whole file
    ends: list[int]  # where each piece ends
    sums: bytes  # of each piece, one after the other


class PieceSums:
    """The checksums of all pieces of a checkpoint."""

    def __init__(self, folder: Storage, files: dict[str, tuple[list[int], bytes]]) -> None:
        self._folder, self._files = folder, files

    def check(self, file: str, begin: int, data: bytes) -> None:
        """Raises DamagedCheckpoint where these are not the bytes of a piece that was written."""
        self.check_digest(file, begin, len(data), xxhash.xxh3_128_digest(data))

    def check_digest(self, file: str, begin: int, length: int, digest: bytes) -> None:
        """The same for bytes of which the checksum is given."""
        ends, sums = self._files.get(file, ([], b""))
        at = bisect_left(ends, begin + length)
        is_piece = ends[at : at + 1] == [begin + length] and begin == (ends[at - 1] if at else 0)
        if not is_piece or digest != sums[at * _DIGEST : (at + 1) * _DIGEST]:
            raise DamagedCheckpoint(self._folder, file, UNEQUAL)


def dump_pieces(written: list[WrittenFile]) -> bytes:
    return json.dumps({one.name: [one.ends, one.sums.hex()] for one in written}).encode() + b"\n"


def read_pieces(folder: Storage, files: Manifest) -> PieceSums | None:
    """Of a checkpoint with this manifest; None of an older version's. Raises DamagedCheckpoint."""
    if PIECES not in files:
        return None
    data = read_checked(folder, files, PIECES)
    try:
        entries = {name: _entry(entry) for name, entry in json.loads(data).items()}
    except (ValueError, TypeError, AttributeError):
        raise DamagedCheckpoint(folder, PIECES, "is not a list of pieces") from None
    return PieceSums(folder, entries)


def _entry(entry: Any) -> tuple[list[int], bytes]:
    ends, sums = entry
    if not all(type(end) is int for end in ends) or len(sums) != 2 * _DIGEST * len(ends):
        raise ValueError
    return ends, bytes.fromhex(sums)
