"""A checkpoint is complete if every file has the size and checksum that its manifest lists.

    step-00000100/
        __R_0.distcp .metadata   tensors and their layout, names as in the whole model (DCP)
        state.json               step, position in the data, layout, what a resume must not change
        files.json               the manifest: size in bytes and xxh3 checksum of each file above
        COMMITTED                the checksum of files.json; written last, removed first
        DAMAGED                  in its place: the reason for which a start rejected the checkpoint

No torch.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

import xxhash

from titanlike.checkpoint.storage import Storage

MARKER = "COMMITTED"  # without this file a checkpoint is incomplete
DAMAGED_MARKER = "DAMAGED"
MANIFEST = "files.json"
STATE = "state.json"
METADATA = ".metadata"
FORMAT = 1  # version of these files
_REQUIRED = ("step", "progress", "val_loss", "same", "sequences")  # in state.json
_CHUNK = 2**22  # bytes read at a time

Manifest = dict[str, tuple[int, str]]  # file -> bytes, checksum


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is missing or differs from what was written."""

    def __init__(self, folder: Storage, file: str, reason: str) -> None:
        self.folder, self.file, self.reason = folder, file, reason
        super().__init__(f"checkpoint {folder} is damaged: {file} {reason}")


class UnsafeCheckpoint(ValueError):
    """A file of a checkpoint asks for what loading does not need: it might execute code."""


def checksum(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def commit(folder: Storage, files: Manifest, state: dict[str, Any]) -> None:
    """Complete a checkpoint whose tensor files are durable: state, manifest, then the marker."""
    text = json.dumps({"format": FORMAT, **state}, indent=1).encode() + b"\n"
    folder.write(STATE, text)
    files = dict(sorted({**files, STATE: (len(text), checksum(text))}.items()))
    lines = [f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in files.items()]
    manifest = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    folder.write(MANIFEST, manifest)
    folder.sync()
    folder.write(MARKER, checksum(manifest).encode() + b"\n")
    folder.parent.sync()


def delete_checkpoint(folder: Storage) -> None:
    """Delete a checkpoint, its marker first: a crash leaves an incomplete one, never a damaged one."""
    folder.remove(MARKER)
    folder.remove_all()


def mark_damaged(folder: Storage, reason: str) -> None:
    """Replace a checkpoint's marker by DAMAGED; its files are kept for inspection."""
    text = f"{reason}\nTo use it again, rename this file to {MARKER}:\n"
    marker = folder.read(MARKER) if folder.exists(MARKER) else b""
    folder.write(DAMAGED_MARKER, text.encode() + marker)
    folder.remove(MARKER)


def read_manifest(folder: Storage) -> Manifest:
    """Sizes and checksums of a committed checkpoint's files. Raises DamagedCheckpoint."""
    with _reading(folder, MANIFEST):
        text = folder.read(MANIFEST)
    with _reading(folder, MARKER):
        marker = folder.read(MARKER).decode(errors="replace")
    # a marker restored by renaming DAMAGED has the reason above the checksum
    expected = marker.strip().rpartition("\n")[2]
    if checksum(text) != expected:
        raise DamagedCheckpoint(folder, MANIFEST, f"does not match the checksum in {MARKER}")
    try:
        files = {name: (int(size), str(sums)) for name, (size, sums) in json.loads(text).items()}
    except (AttributeError, TypeError, ValueError):
        raise DamagedCheckpoint(folder, MANIFEST, "is not a list of files") from None
    for name in files:
        if os.path.basename(name) != name or name in (".", ".."):
            raise DamagedCheckpoint(folder, MANIFEST, f"names a file outside the folder, {name!r}")
    return files


def check_sizes(folder: Storage, files: Manifest) -> None:
    """Check that each file exists with its size; reads none. Raises DamagedCheckpoint."""
    for name, (size, _) in files.items():
        try:
            found = folder.size(name)
        except FileNotFoundError:
            raise DamagedCheckpoint(folder, name, "is missing") from None
        if found != size:
            raise DamagedCheckpoint(folder, name, f"has {found:,} bytes, and {size:,} were written")


def check_sums(folder: Storage, files: Manifest, names: Iterable[str]) -> None:
    """Read these files and check their checksums. Raises DamagedCheckpoint."""
    for name in names:
        hasher = xxhash.xxh3_128()
        with _reading(folder, name), folder.open(name, "rb") as file:
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
        if hasher.hexdigest() != files[name][1]:
            raise DamagedCheckpoint(folder, name, "does not match the checksum that was written")


def check_quick(folder: Storage) -> None:
    """Check everything but the contents of the tensors' files. Raises DamagedCheckpoint."""
    files = read_manifest(folder)
    check_sizes(folder, files)
    check_sums(folder, files, [STATE])


def check_all(folder: Storage) -> None:
    """Check every file, reading all. Raises DamagedCheckpoint."""
    files = read_manifest(folder)
    check_sizes(folder, files)
    check_sums(folder, files, files)


def read_state(folder: Storage) -> dict[str, Any]:
    """state.json. Raises DamagedCheckpoint, and ValueError for a later format."""
    with _reading(folder, STATE):
        text = folder.read(STATE)
    try:
        state = json.loads(text)
    except ValueError as error:
        raise DamagedCheckpoint(folder, STATE, f"is not JSON: {error}") from None
    if not isinstance(state, dict):
        raise DamagedCheckpoint(folder, STATE, "is not a JSON object")
    if state.get("format", FORMAT) > FORMAT:
        raise ValueError(
            f"checkpoint {folder} has format {state['format']}, and this version of titanlike reads "
            f"{FORMAT}: it was written by a later one"
        )
    if missing := [key for key in _REQUIRED if key not in state]:
        raise DamagedCheckpoint(folder, STATE, f"lacks {', '.join(missing)}")
    return state


@contextlib.contextmanager
def _reading(folder: Storage, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DamagedCheckpoint(folder, name, "is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(folder, name, f"cannot be read: {error}") from None
