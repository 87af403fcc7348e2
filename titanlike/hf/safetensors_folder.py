"""A folder of safetensors, as transformers writes it: reads slices, and writes file by file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from titanlike.core.config.errors import some_names
from titanlike.core.config.files import as_record, read_object, sync_to_disk

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# the format's words
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}


class SafetensorsFolder:
    """Reads headers when it is made, and slices of tensors on demand. Raises ValueError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        # name of a tensor -> file
        if (folder / INDEX).is_file():
            self.files = _indexed(folder)
        else:
            self.files = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)

    def tensor(self, key: str) -> Tensor:
        return self._file(self.files[key]).get_tensor(key)

    def _file(self, name: str) -> Any:
        """An open file, cached."""
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"path={self.folder}: {name} cannot be read: {error}; copy the file again"
                ) from None
        return self._open[name]

    def slice(self, key: str) -> Any:
        """A tensor from which slices can be read."""
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
    """Weight files in unsupported formats."""
    kinds = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".safetensors")
    return sorted(path.name for path in folder.glob("*") if path.suffix in kinds)


@dataclass(frozen=True)
class _Index:
    weight_map: dict[str, str]  # tensor -> file


def _indexed(folder: Path) -> dict[str, str]:
    """Map tensor names to files by the folder's index. Raises ValueError."""
    try:
        files = as_record(read_object(folder / INDEX), _Index).weight_map
        elsewhere = sorted({name for name in files.values() if Path(name).name != name})
    except (OSError, ValueError) as error:
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


def write_file(tensors: dict[str, Tensor], path: Path, about: dict[str, str]) -> None:
    """Write a file by safetensors, with the umask's mode, and sync it to disk.

    Raises OSError.
    """
    path.touch(exist_ok=False)
    mode = path.stat().st_mode  # save_file replaces it by 0600
    try:
        save_file(tensors, path, about)
    except SafetensorError as error:  # also raised for a full disk
        raise OSError(f"{path} could not be written: {error}") from error
    with open(path, "rb+") as file:
        os.fchmod(file.fileno(), mode)
        sync_to_disk(file.fileno())


def write_folder(
    folder: Path, sizes: Mapping[str, int], shard_bytes: int, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write tensors to files of at most `shard_bytes` each, except larger single tensors; one file
    is in memory at a time.

    sizes: name -> bytes; tensors: of these names, in the same order.
    """
    shards: list[int] = [0]  # number of tensors in each
    size = 0
    for count in sizes.values():
        if shards[-1] and size + count > shard_bytes:
            shards.append(0)
            size = 0
        shards[-1] += 1
        size += count
    files: dict[str, str] = {}  # name of a tensor -> file
    names, values = iter(sizes), iter(tensors)
    for number, length in enumerate(shards, 1):
        several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = several if len(shards) > 1 else SINGLE
        files |= dict.fromkeys(islice(names, length), name)
        write_file(dict(islice(values, length)), folder / name, {"format": "pt"})
    if len(shards) > 1:
        total = sum(sizes.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
