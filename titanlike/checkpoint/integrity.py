"""A checkpoint is complete if every file has the size and checksum that its manifest lists.

    step-00000100/
        __R_0.distcp .metadata   tensors and their layout, names as in the whole model (DCP)
        pieces.json              a checksum of each chunk in these files: of what DCP calls a block
                                 of a tensor, so that what a rank reads is checked as it is read
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
import re
import shlex
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import xxhash

from titanlike.checkpoint.storage import Storage
from titanlike.config.files import NotRegularFile, parse_object
from titanlike.config.program import tool_program

MARKER = "COMMITTED"  # without this file a checkpoint is incomplete
DAMAGED_MARKER = "DAMAGED"
MANIFEST = "files.json"
STATE = "state.json"
METADATA = ".metadata"
CHUNKS = "pieces.json"
# version of these files: 1 has no pieces.json, and the step count of each parameter of its own
FORMAT = 2
_NUMBER = (float, int, type(None))
_REQUIRED: dict[str, tuple[type, ...]] = {  # in state.json
    "step": (int,),
    "progress": (dict,),
    "val_loss": _NUMBER,
    "same": (dict,),
    "sequences": (int, type(None)),  # None in a restored checkpoint of another program
}
_OPTIONAL: dict[str, tuple[type, ...]] = {
    **{"layout": (dict,), "world_size": (int,), "run_dir": (str,), "torch": (str,)},
    **{f"layout.{key}": (int,) for key in ("pp", "dp", "replicate")},
    **{f"layout.{key}": (str,) for key in ("schedule", "split")},
    **{"progress.step": (int,), "progress.value": _NUMBER},
    **{"progress.left_out": (int,), "progress.guard": (dict,)},
    **{"data": (dict,), "config": (dict,), "model": (dict,)},
}
_STEP_IN_NAME = re.compile(r"(?:step|model)-(\d{8,})")
_READ = 2**22  # bytes at a time
_DIGEST = 16  # bytes
UNEQUAL = "does not match the checksum that was written"

Manifest = dict[str, tuple[int, str]]  # file -> bytes, checksum


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is missing or differs from what was written."""

    def __init__(self, folder: Storage, file: str, reason: str) -> None:
        self.folder, self.file, self.reason = folder, file, reason
        super().__init__(f"checkpoint {folder} is damaged: {file} {reason}")

    def __reduce__(self) -> Any:  # between ranks
        return type(self), (self.folder, self.file, self.reason)


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
    text = f"{reason}\nIf its bytes are right, {repair_command(folder)} lifts this mark.\n"
    try:
        marker = folder.read(MARKER)
    except (FileNotFoundError, NotRegularFile):
        marker = b""
    folder.write(DAMAGED_MARKER, text.encode() + marker)
    folder.remove(MARKER)


def marked_checksum(folder: Storage) -> str:
    """What the marker of a checkpoint that was marked as damaged must hold. Raises DamagedCheckpoint."""
    with reading(folder, DAMAGED_MARKER):
        marked = folder.read(DAMAGED_MARKER).decode(errors="replace")
    with reading(folder, MANIFEST):
        expected = checksum(folder.read(MANIFEST))
    recorded = marked.strip().rpartition("\n")[2]
    if re.fullmatch(r"[0-9a-f]{32}", recorded) and recorded != expected:
        raise DamagedCheckpoint(folder, MANIFEST, "does not match the checksum in its mark")
    return expected


def lift_mark(folder: Storage, expected: str) -> None:
    """Commit a marked checkpoint again, after all of its bytes have been found right."""
    folder.write(MARKER, expected.encode() + b"\n")
    folder.remove(DAMAGED_MARKER)


def repair_command(folder: Storage) -> str:
    """The shell line that reads a marked checkpoint again."""
    return shlex.join([*tool_program("checkpoint"), "verify", str(folder), "--repair"])


def read_manifest(folder: Storage, expected: str | None = None) -> Manifest:
    """Sizes and checksums of a committed checkpoint's files. Raises DamagedCheckpoint.

    expected: the checksum of the manifest itself; None = as the marker says.
    """
    with reading(folder, MANIFEST):
        text = folder.read(MANIFEST)
    if expected is None:
        with reading(folder, MARKER):
            marker = folder.read(MARKER).decode(errors="replace")
        # a marker restored by renaming DAMAGED has the reason above the checksum
        expected = marker.strip().rpartition("\n")[2]
    if checksum(text) != expected:
        raise DamagedCheckpoint(folder, MANIFEST, f"does not match the checksum in {MARKER}")
    try:
        files = {name: _manifest_entry(entry) for name, entry in parse_object(text).items()}
    except ValueError as error:
        raise DamagedCheckpoint(folder, MANIFEST, str(error)) from None
    for name in files:
        if os.path.basename(name) != name or name in (".", ".."):
            raise DamagedCheckpoint(folder, MANIFEST, f"names a file outside the folder, {name!r}")
    if missing := [name for name in (STATE, METADATA) if name not in files]:
        raise DamagedCheckpoint(folder, MANIFEST, f"does not list {' and '.join(missing)}")
    return files


def _manifest_entry(entry: Any) -> tuple[int, str]:
    match entry:
        case [int(size), str(sums)]:
            return size, sums
    raise ValueError("is not a list of files")


def wrong_sizes(folder: Storage, files: Manifest) -> Iterator[DamagedCheckpoint]:
    """The files that are missing or have another size, by one listing."""
    sizes = folder.sizes()
    for name, (size, _) in files.items():
        try:
            with reading(folder, name):
                # a listing of an object store may be behind, and leaves out what is no file there
                here = sizes[name] if sizes.get(name) is not None else folder.size(name)
        except DamagedCheckpoint as damage:
            yield damage
            continue
        if here != size:
            reason = f"has {here:,} bytes, and {size:,} were written"
            yield DamagedCheckpoint(folder, name, reason)


