"""Writing tensors into a file of a checkpoint, one after the other, as DCP reads them; with checksums."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
import xxhash
from torch import Tensor

from titanlike.checkpoint.storage import Storage


@dataclass(frozen=True)
class WrittenFile:
    """What was written into a file of tensors."""

    name: str
    size: int
    checksum: str  # of the whole file
    ends: list[int]  # where each chunk ends
    sums: bytes  # the checksum of each chunk, one after the other


def write_tensors(folder: Storage, name: str, tensors: Iterable[Tensor]) -> WrittenFile:
    """Write a file of torch.save's records, durably. Raises OSError."""
    with folder.open(name, "wb") as raw:
        stream, ends, sums = _ChecksumStream(raw), [], []
        for tensor in tensors:
            try:
                torch.save(_alone(tensor), cast(IO[bytes], stream))
            except RuntimeError:
                if stream.error is not None:  # torch.save raises an error of its own instead
                    raise stream.error from None
                raise
            ends.append(stream.size)
            sums.append(stream.end_chunk())
        raw.flush()
        if folder.local:
            os.fsync(raw.fileno())
    return WrittenFile(name, stream.size, stream.whole.hexdigest(), ends, b"".join(sums))


def _alone(tensor: Tensor) -> Tensor:
    """On the CPU, without the rest of its storage, which torch.save would write, too."""
    tensor = tensor.detach().cpu()
    if tensor.untyped_storage().size() != tensor.numel() * tensor.element_size():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


class _ChecksumStream:
    """A stream for torch.save, which writes sequentially."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.size, self.whole, self._chunk = 0, xxhash.xxh3_128(), xxhash.xxh3_128()
        self.error: OSError | None = None  # the first

    def end_chunk(self) -> bytes:
        """The checksum of what was written since the chunk before."""
        digest, self._chunk = self._chunk.digest(), xxhash.xxh3_128()
        return digest

    def write(self, data: Any) -> int:
        try:
            self._raw.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.whole.update(data)
        self._chunk.update(data)
        self.size += len(data)
        return len(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._raw.flush()
