"""Writing a folder of safetensors files from a stream of values: names and shapes first.

The format: 8 bytes of length, a JSON object of that length (name -> dtype, shape, begin and end of
its bytes), the tensors' bytes without gaps (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from titanlike.models.safetensors_folder import INDEX, SINGLE

# safetensors' words for dtypes
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_WORDS = {dtype: word for word, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Planned:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class ShardedSafetensors:
    """Writes planned tensors, in their order, to files of at most `shard_bytes` each, where a single
    tensor is not larger."""

    def __init__(self, folder: Path, planned: list[Planned], shard_bytes: int) -> None:
        self._folder, self._shards = folder, _shards(planned, shard_bytes)
        self._number = 0  # of the shard that is written
        self._file: IO[bytes] | None = None
        self._left = 0  # bytes of its tensors

    def write(self, values: Tensor) -> None:
        """The next values: of a part of a tensor, or of several, of one dtype."""
        data = values.contiguous().flatten().view(torch.uint8).numpy().data
        while data:
            if self._file is None:
                self._begin_shard()
            assert self._file is not None
            part, data = data[: self._left], data[self._left :]
            self._left -= self._file.write(part)
            if not self._left:
                self._end_shard()

    def close(self) -> int:
        """Write the index; the number of bytes of all tensors. All planned ones have been written."""
        while self._number < len(self._shards):  # of empty tensors alone
            self._begin_shard()
            self._end_shard()
        total = sum(one.bytes for shard in self._shards for one in shard)
        if len(self._shards) > 1:
            names = {
                one.name: self._name(number)
                for number, shard in enumerate(self._shards)
                for one in shard
            }
            index: dict[str, Any] = {"metadata": {"total_size": total}}
            index["weight_map"] = dict(sorted(names.items()))
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        return total

    def _name(self, number: int) -> str:
        count = len(self._shards)
        return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def _begin_shard(self) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for one in self._shards[self._number]:
            places = [at, at + one.bytes]
            header[one.name] = {
                "dtype": _WORDS[one.dtype],
                "shape": list(one.shape),
                "data_offsets": places,
            }
            at += one.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._left = at
        self._file = open(self._folder / self._name(self._number), "wb")  # noqa: SIM115
        self._file.write(len(text).to_bytes(8, "little") + text)

    def _end_shard(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file, self._number = None, self._number + 1


def _shards(planned: list[Planned], shard_bytes: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    size = 0
    for one in planned:
        if shards[-1] and size + one.bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(one)
        size += one.bytes
    return shards