def check_sizes(folder: Storage, files: Manifest) -> None:
    """Check that each file exists with its size. Raises DamagedCheckpoint."""
    for damage in wrong_sizes(folder, files):
        raise damage


def check_sums(folder: Storage, files: Manifest, names: Iterable[str]) -> None:
    """Read these files and check their checksums. Raises DamagedCheckpoint."""
    for name in names:
        with reading(folder, name):
            checksum_read = folder.read_by(name, _file_checksum)
        if checksum_read != files[name][1]:
            raise DamagedCheckpoint(folder, name, UNEQUAL)


def _file_checksum(file: IO[bytes]) -> str:
    hasher = xxhash.xxh3_128()
    while chunk := file.read(_READ):
        hasher.update(chunk)
    return hasher.hexdigest()


def read_checked(folder: Storage, files: Manifest, name: str) -> bytes:
    """A file that is read whole, found right. Raises DamagedCheckpoint."""
    with reading(folder, name):
        data = folder.read(name)
    if checksum(data) != files[name][1]:
        raise DamagedCheckpoint(folder, name, UNEQUAL)
    return data


def check_quick(folder: Storage) -> None:
    """Check everything but the contents of the tensors' files. Raises DamagedCheckpoint."""
    files = read_manifest(folder)
    check_sizes(folder, files)
    read_state(folder, files)


def check_all(folder: Storage) -> None:
    """Check every file, reading all. Raises DamagedCheckpoint."""
    files = read_manifest(folder)
    check_sizes(folder, files)
    check_sums(folder, files, files)
    read_state(folder)


def read_state(folder: Storage, files: Manifest | None = None) -> dict[str, Any]:
    """state.json. Raises DamagedCheckpoint, and ValueError for a later format.

    files: the manifest with its checksum; None = not compared.
    """
    with reading(folder, STATE):
        text = folder.read(STATE) if files is None else read_checked(folder, files, STATE)
    try:
        state = parse_object(text)
    except ValueError as error:
        raise DamagedCheckpoint(folder, STATE, str(error)) from None
    version = state.get("format", FORMAT)
    if type(version) is int and version > FORMAT:
        raise ValueError(
            f"checkpoint {folder} has format {version}, and this version of titanlike reads "
            f"{FORMAT}: it was written by a later one"
        )
    for reason in _state_problems(folder, state):
        raise DamagedCheckpoint(folder, STATE, reason)
    return state


def _state_problems(folder: Storage, state: dict[str, Any]) -> Iterator[str]:
    if missing := [key for key in _REQUIRED if key not in state]:
        yield f"lacks {', '.join(missing)}"
    for key, types in (_REQUIRED | _OPTIONAL | {"format": (int,)}).items():
        group, _, name = key.rpartition(".")
        owner = state.get(group, {}) if group else state
        if name in owner and type(owner[name]) not in types:
            yield f"has {repr(owner[name])[:40]} as {key}"
    step, progress = state["step"], state["progress"]
    named = _STEP_IN_NAME.fullmatch(folder.name)
    if step < 0 or (named and int(named[1]) != step) or progress.get("step", step) != step:
        yield f"is of another step, {str(step)[:40]}"
    for name, kept in progress.get("guard", {}).items():
        if type(kept) is not (int if name == "nonfinite" else list):
            yield f"has {repr(kept)[:40]} as progress.guard.{name}"


@dataclass(frozen=True)
class ChunkChecksums:
    """The checksums of all chunks of a checkpoint.

    `pieces.json` is an object: file -> [[end of each chunk, in bytes, ...], "32 hexadecimal digits of
    xxh3 a chunk"], with the chunks in the order of the file, each beginning where the one before it
    ends; together they are the whole file.
    """

    folder: Storage
    files: dict[str, tuple[list[int], bytes]]

    def check(self, file: str, begin: int, length: int, digest: bytes) -> None:
        """Raises DamagedCheckpoint where bytes with this checksum are not a chunk that was written."""
        ends, sums = self.files.get(file, ([], b""))
        at = bisect_left(ends, begin + length)
        is_chunk = ends[at : at + 1] == [begin + length] and begin == (ends[at - 1] if at else 0)
        if not is_chunk or digest != sums[at * _DIGEST : (at + 1) * _DIGEST]:
            raise DamagedCheckpoint(self.folder, file, UNEQUAL)

    def dump(self) -> bytes:
        """The content of the file."""
        return (
            json.dumps({k: [ends, sums.hex()] for k, (ends, sums) in self.files.items()}).encode()
            + b"\n"
        )


def read_chunk_checksums(folder: Storage, files: Manifest) -> ChunkChecksums | None:
    """None for a checkpoint of an older version, which has no such file. Raises DamagedCheckpoint."""
    if CHUNKS not in files:
        return None
    data = read_checked(folder, files, CHUNKS)
    try:
        checksums = {
            name: (ends, bytes.fromhex(sums)) for name, (ends, sums) in json.loads(data).items()
        }
        valid = all(
            all(type(end) is int for end in ends) and len(sums) == _DIGEST * len(ends)
            for ends, sums in checksums.values()
        )
    except (ValueError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise DamagedCheckpoint(folder, CHUNKS, "is not a list of pieces")
    return ChunkChecksums(folder, checksums)


@contextlib.contextmanager
def reading(folder: Storage, name: str) -> Iterator[None]:
    """A verdict on a file that is not there; an error of reading it is none."""
    try:
        yield
    except FileNotFoundError:
        raise DamagedCheckpoint(folder, name, "is missing") from None
    except NotRegularFile:
        raise DamagedCheckpoint(folder, name, "is not a regular file") from None
