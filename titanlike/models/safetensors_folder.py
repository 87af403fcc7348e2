"""A folder of safetensors, as transformers has them: slices are read of it, and it is written of a
stream.

A file is 8 bytes of length, a JSON object of that length (name -> dtype, shape, begin and end of
its bytes), and the tensors' bytes without gaps (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titanlike.config.errors import some_names

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# the format's words
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}


class SafetensorsFolder:
    """Reads headers when it is made, and of tensors what is asked for. Raises ValueError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        # name of a tensor -> file
        files = _indexed(folder)
        self.files = dict.fromkeys(self._file(SINGLE).keys(), SINGLE) if files is None else files

    def tensor(self, key: str) -> Tensor:
        return self._file(self.files[key]).get_tensor(key)

    def _file(self, name: str) -> Any:
        """An open file."""
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"path={self.folder}: {name} cannot be read: {error}; copy the file again"
                ) from None
        return self._open[name]

    def slice(self, key: str) -> Any:
        """A tensor from which slices are read."""
        try:
            return self._file(self.files[key]).get_slice(key)
        except SafetensorError:
            raise ValueError(
                f"path={self.folder}: {self.files[key]} has no {key}, which {INDEX} says it has; "
                "copy the files again"
            ) from None


def has_weights(folder: Path) -> bool:
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def other_weights(folder: Path) -> list[str]:
    """Files with weights in formats that are not read here."""
    kinds = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".safetensors")
    return sorted(path.name for path in folder.glob("*") if path.suffix in kinds)


def _indexed(folder: Path) -> dict[str, str] | None:
    """Name of a tensor -> file; None without an index. Raises ValueError."""
    index = folder / INDEX
    if not index.is_file():
        return None
    try:
        files = dict(json.loads(index.read_text())["weight_map"])
        elsewhere = sorted({name for name in files.values() if Path(name).name != name})
    except (ValueError, KeyError, TypeError) as error:
        reason = f"path={folder}: {INDEX} is damaged ({error}); copy it again"
        raise ValueError(reason) from None
    if elsewhere:
        reason = f"names {some_names(elsewhere)}, which is no file of this folder"
        raise ValueError(f"path={folder}: {INDEX} {reason}; put the file into it")
    lost = sorted({name for name in files.values() if not (folder / name).is_file()})
    if lost:
        raise ValueError(f"path={folder}: lacks {some_names(lost)}; copy the files again")
    return files


# --- writing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_folder(
    folder: Path, planned: Iterable[Planned], shard_bytes: int, values: Iterable[Tensor]
) -> None:
    """Write tensors, in their order, to files of at most `shard_bytes` each, where a single tensor
    is not larger.

    values: of all of them, in parts: each of a part of a tensor, or of several, of one dtype.
    """
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in planned:
        if shards[-1] and size + tensor.bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    words = {dtype: word for word, dtype in DTYPES.items()}
    files: dict[str, str] = {}  # name of a tensor -> file
    parts, data, total = iter(values), memoryview(b""), 0
    for number, shard in enumerate(shards, 1):
        several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file_name = several if len(shards) > 1 else SINGLE
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        left = 0
        for tensor in shard:
            places = [left, left := left + tensor.bytes]
            about = {"dtype": words[tensor.dtype], "shape": tensor.shape, "data_offsets": places}
            header[tensor.name], files[tensor.name] = about, file_name
        total += left
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file_name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            while left:
                if not data:
                    data = next(parts).contiguous().flatten().view(torch.uint8).numpy().data
                part, data = data[:left], data[left:]
                left -= file.write(part)
            file.flush()
            os.fsync(file.fileno())
    for _ in parts:  # of empty tensors
        pass
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
