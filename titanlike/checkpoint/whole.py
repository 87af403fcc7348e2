"""What makes a checkpoint whole: every file with the size and checksum that were written down.

    step-00000100/
        __R_0.distcp .metadata   tensors and their layout, names as in the whole model (DCP)
        state.json               step, position, layout, what must be the same
        files.json               size in bytes and xxh3 checksum of each file above
        COMMITTED                the checksum of files.json; written last, removed first
        DAMAGED                  in its place: a start found this one damaged, and why

No torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import xxhash

from titanlike.checkpoint.storage import Storage

MARKER = "COMMITTED"  # the file without which a checkpoint does not count
REJECTED = "DAMAGED"
MANIFEST = "files.json"
STATE = "state.json"
METADATA = ".metadata"
FORMAT = 1  # of these files; a later program that changes them counts on
_NEEDED = ("step", "progress", "val_loss", "same", "sequences")  # in state.json
_PIECE = 2**22  # bytes read at a time

Manifest = dict[str, tuple[int, str]]  # file -> bytes, checksum


class Damaged(ValueError):
    """A checkpoint is not what was written: the text names it, the file, and what is wrong."""

    def __init__(self, folder: Storage, file: str, reason: str) -> None:
        self.folder, self.file, self.reason = folder, file, reason
        super().__init__(f"checkpoint {folder} is damaged: {file} {reason}")


class Refused(ValueError):
    """A file of a checkpoint asks for something that reading a checkpoint does not need."""


def checksum(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def commit(folder: Storage, files: Manifest, state: dict[str, Any]) -> None:
    """Make a checkpoint count, whose other files are written and durable."""
    text = json.dumps({"format": FORMAT, **state}, indent=1).encode() + b"\n"
    folder.write(STATE, text)
    files = dict(sorted({**files, STATE: (len(text), checksum(text))}.items()))
    lines = [f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in files.items()]
    manifest = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    folder.write(MANIFEST, manifest)
    folder.sync()
    folder.write(MARKER, checksum(manifest).encode() + b"\n")
    folder.parent.sync()


def revoke(folder: Storage) -> None:
    """Remove a checkpoint, its marker first: what a crash leaves of it does not count."""
    folder.remove(MARKER)
    folder.remove_all()


def reject(folder: Storage, reason: str) -> None:
    """Let a checkpoint no longer count, and keep its files for a look at them."""
    text = f"{reason}\nTo have it tried again, rename this file to {MARKER}:\n"
    marker = folder.read(MARKER) if folder.exists(MARKER) else b""
    folder.write(REJECTED, text.encode() + marker)
    folder.remove(MARKER)


def read_manifest(folder: Storage) -> Manifest:
    """Sizes and checksums of a committed checkpoint's files. Raises Damaged."""
    text = _read(folder, MANIFEST)
    # a marker that was given back by renaming DAMAGED has lines above
    expected = _read(folder, MARKER).decode(errors="replace").strip().rpartition("\n")[2]
    if checksum(text) != expected:
        raise Damaged(folder, MANIFEST, f"does not have the checksum that is in {MARKER}")
    try:
        files = {name: (int(size), str(sums)) for name, (size, sums) in json.loads(text).items()}
    except (AttributeError, TypeError, ValueError):
        raise Damaged(folder, MANIFEST, "is no list of files") from None
    for name in files:
        if os.path.basename(name) != name or name in (".", ".."):
            raise Damaged(folder, MANIFEST, f"names a file outside of it, {name!r}")
    return files


def check_sizes(folder: Storage, files: Manifest) -> None:
    """Whether each file is there with its size: quick, reads none. Raises Damaged."""
    for name, (size, _) in files.items():
        try:
            found = folder.size(name)
        except FileNotFoundError:
            raise Damaged(folder, name, "is missing") from None
        if found != size:
            raise Damaged(folder, name, f"has {found:,} bytes, and {size:,} were written")


def check_sums(folder: Storage, files: Manifest, names: Iterable[str]) -> None:
    """Whether these files have their checksums: reads them. Raises Damaged."""
    for name in names:
        hasher = xxhash.xxh3_128()
        try:
            with folder.open(name, "rb") as file:
                while piece := file.read(_PIECE):
                    hasher.update(piece)
        except FileNotFoundError:
            raise Damaged(folder, name, "is missing") from None
        except OSError as error:
            raise Damaged(folder, name, f"cannot be read: {error}") from None
        if hasher.hexdigest() != files[name][1]:
            raise Damaged(folder, name, "does not have the checksum that was written")


def check_all(folder: Storage) -> Manifest:
    """All of the above. Raises Damaged."""
    files = read_manifest(folder)
    check_sizes(folder, files)
    check_sums(folder, files, files)
    return files


def read_state(folder: Storage) -> dict[str, Any]:
    """What was saved beside the tensors: step, layout, and what must be the same.

    Raises Damaged, and ValueError for a format that is not known yet.
    """
    text = _read(folder, STATE)
    try:
        state = json.loads(text)
    except ValueError as error:
        raise Damaged(folder, STATE, f"is no JSON: {error}") from None
    if not isinstance(state, dict):
        raise Damaged(folder, STATE, "holds no JSON object")
    if state.get("format", FORMAT) > FORMAT:
        raise ValueError(
            f"checkpoint {folder} has format {state['format']}, and this program knows {FORMAT}: "
            "it was written by a later titanlike"
        )
    if absent := [key for key in _NEEDED if key not in state]:
        raise Damaged(folder, STATE, f"does not say {', '.join(absent)}")
    return state


def _read(folder: Storage, name: str) -> bytes:
    try:
        return folder.read(name)
    except FileNotFoundError:
        raise Damaged(folder, name, "is missing") from None
    except OSError as error:
        raise Damaged(folder, name, f"cannot be read: {error}") from None
