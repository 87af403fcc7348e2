"""The safetensors of a folder that transformers wrote: which file has a tensor, and slices of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_SHOWN = 3  # names in a message


class SafetensorsFolder:
    """Reads headers when it is made, and of tensors what is asked for. Raises ValueError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _files(folder)  # name of a tensor -> file
        self._open: dict[str, Any] = {}

    def tensor(self, key: str) -> Tensor:
        return self._handle(key).get_tensor(key)

    def _handle(self, key: str) -> Any:
        """The open file that has a tensor."""
        name = self.files[key]
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
            return self._handle(key).get_slice(key)
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


def _files(folder: Path) -> dict[str, str]:
    """Name of a tensor -> file. Raises ValueError."""
    index = folder / INDEX
    if index.is_file():
        try:
            files = dict(json.loads(index.read_text())["weight_map"])
            elsewhere = sorted({name for name in files.values() if Path(name).name != name})
        except (ValueError, KeyError, TypeError) as error:
            reason = f"path={folder}: {INDEX} is damaged ({error}); copy it again"
            raise ValueError(reason) from None
        if elsewhere:
            reason = f"names {first_names(elsewhere)}, which is no file of this folder"
            raise ValueError(f"path={folder}: {INDEX} {reason}; put the file into it")
        lost = sorted({name for name in files.values() if not (folder / name).is_file()})
        if lost:
            raise ValueError(f"path={folder}: lacks {first_names(lost)}; copy the files again")
        return files
    try:
        with safe_open(folder / SINGLE, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), SINGLE)
    except (OSError, SafetensorError) as error:
        reason = f"path={folder}: {SINGLE} cannot be read: {error}; copy the file again"
        raise ValueError(reason) from None


def first_names(names: list[str]) -> str:
    """Some names, for a message."""
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more
